// Memory that this process can still get, and the limit on it.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera {

/// Bytes: the kernel's MemAvailable, or less where a memory control group of this process, or one that it
/// lies in, has less room below its limit. Pages of files that the kernel can drop are room, used lately or
/// not, as in MemAvailable. `root`: where proc/ and sys/ are; tests have their own. Throws Error if the
/// kernel does not say.
int64_t available_memory(const std::filesystem::path& root = "/");

/// Bytes that this process can still get: available_memory(), or less where the limit on its address
/// space (`ulimit -v`) leaves less. Throws Error if the kernel does not say.
int64_t available_to_process();

/// Bytes: the smallest limit of this process's memory control group and those above it; -1: none.
int64_t memory_limit(const std::filesystem::path& root = "/");

}  // namespace tessera
