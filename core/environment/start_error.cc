#include "core/environment/start_error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "core/files/disk_error.h"
#include "core/str.h"

namespace tessera {

std::string describe_start_errno(int error) {
  rlimit limit{};
  if (error == EAGAIN && ::getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return str(std::strerror(error), ": this user may have ", limit.rlim_cur,
               " processes and threads (ulimit -u; RLIMIT_NPROC)");
  return describe_errno(error);
}

}  // namespace tessera
