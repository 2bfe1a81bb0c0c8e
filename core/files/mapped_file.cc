#include "core/files/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/files/input_file.h"

namespace tessera {

MappedFile::MappedFile(const std::filesystem::path& path) try {
  const auto fail = [&] { throw DataError("cannot map ", path, ": ", std::strerror(errno)); };
  const FileDescriptor file = open_input(path);
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) fail();
  if (status.st_size == 0) return;  // which mmap refuses
  void* memory = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) fail();
  data_ = static_cast<const std::byte*>(memory);
  bytes_ = status.st_size;
} catch (const DiskError& error) {
  throw DataError(error.what());
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

}  // namespace tessera
