// CheckpointError: thrown by everything in checkpoint/.
#pragma once

#include "core/error.h"
#include "core/utf8.h"

namespace tessera {

/// Reports a checkpoint that cannot be written, or is missing, damaged or malformed. The message names the
/// file, parameter or tag, and is one line: control characters in names are escaped, a NUL as \x00.
class CheckpointError : public Error {
 public:
  /// The message is the parts one after the other, as str() puts them.
  template <class... Parts>
    requires(sizeof...(Parts) > 0)
  explicit CheckpointError(const Parts&... parts)
      : Error(without_control_characters(tessera::str(parts...), /*one_line=*/true)) {}
};

}  // namespace tessera
