// Facts about this host: the usable cores, and the number of out-of-memory kills.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::launcher {

/// The number of cores this process may use: by its CPU affinity, limited by the control group's quota
/// (cpu.max or cpu.cfs_quota_us, rounded up). At least 1.
int available_cores();

/// The number of processes of this control group that the kernel's OOM killer has killed so far (v2:
/// memory.events, v1: memory.oom_control; without either, the host's count in /proc/vmstat). nullopt:
/// unknown.
std::optional<int64_t> num_oom_kills();

}  // namespace tessera::launcher
