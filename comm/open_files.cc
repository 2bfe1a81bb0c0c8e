#include "comm/open_files.h"

#include <dirent.h>
#include <sys/resource.h>

#include <cstdint>
#include <memory>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

// Measured: the store's server and its client, event loops and listening sockets take up to 22 on rank 0; each other rank one connection to the
// store, one that tells whether it is alive, one to share memory, and one in each of Gloo's groups, of which an engine has two.
constexpr int kForAnyGroup = 28;
constexpr int kForEachRank = 5;

int64_t num_open_files() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  int64_t count = -3;  // ".", ".." and the folder itself
  while (folder && ::readdir(folder.get()) != nullptr) ++count;
  return folder ? count : -1;
}

}  // namespace

void check_open_files(int world_size) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const int64_t open = num_open_files(), most = static_cast<int64_t>(limit.rlim_cur);
  const int64_t needed = kForAnyGroup + int64_t{kForEachRank} * world_size;
  if (open >= 0 && most - open >= needed) return;
  throw CommError(str("this process may have no more than ", most, " files open, and ", world_size, " ranks need about ",
                      needed + (open < 0 ? most : open), ": raise the limit (ulimit -n)"));
}

}  // namespace tessera::comm
