#include "launcher/environment/host.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>

#include "core/environment/control_groups.h"
#include "launcher/environment/core_binding.h"

namespace tessera::launcher {
namespace {

/// Cores allowed by the smallest quota; nullopt without a limit.
std::optional<int> quota_cores() {
  std::optional<int> fewest;
  for (const ControlGroup& group : control_groups("cpu")) {
    std::string quota, period = "100000";
    if (group.version == 1) {
      std::ifstream(group.folder / "cpu.cfs_quota_us") >> quota;
      std::ifstream(group.folder / "cpu.cfs_period_us") >> period;
    } else {
      std::ifstream(group.folder / "cpu.max") >> quota >> period;
    }
    const double per_period = std::atof(quota.c_str()), length = std::atof(period.c_str());
    if (per_period <= 0 || length <= 0) continue;  // "max", or -1: unlimited
    const int cores = std::max(1, static_cast<int>(std::ceil(per_period / length)));
    fewest = std::min(cores, fewest.value_or(cores));
  }
  return fewest;
}

}  // namespace

int available_cores() {
  auto cores = static_cast<int>(allowed_threads().size());
  if (cores == 0) cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));  // more than cpu_set_t holds
  return std::max(1, std::min(cores, quota_cores().value_or(cores)));
}

std::optional<int64_t> num_oom_kills() {
  for (const ControlGroup& group : control_groups("memory"))
    if (const auto kills =
            group.number(group.version == 1 ? "memory.oom_control" : "memory.events", "oom_kill"))
      return kills;
  return ControlGroup{"/proc"}.number("vmstat", "oom_kill");
}

}  // namespace tessera::launcher
