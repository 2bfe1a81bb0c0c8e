#include "core/files/disk_error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "core/str.h"

namespace tessera {

namespace {

std::optional<rlim_t> limit_of(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

}  // namespace

std::string describe_errno(int error) {
  const char* reason = std::strerror(error);
  if (const auto limit = limit_of(RLIMIT_FSIZE); error == EFBIG && limit)
    return str(reason, ": this process may write files of at most ", *limit,
               " bytes (ulimit -f; RLIMIT_FSIZE)");
  if (const auto limit = limit_of(RLIMIT_NOFILE); error == EMFILE && limit)
    return str(reason, ": this process may have no more than ", *limit,
               " files open; raise the limit (ulimit -n)");
  return reason;
}

std::string describe_start_errno(int error) {
  if (const auto limit = limit_of(RLIMIT_NPROC); error == EAGAIN && limit)
    return str(std::strerror(error), ": this user may have ", *limit,
               " processes and threads (ulimit -u; RLIMIT_NPROC)");
  return describe_errno(error);
}

void throw_disk_error(const std::string& what, const std::filesystem::path& path, const std::string& reason) {
  throw DiskError(str("cannot ", what, " ", path, ": ", reason), DiskError::Reason{reason});
}

void throw_disk_error(const std::string& what, const std::filesystem::path& path, int error) {
  throw_disk_error(what, path, describe_errno(error));
}

}  // namespace tessera
