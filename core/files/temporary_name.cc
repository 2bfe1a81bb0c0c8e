#include "core/files/temporary_name.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/random_digits.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kInfix = ".tmp-";
constexpr std::string_view kHex = "0123456789abcdef";
constexpr size_t kNumDigits = 16;

/// Whether the lock was free. It ends when the descriptor and its duplicates are closed.
bool lock(const FileDescriptor& descriptor) {
  return TEMP_FAILURE_RETRY(::flock(descriptor.get(), LOCK_EX | LOCK_NB)) == 0;
}

/// Whether no process has a lock on it. If so, takes the lock, until `descriptor` is closed.
bool is_leftover(const fs::path& path, FileDescriptor& descriptor) {
  constexpr int kFlags = O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC;
  // NFS locks no file that is open for reading alone. A folder can be opened in no other way.
  descriptor = FileDescriptor(::open(path.c_str(), O_RDWR | kFlags));
  if (!descriptor) descriptor = FileDescriptor(::open(path.c_str(), O_RDONLY | kFlags));
  return descriptor && lock(descriptor);
}

}  // namespace

std::string temporary_name(std::string_view name) {
  return std::string(name) + std::string(kInfix) + random_digits(kNumDigits / 2);
}

fs::path temporary_path(const fs::path& path) {
  return path.parent_path() / temporary_name(path.filename().string());
}

std::string_view name_of_temporary(std::string_view file_name) {
  constexpr size_t kTail = kInfix.size() + kNumDigits;
  if (file_name.size() <= kTail) return {};
  const std::string_view tail = file_name.substr(file_name.size() - kTail);
  if (!tail.starts_with(kInfix) || tail.find_first_not_of(kHex, kInfix.size()) != tail.npos) return {};
  return file_name.substr(0, file_name.size() - kTail);
}

bool hold_temporary(const FileDescriptor& descriptor, const fs::path& path) {
  if (!lock(descriptor)) return errno != EWOULDBLOCK;
  struct stat ours{}, named{};
  return ::fstat(descriptor.get(), &ours) != 0 ||
         (::lstat(path.c_str(), &named) == 0 && named.st_dev == ours.st_dev && named.st_ino == ours.st_ino);
}

HeldFolder create_temporary_folder(const Disk& disk, const fs::path& path) {
  while (true) {
    HeldFolder made{temporary_path(path), {}};
    try {
      disk.create_directory(made.path);
    } catch (...) {
      std::error_code ignored;
      fs::remove(made.path, ignored);
      throw;
    }
    made.lock = FileDescriptor(::open(made.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // ENOENT: another process considered it abandoned.
    if (made.lock ? hold_temporary(made.lock, made.path) : errno != ENOENT) return made;
  }
}

bool is_held(const fs::path& path, FileDescriptor& descriptor) {
  return !is_leftover(path, descriptor) && descriptor && errno == EWOULDBLOCK;
}

void remove_abandoned(const Disk& disk, const fs::path& path) {
  const std::string name = path.filename().string();
  std::error_code ignored;
  for (fs::directory_iterator it(directory_of(path), ignored), end; !ignored && it != end;
       it.increment(ignored)) {
    if (name_of_temporary(it->path().filename().string()) != name) continue;
    FileDescriptor held;
    if (is_leftover(it->path(), held)) disk.remove_all(it->path());
  }
}

fs::path directory_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

fs::path named_path(const fs::path& path) {
  const fs::path plain = path.has_filename() ? path : path.parent_path();
  if (plain.has_filename() && plain.filename() != "." && plain.filename() != "..") return plain;
  std::error_code error;
  const fs::path real = fs::canonical(plain, error);
  return error ? plain : real;
}

std::string name_of_path(const fs::path& path) { return named_path(path).filename().string(); }

}  // namespace tessera
