#include "comm/shm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/memory/available_memory.h"
#include "core/str.h"

namespace tessera::comm::shm {
namespace {

CommError no_memory(int64_t bytes, const std::string& why) {
  return CommError("no ", mebibytes(bytes), " MiB of shared memory: ", why,
                   "; backend \"gloo\" does without");
}

CommError no_memory(int64_t bytes, const char* step, int error) {
  return no_memory(bytes, str(step, ": ", std::strerror(error)));
}

}  // namespace

SharedMemory SharedMemory::create(int64_t bytes) {
  if (const int64_t available = available_memory(); bytes > available)
    throw no_memory(bytes, str("the machine or the container has ", mebibytes(available), " MiB left"));
  SharedMemory memory(FileDescriptor(memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes);
  if (memory.fd() < 0) throw no_memory(bytes, "memfd_create", errno);
  int error = 0;
  do {
    error = posix_fallocate(memory.fd(), 0, bytes);
  } while (error == EINTR);
  if (error != 0) throw no_memory(bytes, "fallocate", error);
  if (fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw no_memory(bytes, "F_ADD_SEALS", errno);
  memory.map();
  return memory;
}

SharedMemory SharedMemory::adopt(FileDescriptor fd, int64_t bytes) {
  // A file that is shorter, or that its owner can cut, would be a SIGBUS later.
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) throw no_memory(bytes, "fstat", errno);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (status.st_size < bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw CommError("what came as ", bytes, " bytes of shared memory is a file of ", status.st_size, " bytes",
                    seals < 0 || (seals & F_SEAL_SHRINK) == 0 ? " that can shrink" : "");
  SharedMemory memory(std::move(fd), bytes);
  memory.map();
  return memory;
}

// Populated at once: a training step must not meet a page fault for every 4 KiB.
void SharedMemory::map() {
  void* data =
      mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd(), 0);
  if (data == MAP_FAILED) throw no_memory(bytes_, "mmap", errno);
  data_ = static_cast<std::byte*>(data);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      bytes_(std::exchange(other.bytes_, 0)),
      data_(std::exchange(other.data_, nullptr)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  std::swap(data_, other.data_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace tessera::comm::shm
