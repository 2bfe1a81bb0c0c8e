#include "train/run/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/host_name.h"
#include "core/str.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLockName = ".lock";
constexpr int kTries = 20;  // another process's check_not_in_use() holds the lock for a moment
constexpr auto kPause = std::chrono::milliseconds(10);

std::string this_process() { return str("process ", ::getpid(), " on ", host_name()); }

[[noreturn]] void fail_in_use(const fs::path& folder, int file) {
  char text[512] = {};
  const ssize_t bytes = ::pread(file, text, sizeof text - 1, 0);
  std::string holder(text, bytes > 0 ? static_cast<size_t>(bytes) : 0);
  holder = holder.substr(0, holder.find('\n'));
  throw ConfigError("trainer.output_dir: ", folder, " is in use by another run (",
                    holder.empty() ? "a process that has just started" : holder,
                    "); expected another folder, or to start after that run has ended");
}

[[noreturn]] void fail_to_write(const fs::path& path, int error) {
  throw ConfigError("trainer.output_dir: ", path, " cannot be written: ", std::strerror(error));
}

/// Whether `path` still names this file: the previous holder of the lock may have removed it.
bool is_at(int file, const fs::path& path) {
  struct stat mine{}, named{};
  return ::fstat(file, &mine) == 0 && ::stat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
         mine.st_dev == named.st_dev;
}

}  // namespace

RunLock::RunLock(const fs::path& folder) : path_(folder / kLockName) {
  for (int tries = 1;; ++tries) {
    FileDescriptor file(::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
    if (!file) fail_to_write(path_, errno);
    if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) {
      if (!is_at(file.get(), path_)) continue;
      const std::string holder = this_process() + "\n";
      if (::ftruncate(file.get(), 0) != 0) fail_to_write(path_, errno);
      (void)!::pwrite(file.get(), holder.data(), holder.size(),
                      0);  // on a full disk the lock holds without its holder's name
      file_ = std::move(file);
      return;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) {
      missing_ = std::strerror(errno);
      return;
    }
    if (tries >= kTries) fail_in_use(folder, file.get());
    std::this_thread::sleep_for(kPause);
  }
}

RunLock::~RunLock() {
  if (file_)
    ::unlink(path_.c_str());  // before the lock is released: a process that waits for it checks is_at()
}

void check_not_in_use(const fs::path& folder) {
  const FileDescriptor file(
      ::open((folder / kLockName).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    fail_in_use(folder, file.get());
}

}  // namespace tessera::train
