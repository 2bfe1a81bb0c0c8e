#include "tests/launcher/tool.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>

#include "core/str.h"
#include "tests/support/files.h"

namespace tessera::launcher::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

bool runs(pid_t pid) {
  std::ifstream file(str("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && line.size() > name_end + 2 && line[name_end + 2] != 'Z' &&
         line[name_end + 2] != 'X';
}

}  // namespace

std::string Folder::read(const std::string& name) const { return read_text(path(name)); }

bool Folder::wait_for(const std::string& name, int count) const {
  const auto deadline = after(kHangs);
  for (int i = 0; i < count; ++i)
    while (!has(str(name, "_", i))) {
      if (Clock::now() > deadline) return false;
      ::usleep(2000);
    }
  return true;
}

std::vector<pid_t> Folder::pids() const {
  std::vector<pid_t> pids;
  for (const auto& entry : fs::directory_iterator(path())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("pid_") && !name.ends_with("~")) pids.push_back(std::stoi(read(name)));
  }
  return pids;
}

bool all_gone(const std::vector<pid_t>& pids) {
  const auto deadline = after(kHangs);
  for (const pid_t pid : pids)
    while (runs(pid)) {
      if (Clock::now() > deadline) return false;
      ::usleep(2000);
    }
  return true;
}

Tool::Tool(const Folder& folder, const std::vector<std::string>& args,
           const std::vector<std::string>& environment, const std::string& stdin_path) {
  const std::string out = folder.path("tool.out"), err = folder.path("tool.err");
  std::vector<const char*> argv = {TEST_TOOL};
  for (const std::string& arg : args) argv.push_back(arg.c_str());
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ != 0) return;
  for (const std::string& entry : environment) ::putenv(const_cast<char*>(entry.c_str()));
  ::setpgid(0, 0);
  ::dup2(::open(stdin_path.c_str(), O_RDONLY), 0);
  ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 1);
  ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 2);
  ::close_range(3, ~0U, 0);
  ::execv(TEST_TOOL, const_cast<char**>(argv.data()));
  ::_exit(125);
}

Tool::~Tool() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Tool::signal(int signal) const { ::kill(pid_, signal); }

int Tool::wait(double seconds) {
  const auto deadline = after(seconds);
  for (;;) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    if (Clock::now() > deadline) return -1;
    ::usleep(2000);
  }
}

std::vector<std::string> launch_args(const Folder& folder, int nproc, const std::vector<std::string>& action,
                                     const std::vector<std::string>& flags) {
  std::vector<std::string> args = {"launch", "-n", std::to_string(nproc)};
  args.insert(args.end(), flags.begin(), flags.end());
  args.insert(args.end(), {"--", TEST_RANK, folder.path()});
  args.insert(args.end(), action.begin(), action.end());
  return args;
}

}  // namespace tessera::launcher::testing
