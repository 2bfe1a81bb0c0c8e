// What the kernel says of this host: the cores we may use, and whether it has killed for memory.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::launcher {

/// Local. Cores this process may use: its CPU affinity, no more than the control group's quota (cpu.max or
/// cpu.cfs_quota_us, rounded up). At least 1.
int available_cores();

/// Local. How many processes of this control group the kernel has killed for want of memory so far (v2:
/// memory.events, v1: memory.oom_control; without either, the host's count in /proc/vmstat). None: not told.
std::optional<int64_t> num_oom_kills();

}  // namespace tessera::launcher
