#include "comm/sockets/open_files.h"

#include <sys/resource.h>

#include <cstdint>
#include <filesystem>

#include "core/error.h"

namespace tessera::comm {
namespace {

/// Counts event loops, listening sockets and what is open for a moment, in a group of any size. Measured: up
/// to 15 on rank 0; the rest is for the program's own files.
constexpr int kFilesPerGroup = 20;

/// Counts for each other rank its connection to the store, the one of Liveness, and those for collectives.
int files_per_rank(bool serves_store, const std::string& backend) {
  const int for_collectives = backend == "nccl"  ? 0
                              : backend == "shm" ? 1
                                                 : 2;  // an engine has two groups over Gloo
  return (serves_store ? 1 : 0) + 1 + for_collectives;
}

int64_t num_open_files() {
  std::error_code error;
  const auto files = std::filesystem::directory_iterator("/proc/self/fd", error);
  if (error == std::errc::no_such_file_or_directory)
    throw CommError("/proc is not mounted; expected the kernel's (mount -t proc proc /proc)");
  return error ? -1 : std::distance(begin(files), end(files)) - 1;  // without the folder itself
}

}  // namespace

int64_t files_of_group(int world_size, bool serves_store, const std::string& backend) {
  return kFilesPerGroup + int64_t{files_per_rank(serves_store, backend)} * world_size;
}

void raise_open_files(int world_size, bool serves_store, const std::string& backend) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlimit highest{limit.rlim_max, limit.rlim_max};
  if (limit.rlim_cur != limit.rlim_max && ::setrlimit(RLIMIT_NOFILE, &highest) == 0) limit = highest;
  if (limit.rlim_cur == RLIM_INFINITY) return;
  const int64_t open = num_open_files(), most = static_cast<int64_t>(limit.rlim_cur);
  const int64_t needed = files_of_group(world_size, serves_store, backend);
  if (open >= 0 && most - open >= needed) return;
  throw CommError("this process may have no more than ", most, " files open, and a group of ", world_size,
                  " ranks needs about ", needed + (open < 0 ? most : open),
                  ": raise the hard limit (ulimit -H -n)");
}

}  // namespace tessera::comm
