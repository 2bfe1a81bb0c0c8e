#include "core/process_memory.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

namespace tessera {
namespace {

/// The sum, in bytes, of these lines of a file in /proc, which has KiB.
double sum_of(const char* path, std::initializer_list<std::string_view> names) {
  double bytes = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    for (const std::string_view name : names) {
      if (line.starts_with(name)) bytes += 1024 * std::stod(line.substr(name.size()));
    }
  }
  return bytes;
}

}  // namespace

double peak_resident_bytes() { return sum_of("/proc/self/status", {"VmHWM:"}); }

double own_bytes() { return sum_of("/proc/self/smaps_rollup", {"Pss_Anon:", "Pss_Shmem:"}); }

double peak_own_bytes(const std::function<void()>& body, std::chrono::milliseconds period) {
  double peak = 0;
  {
    const std::jthread watcher([&](const std::stop_token& stop) {
      do {  // once in any case: a busy machine may start this thread when `body` has ended
        peak = std::max(peak, own_bytes());
        std::this_thread::sleep_for(period);
      } while (!stop.stop_requested());
    });
    body();
  }
  return peak;
}

}  // namespace tessera
