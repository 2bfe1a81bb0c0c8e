#include "core/memory/available_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// The number that stands behind `name` at the start of a line; the first number of the file if it is "".
std::optional<int64_t> number_in(const fs::path& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const size_t begin = line.find_first_not_of(' ', name.size());
    if (begin == std::string::npos) continue;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(line.data() + begin, line.data() + line.size(), value);
    if (error == std::errc()) return value;
  }
  return std::nullopt;
}

/// What the files of a version of the memory controller are called.
struct Controller {
  const char* root;
  const char* limit;
  const char* usage;
  std::string_view droppable;  // in memory.stat
};
constexpr Controller kVersion1 = {"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file "};
constexpr Controller kVersion2 = {"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};

/// Of the group `path` and all above it. A container may see its own group as the root.
int64_t room_in_groups(const fs::path& root, const Controller& controller, fs::path path) {
  int64_t room = INT64_MAX;
  while (true) {
    const fs::path folder = root / controller.root / path;
    const std::optional<int64_t> limit = number_in(folder / controller.limit, "");
    const std::optional<int64_t> usage = number_in(folder / controller.usage, "");
    if (limit && usage) {
      const int64_t droppable = number_in(folder / "memory.stat", controller.droppable).value_or(0);
      room = std::min(room, std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - droppable)));
    }
    if (path.empty()) return room;
    path = path.parent_path();
  }
}

}  // namespace

int64_t available_memory(const fs::path& root) {
  const std::optional<int64_t> kib = number_in(root / "proc/meminfo", "MemAvailable:");
  if (!kib)
    throw Error("the kernel does not say how much memory is available (MemAvailable in /proc/meminfo)");
  int64_t bytes = *kib * 1024;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // NUMBER:CONTROLLERS:/PATH
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const fs::path path = fs::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,")
      bytes = std::min(bytes, room_in_groups(root, kVersion2, path));
    else if (controllers.find(",memory,") != std::string::npos)
      bytes = std::min(bytes, room_in_groups(root, kVersion1, path));
  }
  return bytes;
}

int64_t available_to_process() {
  int64_t bytes = available_memory();
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return bytes;
  const int64_t pages = number_in("/proc/self/statm", "").value_or(0);  // of its address space
  const auto room = static_cast<int64_t>(limit.rlim_cur) - pages * ::sysconf(_SC_PAGESIZE);
  return std::clamp<int64_t>(room, 0, bytes);
}

}  // namespace tessera
