#include "tools/common/captured_run.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <iostream>

#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/utf8.h"
#include "launcher/failure/failure.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGrace = std::chrono::seconds(10);

struct Child {
  pid_t pid = -1;
  FileDescriptor out, err;  ///< empty at their end
};

[[noreturn]] void be_child(const std::function<int()>& body, int out, int err) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  int code = 1;
  try {
    code = body();
  } catch (const std::exception& error) {
    std::cerr << "error: " << without_control_characters(error.what(), /*one_line=*/true) << '\n';
  }
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(code);
}

Child start(const std::function<int()>& body) {
  int out[2], err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0)
    throw Error("no pipe could be made: ", describe_errno(errno));
  Child child{-1, FileDescriptor(out[0]), FileDescriptor(err[0])};
  const FileDescriptor out_end(out[1]), err_end(err[1]);
  std::cout.flush();
  std::fflush(nullptr);
  child.pid = ::fork();
  if (child.pid < 0) throw Error("no process could be started: ", describe_start_errno(errno));
  if (child.pid == 0) be_child(body, out_end.get(), err_end.get());
  return child;
}

/// Reads what is there. At the end the descriptor is closed.
void read_some(FileDescriptor& pipe, std::string& text) {
  char buffer[65536];
  const ssize_t n = ::read(pipe.get(), buffer, sizeof(buffer));
  if (n > 0) text.append(buffer, static_cast<size_t>(n));
  if (n == 0 || (n < 0 && errno != EINTR)) pipe.reset();
}

class Children {
 public:
  Children(const std::vector<std::function<int()>>& bodies, std::chrono::seconds limit)
      : end_(Clock::now() + limit), runs_(bodies.size()) {
    try {
      for (const auto& body : bodies) children_.push_back(start(body));
    } catch (...) {
      for (const Child& child : children_) ::kill(child.pid, SIGKILL);
      finish();
      throw;
    }
  }

  std::vector<CapturedRun> finish() {
    while (read_once()) {
    }
    for (size_t i = 0; i < children_.size(); ++i) {
      int status = 0;
      while (::waitpid(children_[i].pid, &status, 0) < 0 && errno == EINTR) {
      }
      runs_[i].exit_code = launcher::exit_code(status);
    }
    return std::move(runs_);
  }

 private:
  /// Waits for output, or for the limit. False: all pipes have ended.
  bool read_once() {
    std::vector<pollfd> polled;
    std::vector<std::pair<FileDescriptor*, std::string*>> pipes;
    for (size_t i = 0; i < children_.size(); ++i)
      for (const auto& [pipe, text] :
           {std::pair{&children_[i].out, &runs_[i].out}, std::pair{&children_[i].err, &runs_[i].err}})
        if (*pipe) {
          polled.push_back({pipe->get(), POLLIN, 0});
          pipes.emplace_back(pipe, text);
        }
    if (polled.empty()) return false;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
    if (left <= 0) return end_all();
    ::poll(polled.data(), polled.size(), static_cast<int>(std::min<int64_t>(left + 1, 1000)));
    for (size_t i = 0; i < polled.size(); ++i)
      if (polled[i].revents != 0) read_some(*pipes[i].first, *pipes[i].second);
    return true;
  }

  /// Ends all programs when the limit is reached. Returns false if there is nothing more to wait for.
  bool end_all() {
    const int signal = signalled_ ? SIGKILL : SIGTERM;
    for (size_t i = 0; i < children_.size(); ++i)
      if (children_[i].out || children_[i].err) {
        runs_[i].timed_out = true;
        ::kill(children_[i].pid, signal);
      }
    if (signalled_) return false;
    signalled_ = true;
    end_ = Clock::now() + kGrace;
    return true;
  }

  Clock::time_point end_;
  std::vector<CapturedRun> runs_;
  std::vector<Child> children_;
  bool signalled_ = false;
};

}  // namespace

std::vector<CapturedRun> run_captured(const std::vector<std::function<int()>>& bodies,
                                      std::chrono::seconds limit) {
  return Children(bodies, limit).finish();
}

}  // namespace tessera::tools
