// How much memory this process may still take. fallocate() on a memfd asks nobody: beyond the limit it ends
// in the kernel's out-of-memory killer rather than in an error.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera::comm::shm {

/// Local. Bytes: the least of what the machine has available and what is left under the limits of this
/// process's control group and those above it (cgroup v2, and v1's memory controller). `root`: where
/// /proc and /sys are found, for tests.
int64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace tessera::comm::shm
