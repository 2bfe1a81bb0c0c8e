#include "core/memory/available_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

#include "core/environment/control_groups.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNoLimit = int64_t{1} << 62;  // version 1 writes no limit as a number above it

std::optional<int64_t> limit_of(const ControlGroup& group) {
  const auto limit = group.number(group.version == 1 ? "memory.limit_in_bytes" : "memory.max");
  return limit && *limit < kNoLimit ? limit : std::nullopt;
}

std::optional<int64_t> room_in(const ControlGroup& group) {
  const bool is_version_1 = group.version == 1;
  const auto limit = limit_of(group);
  const auto used = group.number(is_version_1 ? "memory.usage_in_bytes" : "memory.current");
  if (!limit || !used) return std::nullopt;
  int64_t files = 0;  // without shared memory, which cannot be dropped
  for (const char* const name : {"inactive_file", "active_file"})
    files += group.number("memory.stat", str(is_version_1 ? "total_" : "", name)).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - files));
}

/// Reads /proc/meminfo, whose lines are "NAME:  NUMBER kB".
std::optional<int64_t> machines_available(const fs::path& root) {
  std::ifstream lines(root / "proc/meminfo");
  std::string name, unit;
  for (int64_t kib = 0; lines >> name >> kib && std::getline(lines, unit);)
    if (name == "MemAvailable:") return kib * 1024;
  return std::nullopt;
}

}  // namespace

int64_t available_memory(const fs::path& root) {
  const std::optional<int64_t> of_machine = machines_available(root);
  if (!of_machine)
    throw Error("the kernel does not say how much memory is available (MemAvailable in /proc/meminfo)");
  int64_t bytes = *of_machine;
  for (const ControlGroup& group : control_groups("memory", root))
    bytes = std::min(bytes, room_in(group).value_or(bytes));
  return bytes;
}

int64_t available_to_process() {
  int64_t bytes = available_memory();
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return bytes;
  int64_t pages = 0;  // of its address space
  std::ifstream("/proc/self/statm") >> pages;
  const auto room = static_cast<int64_t>(limit.rlim_cur) - pages * ::sysconf(_SC_PAGESIZE);
  return std::clamp<int64_t>(room, 0, bytes);
}

int64_t memory_limit(const fs::path& root) {
  std::optional<int64_t> smallest;
  for (const ControlGroup& group : control_groups("memory", root))
    if (const auto limit = limit_of(group)) smallest = std::min(*limit, smallest.value_or(*limit));
  return smallest.value_or(-1);
}

}  // namespace tessera
