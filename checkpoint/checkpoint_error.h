// CheckpointError: thrown by everything in checkpoint/.
#pragma once

#include "core/error.h"

namespace tessera {

/// Reports a checkpoint that cannot be written, or is missing, damaged or malformed. The message names the
/// file, parameter or tag.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
