#include "tools/common/captured_run.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <thread>

#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/files/input_file.h"
#include "core/str.h"
#include "core/utf8.h"
#include "launcher/failure/failure.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGrace = std::chrono::seconds(10);
constexpr auto kPause = std::chrono::milliseconds(10);

struct Child {
  pid_t pid = -1;  ///< -1: it has ended
  FileDescriptor out, err;
  CapturedRun run = {};
};

/// A file in memory: a program that writes into it never waits for a reader, as it would at a full pipe.
FileDescriptor memory_file() {
  FileDescriptor file(::memfd_create("output", MFD_CLOEXEC));
  if (!file) throw Error("no file could be made in memory: ", describe_errno(errno));
  return file;
}

std::string text_of(const FileDescriptor& file) {
  return InputFile(str("/proc/self/fd/", file.get())).read_all();
}

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
  Child child{-1, memory_file(), memory_file()};
  std::cout.flush();
  std::fflush(nullptr);
  child.pid = ::fork();
  if (child.pid < 0) throw Error("no process could be started: ", describe_start_errno(errno));
  if (child.pid == 0) be_child(body, child.out.get(), child.err.get());
  return child;
}

/// Whether it has ended, and been collected.
bool has_ended(Child& child) {
  int status = 0;
  if (child.pid < 0 || ::waitpid(child.pid, &status, WNOHANG) != child.pid) return child.pid < 0;
  child.pid = -1;
  child.run.exit_code = launcher::exit_code(status);
  return true;
}

/// Returns when all have ended. At `end` they get `signal`, and each kGrace later SIGKILL.
void wait_for(std::vector<Child>& children, Clock::time_point end, int signal) {
  for (;;) {
    size_t num_ended = 0;
    for (Child& child : children) num_ended += has_ended(child) ? 1 : 0;
    if (num_ended == children.size()) return;
    if (Clock::now() >= end) {
      for (Child& child : children) {
        if (child.pid < 0) continue;
        child.run.timed_out = true;
        ::kill(child.pid, signal);
      }
      signal = SIGKILL;
      end = Clock::now() + kGrace;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

std::vector<CapturedRun> run_captured(const std::vector<std::function<int()>>& bodies,
                                      std::chrono::seconds limit) {
  std::vector<Child> children;
  try {
    for (const auto& body : bodies) children.push_back(start(body));
  } catch (...) {
    wait_for(children, Clock::now(), SIGKILL);
    throw;
  }
  wait_for(children, Clock::now() + limit, SIGTERM);
  std::vector<CapturedRun> runs;
  for (Child& child : children) {
    child.run.out = text_of(child.out);
    child.run.err = text_of(child.err);
    runs.push_back(std::move(child.run));
  }
  return runs;
}

}  // namespace tessera::tools
