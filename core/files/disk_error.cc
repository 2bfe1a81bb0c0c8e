#include "core/files/disk_error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "core/str.h"

namespace tessera {

std::string describe_errno(int error) {
  const char* reason = std::strerror(error);
  rlimit limit{};
  const auto limited = [&](int resource) {
    return ::getrlimit(static_cast<__rlimit_resource>(resource), &limit) == 0 &&
           limit.rlim_cur != RLIM_INFINITY;
  };
  if (error == EFBIG && limited(RLIMIT_FSIZE))
    return str(reason, ": this process may write files of at most ", limit.rlim_cur,
               " bytes (ulimit -f; RLIMIT_FSIZE)");
  if (error == EMFILE && limited(RLIMIT_NOFILE))
    return str(reason, ": this process may have no more than ", limit.rlim_cur,
               " files open; raise the limit (ulimit -n)");
  if (error == EAGAIN && limited(RLIMIT_NPROC))  // of fork(), and of a new thread
    return str(reason, ": this user may have ", limit.rlim_cur,
               " processes and threads (ulimit -u; RLIMIT_NPROC)");
  return reason;
}

void throw_disk_error(const std::string& what, const std::filesystem::path& path, const std::string& reason) {
  throw DiskError(str("cannot ", what, " ", path.string(), ": ", reason), reason);
}

void throw_disk_error(const std::string& what, const std::filesystem::path& path, int error) {
  throw_disk_error(what, path, describe_errno(error));
}

}  // namespace tessera
