#include "launcher/guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/str.h"
#include "launcher/environment.h"

namespace tessera::launcher {
namespace {

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
  for (;;) {
    pid_t message = 0;
    const ssize_t n = ::recv(0, &message, sizeof(message), MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n != static_cast<ssize_t>(sizeof(message))) break;  // the launcher is gone
    if (message > 0 && num_groups < kMaxRanks) groups[num_groups++] = message;
    if (message < 0)
      num_groups = static_cast<int>(std::remove(groups, groups + num_groups, -message) - groups);
  }
  for (int i = 0; i < num_groups; ++i) ::kill(-groups[i], SIGKILL);
  ::_exit(0);
}

}  // namespace

Guard::Guard() {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    throw CommError(str("cannot start the launcher's guard: ", std::strerror(errno)));
  FileDescriptor ours(sockets[0]), theirs(sockets[1]);
  pid_ = ::fork();
  if (pid_ == 0) guard_main(theirs.get());
  if (pid_ < 0) throw CommError(str("cannot start the launcher's guard: ", std::strerror(errno)));
  socket_ = std::move(ours);
}

Guard::~Guard() {
  socket_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guard::watch(pid_t group) { send(group); }

void Guard::forget(pid_t group) { send(-group); }

void Guard::send(pid_t message) {
  // If the guard was killed the run continues without it.
  while (::send(socket_.get(), &message, sizeof(message), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

}  // namespace tessera::launcher
