#include "checkpoint/formats/pending_output.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

fs::path directory_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// The temporary folder stands beside the real one, so its last part must be a name: not "DIR/", "." or a symbolic link.
fs::path folder_path(const fs::path& path) {
  const fs::path plain = path.has_filename() ? path : path.parent_path();
  const bool is_name = plain.has_filename() && plain.filename() != "." && plain.filename() != "..";
  std::error_code error;
  if (is_name && !fs::is_symlink(plain, error)) return plain;
  const fs::path real = fs::canonical(plain, error);
  return error ? plain : real;
}

// A process that was killed keeps its PID until its parent asks how it ended, which some never do: so do many a container's
// first process and a few others that orphans are given to. Such a process writes nothing any more.
bool is_running(pid_t pid) {
  if (::kill(pid, 0) != 0 && errno == ESRCH) return false;
  std::ifstream file(str("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");  // the name may hold anything
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return true;
  const char state = line[name_end + 2];
  return state != 'Z' && state != 'X';
}

bool is_left_by_the_dead(std::string_view file_name, const std::string& name) {
  const std::string prefix = name + ".";
  const std::string_view suffix = ".tmp";
  if (file_name.size() <= prefix.size() + suffix.size() || !file_name.starts_with(prefix) || !file_name.ends_with(suffix))
    return false;
  const char* begin = file_name.data() + prefix.size();
  const char* end = file_name.data() + file_name.size() - suffix.size();
  pid_t pid = 0;
  const auto [stop, error] = std::from_chars(begin, end, pid);
  return error == std::errc() && stop == end && pid > 0 && !is_running(pid);
}

void remove_leftovers(const Disk& disk, const fs::path& path) {
  std::error_code ignored;  // a folder that cannot be listed is reported by what comes next
  for (fs::directory_iterator it(directory_of(path), ignored), end; !ignored && it != end; it.increment(ignored))
    if (is_left_by_the_dead(it->path().filename().string(), path.filename().string())) disk.remove_all(it->path());
}

fs::path temporary_name(const fs::path& path) {
  fs::path temporary = path;
  temporary += str(".", ::getpid(), ".tmp");
  return temporary;
}

// For destructors: what cannot be removed stays, and the failure that led here is the one to report.
void remove_quietly(const Disk& disk, const fs::path& path) {
  try {
    disk.remove_all(path);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
}

OutputFile create_file(const Disk& disk, const fs::path& path, const fs::path& temporary) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    throw CheckpointError(str(path.string(), " is a folder; expected the name of a file"));
  remove_leftovers(disk, path);
  try {
    return disk.create(temporary);
  } catch (...) {
    remove_quietly(disk, temporary);
    throw;
  }
}

}  // namespace

PendingFile::PendingFile(const Disk& disk, fs::path path)
    : disk_(disk), path_(std::move(path)), temporary_(temporary_name(path_)), file_(create_file(disk, path_, temporary_)) {}

PendingFile::~PendingFile() {
  if (!renamed_) remove_quietly(disk_, temporary_);
}

void PendingFile::publish() {
  file_.close();
  disk_.rename(temporary_, path_);
  renamed_ = true;
  disk_.sync_directory(directory_of(path_));
}

PendingDirectory::PendingDirectory(const Disk& disk, fs::path path, bool (*replaced)(const std::string&))
    : disk_(disk), path_(folder_path(path)), temporary_(temporary_name(path_)), replaced_(replaced) {
  check_entries();
  remove_leftovers(disk_, path_);
  try {
    disk_.create_directories(temporary_);
  } catch (...) {
    remove_quietly(disk_, temporary_);
    throw;
  }
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
  check_entries();  // it may have changed since
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
