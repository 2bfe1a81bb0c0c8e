#include "launcher/environment/host.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/str.h"

namespace tessera::launcher {
namespace {

/// The path of a file of this process's control group; empty if there is none. `controller`: its name in
/// version 1.
std::string cgroup_file(std::string_view controller, const std::string& v1_file, const std::string& v2_file) {
  std::vector<std::string> candidates;
  std::ifstream lines("/proc/self/cgroup");  // "4:memory:/path" (version 1) or "0::/path" (version 2)
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = str(",", line.substr(first + 1, second - first - 1), ","),
                      path = line.substr(second + 1);
    if (names == ",,") candidates.push_back(str("/sys/fs/cgroup", path, "/", v2_file));
    if (names.find(str(",", controller, ",")) != std::string::npos)
      candidates.push_back(str("/sys/fs/cgroup/", controller, path, "/", v1_file));
  }
  // In a container /proc/self/cgroup may show the host's path, while its own group is mounted at the top.
  candidates.push_back(str("/sys/fs/cgroup/", v2_file));
  candidates.push_back(str("/sys/fs/cgroup/", controller, "/", v1_file));
  for (const std::string& path : candidates)
    if (::access(path.c_str(), R_OK) == 0) return path;
  return {};
}

std::optional<int64_t> counter_in(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string key;
  for (int64_t value; file >> key >> value;)
    if (key == name) return value;
  return std::nullopt;
}

/// Cores allowed by the quota; nullopt without a limit.
std::optional<int> quota_cores() {
  const std::string path = cgroup_file("cpu", "cpu.cfs_quota_us", "cpu.max");
  double quota = 0, period = 100000;
  std::ifstream file(path);
  if (!(file >> quota) || quota <= 0) return std::nullopt;  // "max", or -1: unlimited
  if (!(file >> period)) {
    period = 100000;
    std::ifstream(path.substr(0, path.rfind('/')) + "/cpu.cfs_period_us") >> period;
  }
  if (period <= 0) return std::nullopt;
  return std::max(1, static_cast<int>((quota + period - 1) / period));
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  int cores = 1;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0)
    cores = CPU_COUNT(&set);
  else  // more cores than cpu_set_t holds
    cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, std::min(cores, quota_cores().value_or(cores)));
}

std::optional<int64_t> num_oom_kills() {
  const std::string path = cgroup_file("memory", "memory.oom_control", "memory.events");
  if (const auto count = counter_in(path, "oom_kill")) return count;
  return counter_in("/proc/vmstat", "oom_kill");
}

}  // namespace tessera::launcher
