// exchange(): what it leaves in the store, and what it says when a rank does not come.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "comm/c10d.h"
#include "comm/gloo.h"
#include "comm/init.h"
#include "comm/shm.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::error_of;

class ExchangeTest : public testing::EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backends, ExchangeTest, ::testing::Values("gloo", "shm"), testing::backend_name);

Options with_timeout(const std::string& backend, std::chrono::milliseconds timeout) {
  Options options;
  options.backend = backend;
  options.timeout = timeout;
  options.rendezvous_timeout = std::chrono::seconds(20);
  return options;
}

TEST_P(ExchangeTest, TheStoreDoesNotGrow) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const GroupStore group_store(store, "the store");
  std::vector<std::thread> threads;
  std::vector<int64_t> num_keys_early(3), num_keys_late(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      auto family = std::make_shared<Family>(group_store, rank, 3, false);
      GlooOptions gloo;
      gloo.rank = rank;
      gloo.size = 3;
      gloo.timeout = gloo.connect_timeout = std::chrono::seconds(20);
      C10dCommunicator comm(family, gloo.timeout, [&](const GroupStore& under, FailureHook hook) {
        if (GetParam() == "shm")
          return make_shm_transport(under, rank, 3, gloo.timeout, gloo.connect_timeout);
        return make_gloo_transport(under, gloo, std::move(hook));
      });
      for (int i = 0; i < 200; ++i) {
        comm.exchange("value", "growth");
        comm.barrier("everyone has tidied up");
        if (i == 3) num_keys_early[rank] = store->getNumKeys();
        comm.barrier("everyone has counted");
      }
      num_keys_late[rank] = store->getNumKeys();
      comm.barrier("end");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(num_keys_early[rank], num_keys_late[rank]);
}

TEST_P(ExchangeTest, NamesTheRanksThatDidNotCome) {
  std::mutex mutex;
  std::vector<std::string> errors(4);
  run_threads(4, with_timeout(GetParam(), std::chrono::seconds(20)), [&](CommunicatorPtr comm) {
    if (comm->rank() == 1 || comm->rank() == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1200));
    }
    const std::string error = error_of([&] { comm->exchange("x", "plan", std::chrono::milliseconds(500)); });
    std::lock_guard lock(mutex);
    errors[comm->rank()] = error;
  });
  for (const int rank : {0, 2}) {
    EXPECT_EQ(errors[rank],
              "exchange of \"plan\", collective 1: ranks 1 and 3 have not arrived within 0.5 s");
  }
  for (const int rank : {1, 3}) {
    EXPECT_NE(errors[rank].find(str("rank ", rank, " came too late: ")), std::string::npos) << errors[rank];
  }
}

TEST_P(ExchangeTest, DifferentLabelsAreAnError) {
  std::mutex mutex;
  std::vector<std::string> errors;
  run_threads(2, with_timeout(GetParam(), std::chrono::seconds(20)), [&](CommunicatorPtr comm) {
    const std::string error = error_of([&] { comm->exchange("x", comm->rank() == 0 ? "plan" : "report"); });
    std::lock_guard lock(mutex);
    errors.push_back(error);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("\"plan\""), error.npos) << error;
    EXPECT_NE(error.find("\"report\""), error.npos) << error;
  }
}

TEST_P(ExchangeTest, ARankThatLeftIsNoticedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  std::string error;
  run_threads(2, with_timeout(GetParam(), std::chrono::seconds(60)), [&](CommunicatorPtr comm) {
    if (comm->rank() == 0) error = error_of([&] { comm->exchange("x", "plan"); });
  });
  EXPECT_LT(testing::seconds_since(start), 5);
  EXPECT_EQ(error, "exchange of \"plan\", collective 1: rank 1 left the group: it has finished");
}

}  // namespace
}  // namespace tessera::comm
