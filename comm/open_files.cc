#include "comm/open_files.h"

#include <dirent.h>
#include <sys/resource.h>

#include <cstdint>
#include <memory>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

/// Event loops, listening sockets and what is open for a moment, in any group. Measured: up to 15 on rank 0,
/// with some for the program's own files.
constexpr int kForAnyGroup = 20;

/// Of each other rank: its connection to the store, the one that tells whether it is
/// alive, and what carries the collectives.
int for_each_rank(bool serves, const std::string& backend) {
  const int for_collectives = backend == "nccl"   ? 0
                              : backend == "gloo" ? 2
                                                  : 1;  // an engine has two groups over Gloo
  return (serves ? 1 : 0) + 1 + for_collectives;
}

int64_t num_open_files() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  int64_t count = -3;  // ".", ".." and the folder itself
  while (folder && ::readdir(folder.get()) != nullptr) ++count;
  return folder ? count : -1;
}

}  // namespace

void check_open_files(int world_size, bool serves, const std::string& backend) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const int64_t open = num_open_files(), most = static_cast<int64_t>(limit.rlim_cur);
  const int64_t needed = kForAnyGroup + int64_t{for_each_rank(serves, backend)} * world_size;
  if (open >= 0 && most - open >= needed) return;
  throw CommError(str("this process may have no more than ", most, " files open, and a group of ", world_size,
                      " ranks needs about ", needed + (open < 0 ? most : open),
                      ": raise the limit (ulimit -n)"));
}

}  // namespace tessera::comm
