#include "checkpoint/formats/pending_output.h"

#include <fcntl.h>

#include <string>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/pending_file.h"
#include "core/str.h"
#include "core/temporary_name.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

// The temporary folder is beside the real one, so the last part of the path must be a name: not "DIR/", "."
// or a symbolic link.
fs::path folder_path(const fs::path& path) {
  const fs::path plain = path.has_filename() ? path : path.parent_path();
  const bool is_name = plain.has_filename() && plain.filename() != "." && plain.filename() != "..";
  std::error_code error;
  if (is_name && !fs::is_symlink(plain, error)) return plain;
  const fs::path real = fs::canonical(plain, error);
  return error ? plain : real;
}

}  // namespace

PendingDirectory::PendingDirectory(const Disk& disk, fs::path path, bool (*replaced)(const std::string&))
    : disk_(disk), path_(folder_path(path)), replaced_(replaced) {
  check_entries();
  remove_abandoned(disk_, path_);
  create();
}

void PendingDirectory::create() {
  do {
    temporary_ = temporary_path(path_);
    try {
      disk_.create_directories(temporary_);
    } catch (...) {
      remove_quietly(disk_, temporary_);
      throw;
    }
    lock_ = FileDescriptor(::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  } while (lock_ && !hold_temporary(lock_, temporary_));
}

PendingDirectory::~PendingDirectory() {
  if (!renamed_) remove_quietly(disk_, temporary_);
}

void PendingDirectory::check_entries() const {
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status))
    throw CheckpointError(str(path_.string(), " is a file; expected a folder, or a name that is free"));
  for (const fs::directory_entry& entry : fs::directory_iterator(path_, error))
    if (entry.is_directory() && !entry.is_symlink())
      throw CheckpointError(str(path_.string(), " holds a folder, ", entry.path().filename().string(),
                                "; expected a new folder, or one that holds files only"));
  if (error) throw CheckpointError(str("cannot list ", path_.string(), ": ", error.message()));
}

void PendingDirectory::publish() {
  check_entries();  // they may have changed since
  std::error_code error;
  const bool exists = fs::exists(path_, error);
  if (exists)
    for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename().string();
      if (!replaced_(name)) disk_.link(entry.path(), temporary_ / name);
    }
  disk_.sync_directory(temporary_);
  if (exists) {
    disk_.exchange(temporary_, path_);  // the destructor removes the old one
  } else {
    disk_.rename(temporary_, path_);
    renamed_ = true;
  }
  disk_.sync_directory(directory_of(path_));
}

}  // namespace tessera::checkpoint
