// Ranks that do not arrive, issue something else, fail or leave: every other rank gets a one-line error soon.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "comm/init/init.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_of;

std::string backend;  // of the test that runs

class FailuresTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { backend = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Backends, FailuresTest, ::testing::Values("gloo", "shm", "hybrid", "staged"),
                         testing::backend_name);

/// No limit that a test waits for: what ends sooner has noticed something else.
constexpr auto kForever = std::chrono::hours(1);

/// Runs `body` on every rank; returns what each threw.
std::vector<std::string> errors_of(int size, milliseconds timeout,
                                   const std::function<void(CommunicatorPtr)>& body) {
  std::mutex mutex;
  std::vector<std::string> errors(static_cast<size_t>(size));
  testing::run_ranks(size, testing::quick_options(backend, timeout), [&](CommunicatorPtr comm) {
    const std::string error = error_of([&] { body(comm); });
    std::lock_guard lock(mutex);
    errors[static_cast<size_t>(comm->rank())] = error;
  });
  return errors;
}

/// Rank `late` issues `collective` once all others have failed in it.
std::vector<std::string> errors_of_late(int size, int late, milliseconds timeout,
                                        const std::function<void(Communicator&)>& collective) {
  std::latch others(size - 1);
  return errors_of(size, timeout, [&](CommunicatorPtr comm) {
    if (comm->rank() == late) others.wait();
    const std::string error = error_of([&] { collective(*comm); });
    if (comm->rank() != late) others.count_down();
    throw CommError(error);
  });
}

TEST_P(FailuresTest, ATimeoutNamesTheMissingRank) {
  const auto errors = errors_of_late(
      3, 2, seconds(1), [](Communicator& comm) { comm.all_reduce(at::ones({8}), "unit 1")->wait(); });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(errors[rank],
              "all_reduce of \"unit 1\" (8 x Float), collective 1: rank 2 has not arrived within 1 s");
  }
  EXPECT_EQ(errors[2].find("all_reduce of \"unit 1\" (8 x Float), collective 1: rank 2 came too late: "), 0u)
      << errors[2];
  EXPECT_NE(errors[2].find("had given up after 1 s"), std::string::npos) << errors[2];
}

// The calls of a single group do not show it: each rank has issued what that group expects.
TEST_P(FailuresTest, RanksThatWaitForEachOtherOnTwoGroupsSayWhoWaitsForWhat) {
  const auto errors = errors_of(2, seconds(4), [](CommunicatorPtr comm) {
    const auto gathers = comm->duplicate("gather"), reductions = comm->duplicate("reduce");
    at::Tensor buffer = at::ones({8});
    if (comm->rank() == 0) {
      gathers->exchange("3", "gather of unit 3");
      reductions->all_reduce(buffer, "unit 1")->wait();
    } else {
      reductions->all_reduce(buffer, "unit 1")->wait();
      gathers->exchange("3", "gather of unit 3");
    }
  });
  for (const std::string& error : errors) {
    EXPECT_NE(
        error.find("the ranks wait for each other: rank 0 waits in exchange of \"gather of unit 3\", which "
                   "rank 1 has not come to; "
                   "rank 1 waits in all_reduce of \"unit 1\" (8 x Float), which rank 0 has not come to"),
        std::string::npos)
        << error;
  }
}

TEST_P(FailuresTest, EveryCollectiveHasTheTimeout) {
  for (const std::string op : {"all_gather", "reduce_scatter", "broadcast", "barrier"}) {
    const auto errors = errors_of_late(2, 1, milliseconds(300), [&](Communicator& comm) {
      at::Tensor full = at::ones({8});
      if (op == "all_gather") comm.all_gather(full, full.narrow(0, comm.rank() * 4, 4), "late")->wait();
      if (op == "reduce_scatter") comm.reduce_scatter(full, "late")->wait();
      if (op == "broadcast") comm.broadcast(full, 1, "late")->wait();
      if (op == "barrier") comm.barrier("late");
    });
    EXPECT_EQ(errors[0].find(op), 0u) << errors[0];
    EXPECT_NE(errors[0].find("rank 1 has not arrived within 0.3 s"), std::string::npos) << errors[0];
  }
}

