#include "tests/support/recorded_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <filesystem>
#include <optional>

namespace tessera::testing::recorded {

Recording& recording() {
  static Recording one;
  return one;
}

namespace {

namespace fs = std::filesystem;

std::optional<Identity> identity(int folder, const char* path) {
  struct stat status{};
  if (::fstatat(folder, path, &status, AT_SYMLINK_NOFOLLOW) != 0) return std::nullopt;
  return Identity{status.st_dev, status.st_ino};
}
std::optional<Identity> identity(int descriptor) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) return std::nullopt;
  return Identity{status.st_dev, status.st_ino};
}

/// kNone for what is not below the root.
int number_of(const std::optional<Identity>& found) {
  const auto& numbers = recording().numbers;
  const auto place = found ? numbers.find(*found) : numbers.end();
  return place == numbers.end() ? kNone : place->second;
}

/// Where a name stands. folder is kNone where that is not below the root.
struct Place {
  int folder = kNone;
  std::string name;
};
Place place_of(int at, const char* path) {
  fs::path whole(path);
  if (!whole.has_filename()) whole = whole.parent_path();
  const std::string parent = whole.has_parent_path() ? whole.parent_path().string() : ".";
  struct stat status{};
  if (::fstatat(at, parent.c_str(), &status, 0) != 0) return {};
  return {number_of(Identity{status.st_dev, status.st_ino}), whole.filename().string()};
}

int new_node(const std::optional<Identity>& found, bool is_folder) {
  Recording& log = recording();
  log.nodes.push_back({.is_folder = is_folder, .bytes = "", .names = {}});
  if (found) log.numbers[*found] = static_cast<int>(log.nodes.size()) - 1;
  return static_cast<int>(log.nodes.size()) - 1;
}

void record_names(std::string what, std::vector<NameChange> changes) {
  std::erase_if(changes, [](const NameChange& change) { return change.folder == kNone; });
  if (!changes.empty())
    recording().operations.push_back({.what = std::move(what), .changes = std::move(changes), .bytes = {}});
}

/// Runs `call`, and `note` after it when it has succeeded, under the mutex: so operations are recorded in the
/// order in which they took effect. Leaves errno as `call` does.
template <class Call, class Note>
auto recorded(const Call& call, const Note& note) {
  thread_local bool inside = false;
  if (!recording().active || inside) return call();
  inside = true;
  const std::lock_guard lock(recording().mutex);
  const auto result = call();
  const int error = errno;
  if (result >= 0) note(result);
  errno = error;
  inside = false;
  return result;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

int open_recorded(int at, const char* path, int flags, mode_t mode) {
  static const auto real = next<int(int, const char*, int, ...)>("openat");
  if (!recording().active || (flags & O_CREAT) == 0) return real(at, path, flags, mode);
  const bool is_new = !identity(at, path);
  return recorded([&] { return real(at, path, flags, mode); },
                  [&](int descriptor) {
                    const Place place = place_of(at, path);
                    if (is_new && place.folder != kNone)
                      record_names("create " + place.name,
                                   {{place.folder, place.name, new_node(identity(descriptor), false)}});
                  });
}

ssize_t write_recorded(int descriptor, const void* data, size_t size, off_t offset) {
  static const auto real = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return recorded([&] { return real(descriptor, data, size, offset); },
                  [&](ssize_t written) {
                    const int node = number_of(identity(descriptor));
                    if (node != kNone)
                      recording().operations.push_back(
                          {.what = "write",
                           .changes = {},
                           .node = node,
                           .offset = offset,
                           .bytes = {static_cast<const char*>(data), static_cast<size_t>(written)}});
                  });
}

int rename_recorded(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  static const auto real = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  if (!recording().active) return real(from_at, from, to_at, to, flags);
  const auto moved = identity(from_at, from), other = identity(to_at, to);
  return recorded([&] { return real(from_at, from, to_at, to, flags); },
                  [&](int) {
                    const Place a = place_of(from_at, from), b = place_of(to_at, to);
                    const bool exchange = (flags & RENAME_EXCHANGE) != 0;
                    record_names((exchange ? "exchange " : "rename ") + a.name + " to " + b.name,
                                 {{a.folder, a.name, exchange ? number_of(other) : kNone},
                                  {b.folder, b.name, number_of(moved)}});
                  });
}

int remove_recorded(int at, const char* path, int flags) {
  static const auto real = next<int(int, const char*, int)>("unlinkat");
  return recorded([&] { return real(at, path, flags); },
                  [&](int) {
                    const Place place = place_of(at, path);
                    record_names("remove " + place.name, {{place.folder, place.name, kNone}});
                  });
}

int mkdir_recorded(int at, const char* path, mode_t mode) {
  static const auto real = next<int(int, const char*, mode_t)>("mkdirat");
  return recorded([&] { return real(at, path, mode); },
                  [&](int) {
                    const Place place = place_of(at, path);
                    if (place.folder != kNone)
                      record_names("make folder " + place.name,
                                   {{place.folder, place.name, new_node(identity(at, path), true)}});
                  });
}

int link_recorded(int from_at, const char* from, int to_at, const char* to, int flags) {
  static const auto real = next<int(int, const char*, int, const char*, int)>("linkat");
  return recorded([&] { return real(from_at, from, to_at, to, flags); },
                  [&](int) {
                    const Place place = place_of(to_at, to);
                    record_names("link " + place.name,
                                 {{place.folder, place.name, number_of(identity(to_at, to))}});
                  });
}

int sync_recorded(int descriptor, const char* name) {
  return recorded([&] { return next<int(int)>(name)(descriptor); },
                  [&](int) {
                    const int node = number_of(identity(descriptor));
                    if (node != kNone)
                      recording().operations.push_back(
                          {.what = "sync", .changes = {}, .node = node, .is_sync = true, .bytes = {}});
                  });
}

int reserve_recorded(int descriptor, off_t offset, off_t bytes) {
  static const auto real = next<int(int, off_t, off_t)>("posix_fallocate");
  return recorded(
      [&] { return real(descriptor, offset, bytes); },
      [&](int error) {
        const int node = number_of(identity(descriptor));
        if (error == 0 && node != kNone)
          recording().operations.push_back(
              {.what = "reserve", .changes = {}, .node = node, .bytes = {}, .size = offset + bytes});
      });
}

}  // namespace

