#include "launcher/process/guard.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/files/disk_error.h"
#include "launcher/environment/environment.h"

namespace tessera::launcher {
namespace {

/// What the launcher says, besides a group to watch (above 0) or to forget (below): a folder's path follows,
/// of this many bytes with the 0 at the end.
struct PathMessage {
  pid_t mark = 0;
  uint32_t which = 0;
  uint32_t num_bytes = 0;
};
constexpr uint32_t kNumFolders = 2;  // of Guard::Folder
/// Is sent in place of a group's number, and says that the launcher ends in order.
constexpr pid_t kInOrder = std::numeric_limits<pid_t>::min();

/// Makes only async-signal-safe calls, and uses no heap memory. `name` is in the folder `parent`.
void remove_tree(int parent, const char* name, int depth) {
  const int fd = ::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) {
    ::unlinkat(parent, name, 0);
    return;
  }
  alignas(dirent64) char entries[4096];
  for (long n; depth > 0 && (n = ::syscall(SYS_getdents64, fd, entries, sizeof(entries))) > 0;) {
    for (long at = 0; at < n;) {
      const auto* const entry = reinterpret_cast<const dirent64*>(entries + at);
      at += entry->d_reclen;
      if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0)
        remove_tree(fd, entry->d_name, depth - 1);
    }
  }
  ::close(fd);
  ::unlinkat(parent, name, AT_REMOVEDIR);
}

/// The launcher's files are closed before the kernel ends its ranks, and a rank that is in the middle of a
/// save makes the folder again. So it must have been gone for half a second.
void remove_folder(const char* path) {
  constexpr int kMaxDepth = 4, kMaxChecks = 500, kEnough = 25;
  int num_gone = 0;
  for (int check = 0; check < kMaxChecks && num_gone < kEnough; ++check) {
    remove_tree(AT_FDCWD, path, kMaxDepth);
    num_gone = ::access(path, F_OK) != 0 ? num_gone + 1 : 0;
    const timespec pause{0, 20'000'000};
    ::nanosleep(&pause, nullptr);
  }
}

/// The main function of the guard. Only async-signal-safe calls, no heap memory.
[[noreturn]] void guard_main(int socket) {
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);  // until the launcher ends only SIGKILL ends the guard
  ::setsid();                                 // away from the terminal's signals and from kill -9 -GROUP
  ::prctl(PR_SET_NAME, "tessera-guard");
  ::dup2(socket, 0);
  if (::close_range(1, ~0U, 0) != 0)  // a pipe held open here would keep its reader waiting
    for (int fd = 1; fd < 1024; ++fd) ::close(fd);

  pid_t groups[kMaxRanks];
  int num_groups = 0;
  char folders[kNumFolders][Guard::kMaxPath + 1] = {};
  bool in_order = false;
  for (;;) {
    pid_t message = 0;
    const ssize_t n = ::recv(0, &message, sizeof(message), MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n != static_cast<ssize_t>(sizeof(message))) break;  // the launcher is gone
    if (message == kInOrder) in_order = true;
    if (message == 0) {
      uint32_t head[2];  // the rest of a PathMessage
      if (::recv(0, head, sizeof(head), MSG_WAITALL) != sizeof(head) || head[0] >= kNumFolders ||
          head[1] > sizeof(folders[0]) || ::recv(0, folders[head[0]], head[1], MSG_WAITALL) != head[1])
        break;
    }
    if (message > 0 && num_groups < kMaxRanks) groups[num_groups++] = message;
    if (message < 0 && message != kInOrder)
      num_groups = static_cast<int>(std::remove(groups, groups + num_groups, -message) - groups);
  }
  for (int i = 0; i < num_groups; ++i) ::kill(-groups[i], SIGKILL);
  for (const auto& folder : folders)
    if (!in_order && folder[0] != 0) remove_folder(folder);
  ::_exit(0);
}

}  // namespace

Guard::Guard() {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    throw CommError("cannot start the launcher's guard: ", describe_errno(errno));
  FileDescriptor ours(sockets[0]), theirs(sockets[1]);
  pid_ = ::fork();
  if (pid_ == 0) guard_main(theirs.get());
  if (pid_ < 0) throw CommError("cannot start the launcher's guard: ", describe_start_errno(errno));
  socket_ = std::move(ours);
}

Guard::~Guard() {
  send(kInOrder);
  socket_.reset();
  (void)TEMP_FAILURE_RETRY(::waitpid(pid_, nullptr, 0));
}

void Guard::watch(pid_t group) { send(group); }

void Guard::forget(pid_t group) { send(-group); }

void Guard::remove_if_killed(Folder which, const std::string& path) {
  if (path.size() > kMaxPath) throw CommError(path, ": the path is too long");
  const PathMessage message{0, static_cast<uint32_t>(which), static_cast<uint32_t>(path.size() + 1)};
  ::send(socket_.get(), &message, sizeof(message), MSG_NOSIGNAL);
  ::send(socket_.get(), path.c_str(), message.num_bytes, MSG_NOSIGNAL);
}

void Guard::send(pid_t message) {
  // If the guard was killed the run continues without it.
  (void)TEMP_FAILURE_RETRY(::send(socket_.get(), &message, sizeof(message), MSG_NOSIGNAL));
}

}  // namespace tessera::launcher
