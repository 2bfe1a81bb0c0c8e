#include "launcher/process/process.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

std::vector<char*> pointers_to(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& string : strings) pointers.push_back(const_cast<char*>(string.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

/// The child's data, prepared before the fork: after it only async-signal-safe calls are allowed.
struct ChildPlan {
  const SpawnOptions& options;
  std::vector<char*> argv;
  std::vector<char*> envp;
  pid_t launcher;
  int error_pipe;
  cpu_set_t cores;
};

/// Runs in the child: becomes the program. Returns only on failure, with errno set.
void exec_child(const ChildPlan& plan) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != plan.launcher) ::_exit(1);  // the launcher died before prctl(): no signal will come
  const SpawnOptions& options = plan.options;
  if (!options.cores.empty() && ::sched_setaffinity(0, sizeof(plan.cores), &plan.cores) != 0) return;
  if (options.stdin_fd >= 0 && ::dup2(options.stdin_fd, 0) < 0) return;
  if (options.stdout_fd >= 0 && ::dup2(options.stdout_fd, 1) < 0) return;
  if (options.stderr_fd >= 0 && ::dup2(options.stderr_fd, 2) < 0) return;
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGCHLD, SIGPIPE, SIGXFSZ}) ::signal(signal, SIG_DFL);
  for (const int signal : {SIGTTIN, SIGTTOU}) ::signal(signal, SIG_IGN);
  ::sigprocmask(SIG_SETMASK, &options.signal_mask, nullptr);
  ::execvpe(options.program.c_str(), plan.argv.data(), plan.envp.data());
}

int wait_for(pid_t pid) {
  int status = 0;
  if (TEMP_FAILURE_RETRY(::waitpid(pid, &status, 0)) < 0) return W_EXITCODE(1, 0);  // it is not ours any more
  return status;
}

/// The child's errno if its exec failed; 0 if it succeeded (the pipe is closed on exec).
int exec_error(int pipe_fd) {
  int error = 0;
  return TEMP_FAILURE_RETRY(::read(pipe_fd, &error, sizeof(error))) == sizeof(error) ? error : 0;
}

/// What is given to a program, for the error E2BIG.
std::string too_much_given(const SpawnOptions& options) {
  size_t num_bytes = 0;
  for (const auto* list : {&options.args, &options.environment})
    for (const std::string& text : *list) num_bytes += text.size() + 1;
  return str(" (its arguments and its environment, with the variables of --env-file, are ", num_bytes,
             " bytes; the system takes a quarter of `ulimit -s` in all, and 128 KiB in one of them)");
}

}  // namespace

Process Process::spawn(const SpawnOptions& options) {
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0)
    throw CommError("cannot start '", options.program, "': ", describe_errno(errno));
  FileDescriptor reader(pipe_fds[0]), writer(pipe_fds[1]);
  std::vector<std::string> argv = {options.program};
  argv.insert(argv.end(), options.args.begin(), options.args.end());
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int core : options.cores) CPU_SET(static_cast<size_t>(core), &cores);
  const ChildPlan plan{options,    pointers_to(argv), pointers_to(options.environment),
                       ::getpid(), writer.get(),      cores};

  const pid_t pid = ::fork();
  if (pid == 0) {
    exec_child(plan);
    const int error = errno;
    if (::write(plan.error_pipe, &error, sizeof(error)) < 0) ::_exit(126);
    ::_exit(127);
  }
  if (pid < 0) throw CommError("cannot start '", options.program, "': ", describe_start_errno(errno));
  ::setpgid(pid, pid);  // also in the parent: the group must exist before the first signal to it
  writer.reset();
  if (const int error = exec_error(reader.get())) {
    wait_for(pid);
    throw CommError("cannot start '", options.program, "': ", std::strerror(error),
                    error == E2BIG ? too_much_given(options) : "");
  }
  return Process(pid);
}

Process::Process(Process&& other) noexcept
    : pid_(other.pid_), running_(std::exchange(other.running_, false)) {}

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(running_, other.running_);
  return *this;
}

Process::~Process() {
  if (!running_) return;
  signal(SIGKILL);
  collect();
}

void Process::signal(int signal) const {
  if (running_) ::kill(-pid_, signal);
}

bool Process::has_ended() const {
  siginfo_t info{};
  return !running_ || ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
         info.si_pid != 0;
}

int Process::collect() {
  // The group is killed while its leader is a zombie: until it is reaped no other process can get its number.
  siginfo_t info{};
  (void)TEMP_FAILURE_RETRY(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT));
  ::kill(-pid_, SIGKILL);
  running_ = false;
  return wait_for(pid_);
}

}  // namespace tessera::launcher