int add_node(const std::string& path, bool is_folder) {
  return new_node(identity(AT_FDCWD, path.c_str()), is_folder);
}

}  // namespace tessera::testing::recorded

// In place of the C library's functions, in this executable and the shared libraries it loads.
extern "C" {
using namespace tessera::testing::recorded;

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return open_recorded(AT_FDCWD, path, flags, mode);
}
int openat(int at, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return open_recorded(at, path, flags, mode);
}
ssize_t pwrite(int descriptor, const void* data, size_t size, off_t offset) {
  return write_recorded(descriptor, data, size, offset);
}
int posix_fallocate(int descriptor, off_t offset, off_t bytes) {
  return reserve_recorded(descriptor, offset, bytes);
}
int fsync(int descriptor) { return sync_recorded(descriptor, "fsync"); }
int fdatasync(int descriptor) { return sync_recorded(descriptor, "fdatasync"); }
int rename(const char* from, const char* to) noexcept {
  return rename_recorded(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat(int from_at, const char* from, int to_at, const char* to) noexcept {
  return rename_recorded(from_at, from, to_at, to, 0);
}
int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) noexcept {
  return rename_recorded(from_at, from, to_at, to, flags);
}
int link(const char* from, const char* to) noexcept { return link_recorded(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_at, const char* from, int to_at, const char* to, int flags) noexcept {
  return link_recorded(from_at, from, to_at, to, flags);
}
int unlink(const char* path) noexcept { return remove_recorded(AT_FDCWD, path, 0); }
int unlinkat(int at, const char* path, int flags) noexcept { return remove_recorded(at, path, flags); }
int rmdir(const char* path) noexcept { return remove_recorded(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) noexcept {
  const int result = remove_recorded(AT_FDCWD, path, 0);
  return result != 0 && errno == EISDIR ? remove_recorded(AT_FDCWD, path, AT_REMOVEDIR) : result;
}
int mkdir(const char* path, mode_t mode) noexcept { return mkdir_recorded(AT_FDCWD, path, mode); }
int mkdirat(int at, const char* path, mode_t mode) noexcept { return mkdir_recorded(at, path, mode); }
}
