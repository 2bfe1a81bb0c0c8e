// FileDescriptor: owns one open file descriptor and closes it.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <utility>

namespace tessera {

/// Largest size of one read or write call: the kernel transfers at most 2 GiB.
inline constexpr size_t kLargestCall = size_t{1} << 30;

/// Owns a file descriptor. Move-only; -1 is "none". Not thread-safe.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  /// Releases ownership to the caller.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

}  // namespace tessera
