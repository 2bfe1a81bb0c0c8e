#include "tests/support/power_loss.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

using Identity = std::pair<dev_t, ino_t>;
constexpr int kNone = -1;

/// A file or folder that was there at the start or was made since.
struct Node {
  bool is_folder = false;
  std::string bytes;                 // of a file
  std::map<std::string, int> names;  // of a folder: numbers of nodes
};

struct NameChange {
  int folder;
  std::string name;
  int node;  // kNone: the name goes
};

struct Operation {
  std::string what;
  std::vector<NameChange> changes;  // of names
  int node = kNone;                 // otherwise: written to or synced
  bool is_sync = false;
  int64_t offset = 0;
  std::string bytes;
  int64_t size = -1;  // the file is made at least so long
};

struct Recording {
  std::mutex mutex;
  std::vector<Node> nodes;  // as at the start, new ones empty
  std::map<Identity, int> numbers;
  int root = kNone;
  std::vector<Operation> operations;
};

std::atomic<bool> is_recording{false};
Recording& recording() {
  static Recording one;
  return one;
}

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

/// kNone for what lies outside of the root.
int number_of(const std::optional<Identity>& found) {
  const auto& numbers = recording().numbers;
  const auto place = found ? numbers.find(*found) : numbers.end();
  return place == numbers.end() ? kNone : place->second;
}

/// A name below the root, or elsewhere: folder is kNone.
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

/// Runs `call`, and `note` after it when it has succeeded; in one piece, so that the
/// log has the order of the operations.
template <class Call, class Note>
auto recorded(const Call& call, const Note& note) {
  thread_local bool inside = false;
  if (!is_recording || inside) return call();
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
  if (!is_recording || (flags & O_CREAT) == 0) return real(at, path, flags, mode);
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
  if (!is_recording) return real(from_at, from, to_at, to, flags);
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

int snapshot(const fs::path& path) {
  Recording& log = recording();
  const int number = new_node(identity(AT_FDCWD, path.c_str()), fs::is_directory(path));
  if (log.nodes[number].is_folder) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
      const int child = snapshot(entry.path());
      log.nodes[number].names[entry.path().filename().string()] = child;
    }
  } else {
    std::ifstream file(path, std::ios::binary);
    log.nodes[number].bytes = {std::istreambuf_iterator<char>(file), {}};
  }
  return number;
}

void apply(const Operation& operation, std::vector<Node>& nodes, size_t keep_bytes = std::string::npos) {
  for (const NameChange& change : operation.changes) {
    auto& names = nodes[change.folder].names;
    if (change.node == kNone)
      names.erase(change.name);
    else
      names[change.name] = change.node;
  }
  if (operation.node == kNone || operation.is_sync) return;
  std::string& bytes = nodes[operation.node].bytes;
  const std::string written = operation.bytes.substr(0, keep_bytes);
  const size_t end = std::max(static_cast<size_t>(operation.offset) + written.size(),
                              static_cast<size_t>(std::max<int64_t>(0, operation.size)));
  if (bytes.size() < end) bytes.resize(end, '\0');
  bytes.replace(static_cast<size_t>(operation.offset), written.size(), written);
}

bool touches(const Operation& operation, int node) {
  return (!operation.is_sync && operation.node == node) ||
         std::any_of(operation.changes.begin(), operation.changes.end(),
                     [&](const NameChange& change) { return change.folder == node; });
}

void materialize(const std::vector<Node>& nodes, int number, const fs::path& target) {
  if (!nodes[number].is_folder) {
    std::ofstream(target, std::ios::binary) << nodes[number].bytes;
    return;
  }
  fs::create_directory(target);
  for (const auto& [name, child] : nodes[number].names) materialize(nodes, child, target / name);
}

}  // namespace

FileRecorder::FileRecorder(const fs::path& root) {
  Recording& log = recording();
  log.nodes.clear();
  log.numbers.clear();
  log.operations.clear();
  log.root = snapshot(root);
  is_recording = true;
}

FileRecorder::~FileRecorder() { stop(); }
void FileRecorder::stop() { is_recording = false; }
int FileRecorder::size() const { return static_cast<int>(recording().operations.size()); }
std::string FileRecorder::describe(int i) const {
  return recording().operations.at(static_cast<size_t>(i)).what;
}

void FileRecorder::replay(int num_operations, Unsynced unsynced, uint64_t seed,
                          const fs::path& target) const {
  const Recording& log = recording();
  std::vector<Node> nodes = log.nodes;
  std::vector<const Operation*> pending;
  for (int i = 0; i < num_operations; ++i) {
    const Operation& operation = log.operations[static_cast<size_t>(i)];
    if (!operation.is_sync) {
      pending.push_back(&operation);
      continue;
    }
    for (const Operation*& one : pending)
      if (touches(*one, operation.node)) apply(*std::exchange(one, nullptr), nodes);
    std::erase(pending, nullptr);
  }
  std::mt19937_64 random(seed);
  for (const Operation* one : pending) {
    const bool is_name = !one->changes.empty();
    switch (unsynced) {
      case Unsynced::kNothingStays: break;
      case Unsynced::kAllStays: apply(*one, nodes); break;
      case Unsynced::kNamesStay:
        if (is_name) apply(*one, nodes);
        break;
      case Unsynced::kBytesStay:
        if (!is_name) apply(*one, nodes);
        break;
      case Unsynced::kChance:
        if (random() % 2 == 0)
          apply(*one, nodes, random() % 2 == 0 ? std::string::npos : random() % (one->bytes.size() + 1));
        break;
    }
  }
  materialize(nodes, log.root, target);
}

}  // namespace tessera::testing

// The C library's functions, for this executable and the shared libraries it loads.
extern "C" {
using namespace tessera::testing;

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
