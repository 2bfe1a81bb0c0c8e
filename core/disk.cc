#include "core/disk.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/str.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLargestCall = size_t{1} << 30;  // the kernel writes and reads at most 2 GiB a call

[[noreturn]] void fail(const char* what, const fs::path& path, int error) {
  throw DiskError(str("cannot ", what, " ", path.string(), ": ", std::strerror(error)));
}

int open_or_fail(const fs::path& path, int flags, const char* what) {
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) fail(what, path, errno);
  return descriptor;
}

}  // namespace

// ------------------------------------------------------------------------------------------- OutputFile

OutputFile::OutputFile(const Disk& disk, fs::path path, int descriptor)
    : disk_(&disk), path_(std::move(path)), descriptor_(descriptor) {}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : disk_(other.disk_),
      path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      appended_(other.appended_) {}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::reserve(int64_t bytes) {
  if (bytes == 0) return;
  int error;
  do {
    error = ::posix_fallocate(descriptor_, 0, bytes);
  } while (error == EINTR);
  if (error != 0) fail(str("reserve ", bytes, " bytes for").c_str(), path_, error);
  disk_->done("reserve", path_);
}

void OutputFile::write_at(int64_t offset, std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t written = ::pwrite(descriptor_, data.data(), std::min(data.size(), kLargestCall), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("write", path_, written < 0 ? errno : ENOSPC);
    data = data.subspan(static_cast<size_t>(written));
    offset += written;
  }
  disk_->done("write", path_);
}

void OutputFile::append(std::span<const std::byte> data) {
  write_at(appended_, data);
  appended_ += static_cast<int64_t>(data.size());
}

void OutputFile::start_sync(int64_t offset, int64_t bytes) {
  // A hint: where a file system doesn't know it, close() does all the work.
  if (disk_->options_.sync) static_cast<void>(::sync_file_range(descriptor_, offset, bytes, SYNC_FILE_RANGE_WRITE));
}

void OutputFile::close() {
  if (disk_->options_.sync) {
    if (::fsync(descriptor_) != 0) fail("sync", path_, errno);
    disk_->done("sync", path_);
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("close", path_, errno);
  disk_->done("close", path_);
}

// ------------------------------------------------------------------------------------------------- Disk

OutputFile Disk::create(const fs::path& path) const {
  OutputFile file(*this, path, open_or_fail(path, O_RDWR | O_CREAT | O_TRUNC, "create"));
  done("create", path);
  return file;
}

OutputFile Disk::reopen(const fs::path& path) const {
  OutputFile file(*this, path, open_or_fail(path, O_RDWR, "open"));
  done("open", path);
  return file;
}

void Disk::create_directories(const fs::path& path) const {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail("create directory", path, error.value());
  done("create directory", path);
}

void Disk::rename(const fs::path& from, const fs::path& to) const {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(str("rename ", from.filename().string(), " to").c_str(), to, errno);
  done("rename", to);
}

void Disk::exchange(const fs::path& a, const fs::path& b) const {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) != 0)
    fail(str("exchange ", a.filename().string(), " with").c_str(), b, errno);
  done("exchange", b);
}

void Disk::link(const fs::path& from, const fs::path& to) const {
  if (::link(from.c_str(), to.c_str()) != 0) fail(str("link ", from.string(), " as").c_str(), to, errno);
  done("link", to);
}

void Disk::remove_all(const fs::path& path) const {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail("remove", path, error.value());
  done("remove", path);
}

void Disk::sync_directory(const fs::path& path) const {
  if (!options_.sync) return;
  const int descriptor = open_or_fail(path, O_RDONLY | O_DIRECTORY, "open directory");
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (error != 0) fail("sync directory", path, error);
  done("sync directory", path);
}

void Disk::replace_file(const fs::path& path, std::string_view content) const {
  fs::path temporary = path;
  temporary += ".tmp";
  try {
    OutputFile file = create(temporary);
    file.append(content);
    file.close();
    rename(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory(path.has_parent_path() ? path.parent_path() : fs::path("."));
}

void replace_file(const fs::path& path, std::string_view content) { Disk({.sync = false, .probe = {}}).replace_file(path, content); }

// -------------------------------------------------------------------------------------------- InputFile

InputFile::InputFile(fs::path path) : path_(std::move(path)), descriptor_(open_or_fail(path_, O_RDONLY, "open")) {
  struct stat status {};
  const int error = ::fstat(descriptor_, &status) != 0 ? errno : S_ISREG(status.st_mode) ? 0 : S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  if (error != 0) {
    ::close(descriptor_);
    fail("read", path_, error);
  }
  bytes_ = status.st_size;
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), bytes_(other.bytes_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void InputFile::read_at(int64_t offset, std::span<std::byte> data) const {
  const int64_t wanted_end = offset + static_cast<int64_t>(data.size());
  while (!data.empty()) {
    const ssize_t got = ::pread(descriptor_, data.data(), std::min(data.size(), kLargestCall), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_, errno);
    if (got == 0) throw DiskError(str("cannot read ", path_.string(), " up to byte ", wanted_end, ": it ends at byte ", offset));
    data = data.subspan(static_cast<size_t>(got));
    offset += got;
  }
}

std::string InputFile::read_all(int64_t limit) const {
  if (bytes_ > limit) throw DiskError(str(path_.string(), " has ", bytes_, " bytes, expected at most ", limit));
  std::string text(static_cast<size_t>(bytes_), '\0');
  read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace tessera
