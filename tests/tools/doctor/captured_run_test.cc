// What forks print, how they end, and that none outlives its limit.
#include "tools/common/captured_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <stdexcept>
#include <string>

#include "core/error.h"

namespace tessera::tools {
namespace {

using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

TEST(CapturedRun, KeepsOutputAndExitCodesInOrder) {
  const auto runs =
      run_captured({[] {
                      ::usleep(100'000);
                      std::cout << std::string(1 << 20, 'x');  // more than a pipe holds
                      return 0;
                    },
                    [] {
                      std::cerr << "oh\n";
                      return 7;
                    },
                    []() -> int { throw std::runtime_error("no host"); }, [] { return ::raise(SIGKILL); }},
                   seconds(60));
  ASSERT_EQ(runs.size(), 4U);
  EXPECT_EQ(runs[0].out, std::string(1 << 20, 'x'));
  EXPECT_EQ(runs[0].exit_code, 0);
  EXPECT_EQ(runs[1].err, "oh\n");
  EXPECT_EQ(runs[1].exit_code, 7);
  EXPECT_EQ(runs[2].err, "error: no host\n");
  EXPECT_EQ(runs[2].exit_code, 1);
  EXPECT_EQ(runs[3].exit_code, 128 + SIGKILL);
}

TEST(CapturedRun, OneThatCannotBeStartedEndsThoseThatWere) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = ::dup(0);
  ::close(next);
  const rlimit few{static_cast<rlim_t>(next + 7), before.rlim_max};  // a start takes four and keeps two
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto sleeper = [] {
    ::sleep(100);
    return 0;
  };
  EXPECT_THAT([&] { run_captured({sleeper, sleeper, sleeper}, seconds(60)); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("no pipe could be made")));
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

TEST(CapturedRun, RunsSideBySide) {
  const auto start = Clock::now();
  const auto sleeper = [] {
    ::sleep(1);
    return 0;
  };
  run_captured({sleeper, sleeper, sleeper, sleeper}, seconds(60));
  EXPECT_LT(Clock::now() - start, seconds(3));
}

TEST(CapturedRun, EndsAtTheLimit) {
  const auto start = Clock::now();
  const auto runs = run_captured({[] {
                                    std::cout << "before" << std::endl;
                                    ::sleep(100);
                                    return 0;
                                  },
                                  [] { return 0; }},
                                 seconds(1));
  EXPECT_LT(Clock::now() - start, seconds(8));
  EXPECT_TRUE(runs[0].timed_out);
  EXPECT_EQ(runs[0].out, "before\n");
  EXPECT_EQ(runs[0].exit_code, 128 + SIGTERM);
  EXPECT_FALSE(runs[1].timed_out);
}

}  // namespace
}  // namespace tessera::tools
