// Memory of this process, as counted by the kernel.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

/// VmHWM, in bytes: this process's largest resident set, including libtorch's code.
double peak_resident_bytes();

/// Bytes of private memory and of this process's share of shared memory, without file mappings
/// (libraries). Takes milliseconds: the kernel visits all pages.
double own_bytes();

/// The largest memory this process has had, in bytes: VmHWM, of which memory that is shared with other
/// processes counts by this process's share now. Contains file_mapping_bytes().
double peak_bytes();
/// Bytes of memory now, without file mappings; `num_ranks` processes share what is shared. Takes
/// microseconds.
double resident_share(int num_ranks);
/// Bytes of file mappings in memory: libraries' code, which processes of one program share, and files
/// of data.
double file_mapping_bytes();

/// Disk space, by the kernel, of the files that this process has open in `directory` and that have no
/// name there.
int64_t unnamed_file_bytes(const std::string& directory);

/// The largest own_bytes() while `body` runs, sampled every `period` on another thread. Throws what
/// `body` throws.
double peak_own_bytes(const std::function<void()>& body,
                      std::chrono::milliseconds period = std::chrono::milliseconds(5));

}  // namespace tessera
