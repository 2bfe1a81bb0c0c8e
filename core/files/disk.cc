#include "core/files/disk.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/files/pending_file.h"
#include "core/random_digits.h"
#include "core/str.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

FileDescriptor open_or_fail(const fs::path& path, int flags, const char* what) {
  FileDescriptor descriptor(TEMP_FAILURE_RETRY(::open(path.c_str(), flags | O_CLOEXEC, 0666)));
  if (!descriptor) throw_disk_error(what, path, errno);
  return descriptor;
}

}  // namespace

// ------------------------------------------------------------------------------------------- OutputFile

OutputFile::OutputFile(const Disk& disk, fs::path path, FileDescriptor descriptor)
    : disk_(&disk), path_(std::move(path)), descriptor_(std::move(descriptor)) {}

void OutputFile::reserve(int64_t bytes) {
  if (bytes == 0) return;
  int error;
  do {
    error = ::posix_fallocate(descriptor_.get(), 0, bytes);
  } while (error == EINTR);
  if (error != 0) throw_disk_error(str("reserve ", bytes, " bytes for"), path_, error);
  disk_->done("reserve", path_);
}

void OutputFile::write_at(int64_t offset, std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t written =
        ::pwrite(descriptor_.get(), data.data(), std::min(data.size(), kLargestCall), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_disk_error("write", path_, written < 0 ? errno : ENOSPC);
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
  // A hint: if the file system does not support it, close() does all the work.
  if (disk_->options_.sync)
    static_cast<void>(::sync_file_range(descriptor_.get(), offset, bytes, SYNC_FILE_RANGE_WRITE));
}

void OutputFile::close() {
  if (disk_->options_.sync) {
    if (::fsync(descriptor_.get()) != 0) throw_disk_error("sync", path_, errno);
    disk_->done("sync", path_);
  }
  if (::close(descriptor_.release()) != 0) throw_disk_error("close", path_, errno);
  disk_->done("close", path_);
}

// ------------------------------------------------------------------------------------------------- Disk

OutputFile Disk::create(const fs::path& path) const {
  OutputFile file(*this, path, open_or_fail(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, "create"));
  done("create", path);
  return file;
}

void Disk::create_directories(const fs::path& path) const {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw_disk_error("create directory", path, error.value());
  done("create directory", path);
}

void Disk::create_directory(const fs::path& path) const {
  std::error_code error;
  fs::create_directory(path, error);
  if (error) throw_disk_error("create directory", path, error.value());
  done("create directory", path);
}

void Disk::rename(const fs::path& from, const fs::path& to) const {
  if (::rename(from.c_str(), to.c_str()) != 0)
    throw_disk_error(str("rename ", from.filename(), " to"), to, errno);
  done("rename", to);
}

void Disk::exchange(const fs::path& a, const fs::path& b) const {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) != 0) {
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP)
      throw_disk_error(str("exchange ", a.filename(), " with"), b, errno);
    constexpr size_t kNumBytes = 4;
    const fs::path away = str(b.string(), ".replaced-", random_digits(kNumBytes));
    rename(b, away);
    bool is_replaced = false;
    try {
      rename(a, b);
      is_replaced = true;
      rename(away, a);
    } catch (const DiskError&) {
      if (is_replaced) rename(b, a);
      rename(away, b);
      throw;
    }
  }
  done("exchange", b);
}

void Disk::link(const fs::path& from, const fs::path& to) const {
  if (::link(from.c_str(), to.c_str()) != 0) throw_disk_error(str("link ", from, " as"), to, errno);
  done("link", to);
}

void Disk::remove_all(const fs::path& path) const {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw_disk_error("remove", path, error.value());
  done("remove", path);
}

void Disk::sync_directory(const fs::path& path) const {
  if (!options_.sync) return;
  const FileDescriptor descriptor = open_or_fail(path, O_RDONLY | O_DIRECTORY, "open directory");
  if (::fsync(descriptor.get()) != 0) throw_disk_error("sync directory", path, errno);
  done("sync directory", path);
}

void Disk::replace_file(const fs::path& path, std::string_view content) const {
  PendingFile pending(*this, path);
  pending.file().append(content);
  pending.publish();
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

std::vector<fs::path> paths_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator next(folder, error), end; !error && next != end; next.increment(error))
    found.push_back(next->path());
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory)
    throw_disk_error("list", folder, error.value());
  std::sort(found.begin(), found.end());
  return found;
}

void replace_file(const fs::path& path, std::string_view content) {
  Disk({.sync = false, .probe = {}}).replace_file(path, content);
}

}  // namespace tessera
