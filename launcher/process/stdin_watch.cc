#include "launcher/process/stdin_watch.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "core/environment/start_error.h"
#include "core/error.h"

namespace tessera::launcher {
namespace {

/// Runs in the child: only async-signal-safe calls.
[[noreturn]] void watch(pid_t launcher) {
  ::setpgid(0, 0);  // Ctrl-C is the launcher's
  ::prctl(PR_SET_NAME, "tessera-stdin");
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::close_range(1, ~0U, 0) !=
      0)  // the guard waits for the end of a socket that only the launcher may hold
    for (int fd = 1; fd < 1024; ++fd) ::close(fd);
  char byte;
  for (int signal = SIGTERM;;) {
    const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
    if (n > 0 && byte == kFailureByte) signal = kFailureElsewhere;
    if (n > 0 && byte > '@' && ::getppid() == launcher) ::kill(launcher, byte - '@');
    if (n > 0 || (n < 0 && errno == EINTR)) continue;
    if (::getppid() == launcher) ::kill(launcher, signal);
    ::_exit(0);
  }
}

}  // namespace

StdinWatch::StdinWatch(bool active) {
  if (!active) return;
  const pid_t launcher = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0)
    throw CommError("cannot start a process that watches standard input: ", describe_start_errno(errno));
  if (pid_ == 0) watch(launcher);
}

StdinWatch::~StdinWatch() {
  if (pid_ <= 0 || ::waitpid(pid_, nullptr, WNOHANG) != 0) return;  // it has ended
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace tessera::launcher
