// The launcher on a terminal: Ctrl-C, Ctrl-Z, and ranks that write to it from the background.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "core/str.h"
#include "tests/launcher/tool.h"

namespace tessera::launcher {
namespace {

using testing::all_gone;
using testing::Folder;
using ::testing::HasSubstr;
using testing::launch_args;

/// A minimal shell with job control: runs the tool as the foreground job of a new terminal, continues it
/// after it was stopped (and writes the file `stopped_0`), and exits with its code.
[[noreturn]] void shell_main(const std::vector<std::string>& args, const std::string& stopped_file) {
  ::signal(SIGTTOU, SIG_IGN);
  termios modes{};
  ::tcgetattr(0, &modes);
  modes.c_lflag |= TOSTOP;  // strictest mode: background jobs may not write
  modes.c_lflag &= ~static_cast<tcflag_t>(ECHO);
  ::tcsetattr(0, TCSANOW, &modes);
  std::vector<const char*> argv = {TEST_TOOL};
  for (const std::string& arg : args) argv.push_back(arg.c_str());
  argv.push_back(nullptr);
  const pid_t job = ::fork();
  if (job == 0) {
    ::setpgid(0, 0);
    ::tcsetpgrp(0, ::getpid());
    ::signal(SIGTTOU, SIG_DFL);
    ::execv(TEST_TOOL, const_cast<char**>(argv.data()));
    ::_exit(125);
  }
  int status = 0;
  while (::waitpid(job, &status, WUNTRACED) == job && WIFSTOPPED(status)) {
    std::ofstream(stopped_file + "~") << job;
    ::rename((stopped_file + "~").c_str(), stopped_file.c_str());  // atomically, since the test waits for it
    while (::access((stopped_file + "_go").c_str(), F_OK) != 0) ::usleep(2000);
    ::kill(-job, SIGCONT);
  }
  ::_exit(WIFSIGNALED(status) ? 99 : WEXITSTATUS(status));
}

class TerminalTest : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("TMPDIR", temporary_.path().c_str(), 1); }
  void TearDown() override { ::unsetenv("TMPDIR"); }
  void start(int nproc, const std::vector<std::string>& action) {
    const auto args = launch_args(folder_, nproc, action);
    shell_ = ::forkpty(&terminal_, nullptr, nullptr, nullptr);
    if (shell_ == 0) shell_main(args, folder_.path("stopped_0"));
  }
  void type(char key) { ASSERT_EQ(::write(terminal_, &key, 1), 1); }
  /// Reads the terminal until its last process has ended. Returns the exit code.
  int finish() {
    char buffer[256];
    for (ssize_t n; (n = ::read(terminal_, buffer, sizeof(buffer))) > 0;)
      screen_.append(buffer, static_cast<size_t>(n));
    int status = 0;
    ::waitpid(shell_, &status, 0);
    ::close(terminal_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  Folder folder_;     // the ranks' files
  Folder temporary_;  // the launcher's TMPDIR
  std::string screen_;
  int terminal_ = -1;
  pid_t shell_ = -1;
};

TEST_F(TerminalTest, RankZeroHasTheTerminalAndMayWriteToIt) {
  start(2, {"use_terminal"});
  EXPECT_EQ(finish(), 0);
  EXPECT_EQ(folder_.read("terminal_0"), "1111");  // isatty(1), isatty(2), modes set, read refused
  EXPECT_EQ(folder_.read("terminal_1").substr(0, 2), "00");
  EXPECT_THAT(screen_, HasSubstr("hello from rank 0"));
}

TEST_F(TerminalTest, CtrlCReachesEachRankOnce) {
  start(3, {"count_interrupts"});
  ASSERT_TRUE(folder_.wait_for("ready", 3));
  type('\x03');
  EXPECT_EQ(finish(), 130);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(folder_.read(str("interrupts_", rank)), "1");
  EXPECT_THAT(screen_, HasSubstr("SIGINT: 3 ranks have 30 s to end; Ctrl-C again kills them"));
  EXPECT_THAT(screen_, ::testing::Not(HasSubstr("failed")));
  EXPECT_TRUE(all_gone(folder_.pids()));
}

TEST_F(TerminalTest, CtrlZStopsTheRanksAndContinuesThem) {
  start(2, {"save", "0"});
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  type('\x1a');
  ASSERT_TRUE(folder_.wait_for("stopped", 1));
  const auto state = [&](int rank) {
    std::ifstream stat(str("/proc/", folder_.read(str("pid_", rank)), "/stat"));
    std::string text;
    std::getline(stat, text);
    return text.substr(text.rfind(')') + 2, 1);
  };
  const auto both_are = [&](bool stopped) {  // a signal takes effect when its process next runs
    const auto agree = [&](int rank) { return (state(rank) == "T") == stopped; };
    for (int i = 0; i < 2500 && !(agree(0) && agree(1)); ++i) ::usleep(2000);
    return agree(0) && agree(1);
  };
  EXPECT_TRUE(both_are(true));
  const pid_t launcher = std::stoi(folder_.read("stopped_0"));
  std::ofstream(folder_.path("stopped_0_go")) << "";
  EXPECT_TRUE(both_are(false));
  ::kill(launcher, SIGTERM);
  EXPECT_EQ(finish(), 0);
  EXPECT_TRUE(folder_.has("saved_0") && folder_.has("saved_1"));
}

}  // namespace
}  // namespace tessera::launcher
