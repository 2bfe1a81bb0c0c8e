// Memory that processes of this one's group can still get.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera {

/// Bytes: the kernel's MemAvailable, or less where a memory cgroup of this process (version 1 or 2),
/// or one that it lies in, has less room below its limit. File pages that a cgroup can drop are room. `root`:
/// where proc/ and sys/ are; tests have their own. Throws Error if the kernel does not say.
int64_t available_memory(const std::filesystem::path& root = "/");

/// Bytes that this process can still get: available_memory(), or less where the limit on its address
/// space (`ulimit -v`) leaves less. Throws Error if the kernel does not say.
int64_t available_to_process();

}  // namespace tessera
