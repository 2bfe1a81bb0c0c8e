#include "core/files/disk_error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "core/str.h"

namespace tessera {

std::string describe_errno(int error) {
  const char* reason = std::strerror(error);
  rlimit limit{};
  if (error != EFBIG || ::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return reason;
  return str(reason, ": this process may write files of at most ", limit.rlim_cur,
             " bytes (ulimit -f; RLIMIT_FSIZE)");
}

void throw_disk_error(const std::string& what, const std::filesystem::path& path, const std::string& reason) {
  throw DiskError(str("cannot ", what, " ", path.string(), ": ", reason), reason);
}

void throw_disk_error(const std::string& what, const std::filesystem::path& path, int error) {
  throw_disk_error(what, path, describe_errno(error));
}

}  // namespace tessera
