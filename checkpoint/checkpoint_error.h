// CheckpointError: what everything in checkpoint/ throws.
#pragma once

#include "core/error.h"

namespace tessera {

/// A checkpoint that cannot be written, or cannot be trusted: the message names the file, parameter or tag.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