// As Ctrl-C does to rank 0, which waits for rank 1.
TEST_P(FailuresTest, AnInterruptEndsAWaitAndTheGroup) {
  // Shared memory takes a large buffer in pieces, and waits for room before it returns.
  for (const std::string op : {"all_reduce", "posting", "exchange", "barrier"}) {
    std::atomic<bool> interrupted = false;
    std::latch has_ended(1);  // rank 0's wait
    std::string own_error, others_error;
    JoinOptions options = testing::quick_options(backend, kForever);
    const auto main_thread_of_rank_0 = std::make_shared<std::atomic<std::thread::id>>();
    options.interrupt = [&] {
      if (interrupted && std::this_thread::get_id() == *main_thread_of_rank_0)
        throw std::runtime_error("stop");
    };
    testing::run_ranks(2, options, [&](CommunicatorPtr comm) {
      at::Tensor buffer = at::ones({op == "posting" ? 4 << 20 : 8});
      comm->barrier("start");
      const auto wait = [&] {
        if (op == "all_reduce" || op == "posting") comm->all_reduce(buffer, "unit 0")->wait();
        if (op == "exchange") comm->exchange("", "numbers");
        if (op == "barrier") comm->barrier("waited for");
      };
      if (comm->rank() == 0) {
        *main_thread_of_rank_0 = std::this_thread::get_id();
        interrupted = true;
        own_error = error_of(wait);
        has_ended.count_down();
      } else {
        has_ended.wait();
        others_error = error_of([&] {
          wait();  // an exchange has all values already
          comm->barrier("next");
        });
      }
    });
    EXPECT_EQ(own_error, "stop") << op;
    EXPECT_NE(others_error.find("rank 0"), std::string::npos) << op << ": " << others_error;
    EXPECT_NE(others_error.find("it was interrupted"), std::string::npos) << op << ": " << others_error;
  }
}

TEST_P(FailuresTest, ARankThatIsBusyButHasArrivedIsNotBlamed) {
  std::promise<void> has_given_up;  // rank 0
  const std::shared_future<void> given_up = has_given_up.get_future().share();
  const auto errors = errors_of(3, seconds(2), [&](CommunicatorPtr comm) {
    at::Tensor buffer = at::ones({8});
    comm->barrier("start");
    if (comm->rank() == 2) given_up.wait_for(seconds(60));
    const WorkPtr work = comm->all_reduce(buffer, "unit 0");
    // Issued, then busy elsewhere for longer than the limit. It tells what it has issued in the second after.
    if (comm->rank() == 1) std::this_thread::sleep_for(milliseconds(2200));
    const std::string error = error_of([&] { work->wait(); });
    if (comm->rank() == 0) has_given_up.set_value();
    throw CommError(error);
  });
  EXPECT_EQ(errors[0],
            "all_reduce of \"unit 0\" (8 x Float), collective 2: rank 2 has not arrived within 2 s");
}

TEST_P(FailuresTest, WhatDiffersBetweenRanksIsAnErrorNotAHangACrashOrAWrongSum) {
  using Call = std::function<void(Communicator&)>;
  const auto sum = [](int64_t numel, const char* label) -> Call {
    return [=](Communicator& comm) { comm.all_reduce(at::ones({numel}), label)->wait(); };
  };
  const Call gather = [](Communicator& comm) {
    comm.all_gather(at::zeros({64}), at::ones({32}), "unit 4")->wait();
  };
  const Call exchange = [](Communicator& comm) { comm.exchange("x", "plan"); },
             barrier = [](Communicator& comm) { comm.barrier("end"); },
             mean = [](Communicator& comm) { comm.all_reduce(at::ones({8}), "unit 3", 0.5)->wait(); };
  struct Case {
    Call of_rank_0, of_rank_1;
    std::vector<const char*> words = {};
  } const cases[] = {{sum(8, "unit 3"),
                      gather,
                      {"all_reduce of \"unit 3\" (8 x Float)", "all_gather of \"unit 4\" (64 x Float)"}},
                     {sum(8, "unit 3"), mean, {"all_reduce of", "all_reduce (mean) of \"unit 3\""}},
                     {sum(8, "unit"), sum(9, "unit")},
                     {sum(8, "unit 1"), sum(8, "unit 2")},
                     {exchange, barrier}};
  for (const Case& one : cases) {
    const auto errors = errors_of(2, seconds(2), [&](CommunicatorPtr comm) {
      comm->barrier("start");
      (comm->rank() == 0 ? one.of_rank_0 : one.of_rank_1)(*comm);
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error.find("collective 2 differs between ranks: rank "), 0u) << error;
      for (const char* word : one.words) EXPECT_NE(error.find(word), error.npos) << error;
    }
  }
}

