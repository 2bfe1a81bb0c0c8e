#include "comm/memory/host_thread.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

using tessera::testing::error_of;

TEST(HostThread, RunsTasksInOrderAndOneAtATime) {
  std::vector<int> done;  // of the thread's alone until wait() returns
  HostThread thread;
  std::vector<HostThread::Task> tasks;
  for (int i = 0; i < 100; ++i) tasks.push_back(thread.post([&done, i] { done.push_back(i); }));
  thread.wait(tasks[40]);
  thread.wait(tasks[3]);
  thread.wait(0);
  thread.wait_for_all();
  ASSERT_EQ(done.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(done[i], i);
}

TEST(HostThread, AFailureIsSaidByEveryWaitAndDropsWhatComesAfter) {
  HostThread thread;
  bool ran = false;
  const HostThread::Task failing = thread.post([] { throw Error("the disk is gone"); });
  const HostThread::Task next = thread.post([&] { ran = true; });
  for (const HostThread::Task task : {failing, next, failing})
    EXPECT_EQ(error_of([&] { thread.wait(task); }), "the disk is gone");
  EXPECT_EQ(error_of([&] { thread.wait_for_all(); }), "the disk is gone");
  EXPECT_FALSE(ran);
}

TEST(HostThread, EndsWithoutWhatItHasNotBegun) {
  int ran = 0;
  {
    HostThread thread;
    thread.wait(thread.post([&] { ++ran; }));
  }
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace tessera::comm
