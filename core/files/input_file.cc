#include "core/files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/str.h"

namespace tessera {
namespace {

std::string other_kind(mode_t mode) {
  if (S_ISDIR(mode)) return describe_errno(EISDIR);
  const char* kind = S_ISFIFO(mode)  ? "FIFO"
                     : S_ISCHR(mode) ? "character device"
                     : S_ISBLK(mode) ? "block device"
                                     : "special file";
  return str("it is a ", kind, " and not a regular file");
}

}  // namespace

FileDescriptor open_input(const std::filesystem::path& path) {
  FileDescriptor descriptor(
      TEMP_FAILURE_RETRY(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)));
  if (!descriptor && errno == ENXIO)
    throw_disk_error("open", path, "it is a socket or a device that is not there, and not a regular file");
  if (!descriptor) throw_disk_error("open", path, errno);
  struct stat status{};
  if (::fstat(descriptor.get(), &status) != 0) throw_disk_error("read", path, errno);
  if (!S_ISREG(status.st_mode)) throw_disk_error("read", path, other_kind(status.st_mode));
  return descriptor;
}

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)), descriptor_(open_input(path_)) {
  struct stat status{};
  if (::fstat(descriptor_.get(), &status) != 0) throw_disk_error("read", path_, errno);
  bytes_ = status.st_size;
}

size_t InputFile::read_some(int64_t offset, std::span<std::byte> data) const {
  size_t done = 0;
  while (done < data.size()) {
    const size_t wanted = std::min(data.size() - done, kLargestCall);
    const ssize_t got =
        ::pread(descriptor_.get(), data.data() + done, wanted, offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_disk_error("read", path_, errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

void InputFile::read_at(int64_t offset, std::span<std::byte> data) const {
  const auto got = static_cast<int64_t>(read_some(offset, data));
  if (const auto wanted = static_cast<int64_t>(data.size()); got < wanted)
    throw DiskError("cannot read ", path_, " up to byte ", offset + wanted, ": it ends at byte ",
                    offset + got);
}

std::string InputFile::read_all(int64_t limit) const {
  if (bytes_ > limit) throw DiskError(path_, " has ", bytes_, " bytes, expected at most ", limit);
  std::string text(static_cast<size_t>(bytes_), '\0');
  read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::string read_data_file(const std::filesystem::path& path, const std::string& expected) {
  try {
    return InputFile(path).read_all();
  } catch (const DiskError& error) {
    throw DataError(path, ": cannot be read: ", error.reason(), "; expected ", expected);
  }
}

}  // namespace tessera
