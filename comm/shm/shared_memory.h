// SharedMemory: memory that several processes map. It has no name in any file system: it is passed on as a
// descriptor, and the kernel frees it when the last process that maps it ends, however it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/files/file_descriptor.h"

namespace tessera::comm::shm {

/// Rounds up. Messages say it.
constexpr int64_t mebibytes(int64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

/// Owns a memfd and its mapping. Move-only.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// `bytes` zeros, above 0. All pages are reserved here, because running out of them later is a
  /// SIGBUS; the size is sealed, so that no other process can shrink it. Throws CommError: no room, no
  /// descriptors.
  static SharedMemory create(int64_t bytes);
  /// Maps what another process created. Throws CommError.
  static SharedMemory adopt(FileDescriptor fd, int64_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  /// Closes the descriptor, which all ranks then have to have got. The mapping stays.
  void close_fd() { fd_.reset(); }

 private:
  SharedMemory(FileDescriptor fd, int64_t bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  void map();

  FileDescriptor fd_;
  int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::comm::shm
