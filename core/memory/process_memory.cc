#include "core/memory/process_memory.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
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

double peak_bytes() {
  const double shared = sum_of("/proc/self/status", {"RssShmem:"}),
               share = sum_of("/proc/self/smaps_rollup", {"Pss_Shmem:"});
  return peak_resident_bytes() - shared + share;
}

double resident_share(int num_ranks) {
  return sum_of("/proc/self/status", {"RssAnon:"}) + sum_of("/proc/self/status", {"RssShmem:"}) / num_ranks;
}

double file_mapping_bytes() { return sum_of("/proc/self/status", {"RssFile:"}); }

int64_t unnamed_file_bytes(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  const std::string folder = fs::weakly_canonical(directory, error).string() + "/";
  int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd", error)) {
    struct stat file{};
    if (fs::read_symlink(entry.path(), error).string().starts_with(folder) &&
        ::stat(entry.path().c_str(), &file) == 0 && S_ISREG(file.st_mode) && file.st_nlink == 0)
      bytes += file.st_blocks * 512;
  }
  return bytes;
}

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
