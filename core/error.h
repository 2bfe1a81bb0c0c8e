// The errors that the libraries throw. Libraries never print, exit or abort; `main` catches
// tessera::Error, prints what() as one line and exits non-zero.
#pragma once

#include <stdexcept>

#include "core/str.h"

namespace tessera {

/// Base of every error of this project. what() is one line: what was found, where, what was expected.
class Error : public std::runtime_error {
 public:
  /// what() is the parts one after the other, as str() puts them.
  template <class... Parts>
    requires(sizeof...(Parts) > 0)
  explicit Error(const Parts&... parts) : std::runtime_error(tessera::str(parts...)) {}
};

/// An invalid configuration. The message starts with the file or the JSON path.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A failed collective, rendezvous or launch. The message names the operation and the ranks.
class CommError : public Error {
 public:
  using Error::Error;
};

/// Input data that is missing, truncated or malformed. The message names the file or record.
class DataError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
