// Errors every Tessera library throws. Libraries never print, exit or abort; `main` catches
// tessera::Error, prints what() as one line and exits non-zero.
#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

/// Base of every error of this project. what() is one line: what was found, where, what was expected.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A configuration that cannot be used: the message starts with the file or the JSON path.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A collective, rendezvous or launch that failed: the message names the operation and the ranks.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A checkpoint that cannot be written, or cannot be trusted: the message names the file, parameter or tag.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// Input data that is missing, truncated or of another kind: the message names the file or record.
class DataError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
