#include "checkpoint/formats/pending_output.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/files/pending_file.h"
#include "core/files/temporary_name.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

// The temporary folder is beside the real one, so the last part of the path must be a name, and not that of a
// symbolic link.
fs::path folder_path(const fs::path& path) {
  const fs::path plain = named_path(path);
  std::error_code error;
  const fs::path real = fs::is_symlink(plain, error) ? fs::canonical(plain, error) : plain;
  return error ? plain : real;
}

/// Waits until no other process changes folders in the parent of `path`, and keeps others from it while the
/// descriptor is open. Holds nothing if there is no such folder yet, or its file system has no locks. Throws
/// DiskError.
FileDescriptor lock_parent(const fs::path& path) {
  constexpr auto kPatience = std::chrono::seconds(60), kNone = std::chrono::seconds(0);
  constexpr auto kPause = std::chrono::milliseconds(5);
  FileDescriptor parent(::open(directory_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto begin = std::chrono::steady_clock::now();
  while (parent && ::flock(parent.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return {};
    if (std::chrono::steady_clock::now() - begin - kPatience > kNone)
      throw DiskError(path, ": another process has been writing there for 60 s; expected to be alone");
    std::this_thread::sleep_for(kPause);
  }
  return parent;
}

/// Some file systems have no hard links, and a link to another user's file may be forbidden.
void link_or_copy(const Disk& disk, const fs::path& from, const fs::path& to) {
  try {
    disk.link(from, to);
  } catch (const DiskError&) {
    std::error_code error;
    fs::copy(from, to, fs::copy_options::copy_symlinks, error);
    if (error) throw;
  }
}

}  // namespace

void keep_other_files(const Disk& disk, const fs::path& from, const fs::path& to,
                      bool (*replaced)(const std::string& name)) {
  for (const fs::path& entry : paths_in(from)) {
    if (replaced(entry.filename().string())) continue;
    const fs::path kept = to / entry.filename();
    std::error_code error;
    if (!fs::is_directory(fs::symlink_status(entry, error))) {
      link_or_copy(disk, entry, kept);
      continue;
    }
    disk.create_directory(kept);
    keep_other_files(disk, entry, kept, [](const std::string&) { return false; });
    disk.sync_directory(kept);
  }
}

PendingDirectory::PendingDirectory(const Disk& disk, fs::path path, bool (*replaced)(const std::string&))
    : disk_(disk), path_(folder_path(path)), replaced_(replaced) {
  const FileDescriptor alone = lock_parent(path_);
  check_entries();
  remove_abandoned(disk_, path_);
  disk_.create_directories(directory_of(path_));
  temporary_ = create_temporary_folder(disk_, path_);
}

PendingDirectory::~PendingDirectory() {
  if (!renamed_) remove_quietly(disk_, temporary());
}

void PendingDirectory::check_entries() const {
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status))
    throw CheckpointError(path_, " is a file; expected a folder, or a name that is free");
  for (const fs::path& entry : paths_in(path_))
    if (fs::is_directory(fs::symlink_status(entry, error)))
      throw CheckpointError(path_, " holds a folder, ", entry.filename(),
                            "; expected a new folder, or one that holds files only");
}

void PendingDirectory::publish() {
  const FileDescriptor alone = lock_parent(path_);  // or files of a folder that is being exchanged are missed
  check_entries();                                  // they may have changed since
  const bool exists = is_there(path_);
  if (exists) keep_other_files(disk_, path_, temporary(), replaced_);
  disk_.sync_directory(temporary());
  if (exists)
    disk_.exchange(temporary(), path_);
  else
    disk_.rename(temporary(), path_);
  renamed_ = !exists;
  disk_.sync_directory(directory_of(path_));
  if (exists) remove_quietly(disk_, temporary());  // the old one, while no other process looks for such
  renamed_ = true;
}

}  // namespace tessera::checkpoint