TEST_P(FailuresTest, TheFirstErrorOfAThreadIsRethrownAndEndsTheOthers) {
  std::mutex mutex;
  std::vector<std::string> others;
  const std::string first = error_of([&] {
    testing::run_ranks(4, testing::quick_options(backend, kForever), [&](CommunicatorPtr comm) {
      at::Tensor buffer = at::ones({100});
      comm->all_reduce(buffer, "unit 0")->wait();
      if (comm->rank() == 1) throw std::runtime_error("boom\nand more");
      try {
        while (true) comm->all_reduce(buffer, "unit 1")->wait();
      } catch (const CommError& error) {
        std::lock_guard lock(mutex);
        others.push_back(error.what());
        throw;
      }
    });
  });
  EXPECT_EQ(first, "boom\nand more");
  ASSERT_EQ(others.size(), 3u);
  for (const std::string& error : others)
    EXPECT_NE(error.find("rank 1 left the group: boom"), error.npos) << error;
}

TEST_P(FailuresTest, AnErrorWithACollectiveInFlightDoesNotHang) {
  const std::string first = error_of([&] {
    testing::run_ranks(3, testing::quick_options(backend, kForever), [&](CommunicatorPtr comm) {
      const auto twin = comm->duplicate("twin");
      const auto third = comm->duplicate("third");
      if (comm->rank() == 2) {
        const WorkPtr work = comm->all_reduce(at::ones({100}), "nobody else comes");
        const WorkPtr twin_work = twin->all_reduce(at::ones({100}), "nor here");
        throw std::runtime_error("boom");
      }
      third->barrier("never");
    });
  });
  EXPECT_EQ(first, "boom");
}

TEST_P(FailuresTest, ARankThatReturnsEarlyIsNamed) {
  const auto errors = errors_of(3, kForever, [](CommunicatorPtr comm) {
    at::Tensor buffer = at::ones({100});
    comm->all_reduce(buffer, "unit 0")->wait();
    if (comm->rank() != 0) comm->all_reduce(buffer, "unit 1")->wait();
  });
  EXPECT_EQ(errors[0], "");
  for (const int rank : {1, 2}) {
    EXPECT_EQ(errors[rank],
              "all_reduce of \"unit 1\" (100 x Float), collective 2: rank 0 left the group: it has ended");
  }
}

TEST_P(FailuresTest, AnErrorStays) {
  std::latch has_failed(1);
  errors_of(2, milliseconds(500), [&](CommunicatorPtr comm) {
    at::Tensor buffer = at::ones({8});
    if (comm->rank() == 1) return has_failed.wait();
    const WorkPtr second = comm->all_reduce(buffer, "unit 1");
    const WorkPtr third = comm->all_reduce(buffer, "unit 2");
    const std::string first = error_of([&] { second->wait(); });
    has_failed.count_down();
    EXPECT_NE(first, "");
    EXPECT_EQ(error_of([&] { second->wait(); }), first);
    EXPECT_EQ(error_of([&] { third->wait(); }), first);
    EXPECT_TRUE(third->test()) << "a failed collective does not keep pollers waiting";
    EXPECT_EQ(error_of([&] { comm->all_reduce(buffer, "later"); }), first);
    EXPECT_EQ(error_of([&] { comm->barrier("later"); }), first);
    EXPECT_EQ(error_of([&] { comm->exchange("", "later"); }), first);
    EXPECT_EQ(error_of([&] { comm->duplicate("later"); }), first);
  });
}

TEST_P(FailuresTest, TheFailureOfADroppedWorkIsNoticedAtTheNextCall) {
  std::promise<void> noticed;
  const auto errors = errors_of(2, milliseconds(500), [&](CommunicatorPtr comm) {
    if (comm->rank() == 1) {
      noticed.get_future().wait_for(seconds(20));
      error_of([&] { comm->all_reduce(at::ones({8}), "dropped")->wait(); });
      return;
    }
    comm->all_reduce(at::ones({8}), "dropped");
    std::this_thread::sleep_for(seconds(1));
    try {
      comm->all_reduce(at::ones({8}), "next");
    } catch (const CommError&) {
      noticed.set_value();
      throw;
    }
    noticed.set_value();
  });
  EXPECT_EQ(errors[0],
            "all_reduce of \"dropped\" (8 x Float), collective 1: rank 1 has not arrived within 0.5 s");
}

TEST_P(FailuresTest, TestPolls) {
  testing::run_ranks(2, testing::quick_options(backend, seconds(20)), [](CommunicatorPtr comm) {
    if (comm->rank() == 1) std::this_thread::sleep_for(milliseconds(300));
    at::Tensor buffer = at::ones({8});
    const WorkPtr work = comm->all_reduce(buffer, "polled");
    if (comm->rank() == 0) {
      EXPECT_FALSE(work->test());
    }
    while (!work->test()) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(buffer[0].item<float>(), 2);
    work->wait();
  });
}

}  // namespace
}  // namespace tessera::comm
