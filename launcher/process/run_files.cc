#include "launcher/process/run_files.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "core/error.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

namespace fs = std::filesystem;

std::string name_of(int rank, const char* suffix) {
  char text[32];
  std::snprintf(text, sizeof(text), "rank_%05d%s", rank, suffix);
  return text;
}

}  // namespace

RunFiles::RunFiles(const std::string& log_dir, int restart_count) {
  log_dir_ = log_dir.empty() ? temporary_.path() : fs::path(log_dir);
  if (!log_dir.empty() && restart_count > 0) log_dir_ /= str("attempt_", restart_count);
  std::error_code error;
  fs::create_directories(log_dir_, error);
  if (error) throw ConfigError("--log-dir ", log_dir, ": the folder cannot be made: ", error.message());
}

void RunFiles::keep() {
  if (log_dir_ == temporary_.path()) temporary_.keep();
}

std::string RunFiles::log(int rank) const { return (log_dir_ / name_of(rank, ".log")).string(); }

std::string RunFiles::output(int rank) const { return (temporary_.path() / name_of(rank, ".out")).string(); }

std::string RunFiles::errors(int rank) const { return (temporary_.path() / name_of(rank, ".err")).string(); }

std::string RunFiles::error(int rank) const { return (temporary_.path() / name_of(rank, ".error")).string(); }

FileDescriptor open_file(const std::string& path, int flags) {
  FileDescriptor fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!fd) throw ConfigError(path, ": cannot be opened: ", std::strerror(errno));
  return fd;
}

}  // namespace tessera::launcher
