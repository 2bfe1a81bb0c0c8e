// SharedMemory: a piece of memory that several processes map. It has no name in any file system: it is passed on as a
// descriptor, and the kernel frees it when the last process that maps it ends, however it ends.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::comm::shm {

/// Owns a memfd and its mapping. Move-only.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Local. `bytes` zeros, above 0. All pages are reserved here, because running out of them later is a SIGBUS; the size is
  /// sealed, so that no other process can shrink it under our feet. Throws CommError: no room, no descriptors.
  static SharedMemory create(int64_t bytes);
  /// Local. Maps what another process created. Owns `fd` from here on. Throws CommError.
  static SharedMemory adopt(int fd, int64_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  /// Local. Lets the descriptor go, once everybody has it; the mapping stays.
  void close_fd();

 private:
  SharedMemory(int fd, int64_t bytes) : fd_(fd), bytes_(bytes) {}
  void map();

  int fd_ = -1;
  int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::comm::shm
