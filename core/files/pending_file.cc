#include "core/files/pending_file.h"

#include <fcntl.h>

#include <utility>

#include "core/files/temporary_name.h"

namespace tessera {

namespace fs = std::filesystem;

OutputFile PendingFile::create(const Disk& disk, const fs::path& path, FileDescriptor& lock) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) throw DiskError(path, " is a folder; expected the name of a file");
  // /dev/stdout and its like are links to what may be a file.
  const std::string folder = fs::canonical(directory_of(path), ignored).string();
  if (fs::is_other(path, ignored) || folder == "/dev" || folder.starts_with("/proc/"))
    throw DiskError(
        path, " is a FIFO, a socket or a device, which a file would replace; expected the name of a file");
  remove_abandoned(disk, path);
  while (true) {
    const fs::path temporary = temporary_path(path);
    try {
      OutputFile file = disk.create(temporary);
      lock = FileDescriptor(::fcntl(file.descriptor_.get(), F_DUPFD_CLOEXEC, 0));
      if (hold_temporary(file.descriptor_, temporary)) return file;
    } catch (...) {
      remove_quietly(disk, temporary);
      throw;
    }
  }
}

PendingFile::PendingFile(const Disk& disk, fs::path path)
    : disk_(disk), path_(std::move(path)), file_(create(disk_, path_, lock_)) {}

PendingFile::~PendingFile() {
  if (!renamed_) remove_quietly(disk_, temporary());
}

void PendingFile::publish() {
  file_.close();
  disk_.rename(temporary(), path_);
  renamed_ = true;
  disk_.sync_directory(directory_of(path_));
}

void remove_quietly(const Disk& disk, const fs::path& path) noexcept {
  try {
    disk.remove_all(path);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
}

}  // namespace tessera
