#include "comm/shm/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

namespace tessera::comm::shm {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

/// "max" and files that are not there: nothing.
std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  int64_t number = 0;
  if (in >> number) return number;
  return std::nullopt;
}

int64_t machine(const fs::path& root) {
  std::ifstream in(root / "proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string name;
    int64_t kibibytes = 0;
    if (fields >> name >> kibibytes && name == "MemAvailable:") return kibibytes * 1024;
  }
  return kUnlimited;
}

/// The part of a group's use that is cache of files, which the kernel frees when memory is needed. (Shared
/// memory is not counted in these.)
int64_t cache_in(const fs::path& stat_file, const std::string& prefix) {
  std::ifstream in(stat_file);
  int64_t cache = 0, bytes = 0;
  for (std::string name; in >> name >> bytes;)
    if (name == prefix + "inactive_file" || name == prefix + "active_file") cache += bytes;
  return cache;
}

struct CgroupFiles {
  const char *limit, *used, *cache_prefix;
};

/// What is left in `group` below `base` and in all above it.
int64_t left_in(const fs::path& base, fs::path group, const CgroupFiles& files) {
  int64_t left = kUnlimited;
  group = group.relative_path();
  while (true) {
    const auto limit = number_in(base / group / files.limit);
    const auto used = number_in(base / group / files.used);
    if (limit && used)
      left = std::min(
          left,
          std::max<int64_t>(0, *limit - *used + cache_in(base / group / "memory.stat", files.cache_prefix)));
    if (group.empty()) return left;
    group = group.parent_path();
  }
}

}  // namespace

int64_t available_memory(const fs::path& root) {
  int64_t available = machine(root);
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/user.slice" (v2), "9:memory:/docker/…" (v1)
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = line.substr(second + 1);
    if (controllers.empty())
      available =
          std::min(available, left_in(root / "sys/fs/cgroup", group, {"memory.max", "memory.current", ""}));
    else if (controllers.find("memory") != controllers.npos)
      available = std::min(available, left_in(root / "sys/fs/cgroup/memory", group,
                                              {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"}));
  }
  return available;
}

}  // namespace tessera::comm::shm
