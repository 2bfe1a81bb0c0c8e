// DiskError: a failed file operation.
#pragma once

#include <filesystem>
#include <string>
#include <utility>

#include "core/error.h"

namespace tessera {

/// Reports an operation on a file that has failed. what(): "cannot write DIR/FILE: No space left on device".
class DiskError : public Error {
 public:
  using Error::Error;
  struct Reason {
    std::string text;
  };
  DiskError(const std::string& what, Reason reason) : Error(what), reason_(std::move(reason.text)) {}

  /// The reason alone, "No space left on device", for messages of another form; what() if the error has no
  /// separate reason.
  std::string reason() const { return reason_.empty() ? what() : reason_; }

 private:
  std::string reason_;
};

/// The message for an errno. For EFBIG and EMFILE it names the limit of the process that was reached, if it
/// has one: of file sizes, and of open files.
std::string describe_errno(int error);

/// The same for an errno of fork(), or of a new thread. For EAGAIN it names the limit of processes and
/// threads that was reached, if there is one.
std::string describe_start_errno(int error);

/// Throws DiskError "cannot WHAT PATH: REASON"; the second form for an errno.
[[noreturn]] void throw_disk_error(const std::string& what, const std::filesystem::path& path,
                                   const std::string& reason);
[[noreturn]] void throw_disk_error(const std::string& what, const std::filesystem::path& path, int error);

}  // namespace tessera
