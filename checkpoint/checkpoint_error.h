// CheckpointError: thrown by everything in checkpoint/.
#pragma once

#include <string>

#include "core/error.h"
#include "core/utf8.h"

namespace tessera {

/// Reports a checkpoint that cannot be written, or is missing, damaged or malformed. The message names the
/// file, parameter or tag, and is one line: control characters in names are escaped, a NUL as \x00.
class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& what)
      : Error(without_control_characters(what, /*one_line=*/true)) {}
};

}  // namespace tessera
