// Memory of this process, as counted by the kernel.
#pragma once

#include <chrono>
#include <functional>

namespace tessera {

/// Local. VmHWM, in bytes: this process's largest resident set, including libtorch's code.
double peak_resident_bytes();

/// Local. Bytes of private memory and of this process's share of shared memory, without file mappings
/// (libraries). Takes milliseconds: the kernel visits all pages.
double own_bytes();

/// Local. The largest own_bytes() while `body` runs, sampled every `period` on another thread. Throws what
/// `body` throws.
double peak_own_bytes(const std::function<void()>& body,
                      std::chrono::milliseconds period = std::chrono::milliseconds(5));

}  // namespace tessera
