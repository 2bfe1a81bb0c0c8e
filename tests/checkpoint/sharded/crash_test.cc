// A process killed after any file operation of a save leaves a whole checkpoint: the old one or the new one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/checkpoint/expect_whole.h"
#include "tests/support/child_process.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using tessera::testing::start_child;
using tessera::testing::status_of;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Crash {
  int kill_after = 0;  // operations of all ranks together
  int fail_at = -1;    // the operation of rank 0 that fails, and from then on operations are counted
  std::string tag = "a";
};

/// Saves in a child that kills itself. Returns whether it was killed.
bool save_and_die(const SampleModel& model, const fs::path& directory, const Crash& crash) {
  const pid_t child = start_child([&] {
    std::atomic<int> num_done = 0, num_of_rank_0 = 0;
    std::atomic<bool> counting = crash.fail_at < 0;
    save_all(model, directory, crash.tag, [&](int rank) {
      const auto probe = [&, rank](std::string_view operation, const fs::path& path) {
        if (counting && ++num_done == crash.kill_after) ::kill(::getpid(), SIGKILL);
        if (rank == 0 && ++num_of_rank_0 == crash.fail_at) {
          counting = true;
          throw DiskError("cannot ", operation, " ", path, ": Input/output error");
        }
      };
      return DiskOptions{.sync = true, .probe = probe};
    });
  });
  const int status = status_of(child);
  if (!WIFSIGNALED(status)) {
    EXPECT_EQ(status, 0);
    return false;
  }
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  return true;
}

/// Crashes a save of `after` over `before` at every operation. Returns how many there were.
int crash_everywhere(int world, const std::string& tag) {
  const SampleModel before = sample_model(world, 1), after = sample_model(world, 2);
  bool saw_old = false, saw_new = false;
  int num_crashes = 0;
  for (int kill_after = 1;; ++kill_after) {
    SCOPED_TRACE(str("world ", world, ", tag ", tag, ", killed after operation ", kill_after));
    const MemoryFolder folder;
    EXPECT_THAT(save_all(before, folder.path(), "a"), Each(IsEmpty()));
    const bool killed =
        save_and_die(after, folder.path(), {.kill_after = kill_after, .fail_at = -1, .tag = tag});
    expect_whole(folder.path(), before, after);
    const bool is_new = Checkpoint::open(folder.path()).manifest().state.at("global_step") == 2;
    (is_new ? saw_new : saw_old) = true;
    if (!killed) {
      EXPECT_TRUE(is_new);
      break;
    }
    ++num_crashes;
    // The next save removes leftovers.
    EXPECT_THAT(save_all(after, folder.path(), "b"), Each(IsEmpty()));
    EXPECT_THAT(names_in(folder.path()), ElementsAre("a", "b", "latest"));
    EXPECT_EQ(after.difference(Checkpoint::open(folder.path())), "");
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_TRUE(saw_old && saw_new);
  return num_crashes;
}

class CrashOf : public ::testing::TestWithParam<int> {};  // ranks

TEST_P(CrashOf, AfterAnyOperationAWholeCheckpointIsLeft) {
  for (const char* tag : {"a", "b"}) EXPECT_GE(crash_everywhere(GetParam(), tag), 20 * GetParam());
}

INSTANTIATE_TEST_SUITE_P(Worlds, CrashOf, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return str("World", info.param); });

// A failure near the end is undone. A crash while undoing must leave a whole checkpoint, too.
TEST(Crash, WhileUndoing) {
  const SampleModel before = sample_model(1, 1), after = sample_model(1, 2);
  int num_crashes = 0;
  for (const char* tag : {"a", "b"}) {
    int num_operations = 0;
    {
      const MemoryFolder folder;
      save_all(before, folder.path(), "a");
      save_all(after, folder.path(), tag, [&](int) {
        return DiskOptions{.sync = true, .probe = [&](auto, const auto&) { ++num_operations; }};
      });
    }
    for (int fail_at = num_operations - 12; fail_at <= num_operations; ++fail_at)
      for (int kill_after = 1;; ++kill_after) {
        SCOPED_TRACE(str("tag ", tag, ", operation ", fail_at, " of ", num_operations, " failed, killed ",
                         kill_after, " later"));
        const MemoryFolder folder;
        save_all(before, folder.path(), "a");
        const bool killed =
            save_and_die(after, folder.path(), {.kill_after = kill_after, .fail_at = fail_at, .tag = tag});
        expect_whole(folder.path(), before, after);
        if (!killed || HasFailure()) break;
        ++num_crashes;
      }
  }
  EXPECT_GE(num_crashes, 40);
}

}  // namespace
}  // namespace tessera::checkpoint::testing
