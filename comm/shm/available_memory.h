// How much memory this process may still take. fallocate() on a memfd does not check that: beyond the limit
// the kernel kills the process instead of returning an error.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera::comm::shm {

/// Bytes: the minimum of what the machine has available and what is left under the limits of this
/// process's control group and those above it (cgroup v2, and v1's memory controller). `root`: the folder
/// that /proc and /sys are in, for tests.
int64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace tessera::comm::shm
