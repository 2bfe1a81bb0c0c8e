// What this process holds, as the kernel counts it.
#pragma once

#include <chrono>
#include <functional>

namespace tessera {

/// Local. VmHWM, in bytes: the most this process ever had resident, libtorch's code included.
double peak_resident_bytes();

/// Local. Bytes of private memory and of this process's share of shared memory; files (libraries) left out.
/// Takes a walk over all pages: milliseconds.
double own_bytes();

/// Local. The largest own_bytes() while `body` runs, looked at every `period` on a thread of its own. Throws
/// what `body` throws.
double peak_own_bytes(const std::function<void()>& body,
                      std::chrono::milliseconds period = std::chrono::milliseconds(5));

}  // namespace tessera
