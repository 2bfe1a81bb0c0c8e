// What a launcher on another host hears of the launcher of its run: bytes on its standard input, and the end.
#include "launcher/process/signals.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

class SignalWatchTest : public ::testing::Test {
 protected:
  SignalWatchTest() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ours_ = FileDescriptor(ends[0]);
    theirs_ = FileDescriptor(ends[1]);
  }
  void send(const std::string& text) {
    EXPECT_EQ(::write(ours_.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

  FileDescriptor ours_, theirs_;
};

TEST_F(SignalWatchTest, TheEndOfTheInputIsSigterm) {
  SignalWatch watch({}, theirs_.get());
  send(str(signal_byte(SIGUSR1), signal_byte(SIGUSR2)));
  EXPECT_EQ(watch.wait({}), SIGUSR1);
  EXPECT_EQ(watch.wait({}), SIGUSR2);
  ours_.reset();
  EXPECT_EQ(watch.wait({}), SIGTERM);
  EXPECT_FALSE(watch.wait(steady_clock::now())) << "it has ended once";
}

TEST_F(SignalWatchTest, AfterALineBreakItIsAFailureElsewhere) {
  SignalWatch watch({}, theirs_.get());
  send(std::string(1, kFailureByte));
  EXPECT_FALSE(watch.wait(steady_clock::now()));
  ours_.reset();
  EXPECT_EQ(watch.wait({}), kFailureElsewhere);
}

TEST_F(SignalWatchTest, BytesThatSayNothingHoldUpNoDeadline) {
  SignalWatch watch({}, theirs_.get());
  send(std::string(50'000, '\0'));
  const auto begin = steady_clock::now();
  EXPECT_FALSE(watch.wait(begin));
  EXPECT_FALSE(watch.take_pending_end());
  ::raise(SIGTERM);
  std::optional<int> signal;
  while (!signal && steady_clock::now() < begin + seconds(20)) signal = watch.wait(begin + seconds(20));
  EXPECT_EQ(signal, SIGTERM);
}

// Another thread may have taken SIGCHLD: the caller looks for itself.
TEST_F(SignalWatchTest, AWaitWithoutADeadlineEndsAllTheSame) {
  SignalWatch watch;
  EXPECT_FALSE(watch.wait({}));
}

}  // namespace
}  // namespace tessera::launcher
