// What holds for a communicator beside its sums: buffers it refuses or keeps alive, and no operators
// dispatched.
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <thread>

#include "comm/init/init.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"
#include "tests/support/watched_communicator.h"

namespace tessera::comm {
namespace {

using testing::filled;
using testing::quick_options;

class CommunicatorTest : public ::testing::TestWithParam<std::string> {
 protected:
  JoinOptions options() const { return quick_options(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, ::testing::Values("gloo", "shm", "hybrid", "staged"),
                         testing::backend_name);

TEST(Communicator, OneRankAloneIsLocal) {
  const CommunicatorPtr comm = join({}, Environment{});
  EXPECT_EQ(comm->rank(), 0);
  EXPECT_EQ(comm->size(), 1);
  EXPECT_EQ(comm->backend(), "self");
}

TEST_P(CommunicatorTest, RefusesBuffersItCannotSend) {
  testing::run_ranks(3, options(), [](CommunicatorPtr inner) {
    EXPECT_EQ(inner->backend(), GetParam());
    const auto comm = std::make_shared<tessera::testing::WatchedCommunicator>(inner);
    const at::Tensor good = at::zeros({6}, at::kFloat);
    EXPECT_THROW(comm->all_reduce(at::Tensor(), "undefined"), std::logic_error);
    EXPECT_THROW(comm->all_reduce(at::zeros({2, 3}), "2-D"), std::logic_error);
    EXPECT_THROW(comm->all_reduce(at::zeros({6}).slice(0, 0, 6, 2), "strided"), std::logic_error);
    EXPECT_THROW(comm->all_reduce(at::zeros({6}, at::kComplexFloat), "complex"), std::logic_error);
    EXPECT_THROW(comm->reduce_scatter(at::zeros({7}), "7 by 3"), std::logic_error);
    EXPECT_THROW(comm->all_gather(good, at::zeros({3}), "shard too long"), std::logic_error);
    EXPECT_THROW(comm->all_gather(good, at::zeros({2}, at::kHalf), "other dtype"), std::logic_error);
    EXPECT_THROW(comm->broadcast(good, 3, "root"), std::logic_error);
    EXPECT_EQ(comm->counts().bytes, 0) << "what is refused reaches no backend";
    comm->all_reduce(good, "still works")->wait();
  });
}

TEST_P(CommunicatorTest, ADroppedWorkKeepsItsBuffersAlive) {
  std::latch rank_0_has_looked(1);
  testing::run_ranks(2, options(), [&](CommunicatorPtr comm) {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage(c10::intrusive_ptr<c10::StorageImpl>{});
    if (comm->rank() == 1) rank_0_has_looked.wait();
    {
      at::Tensor buffer = filled(comm->rank(), 0, 64, at::kFloat);
      storage = c10::weak_intrusive_ptr<c10::StorageImpl>(buffer.storage().getWeakStorageImpl());
      comm->all_reduce(buffer, "dropped");
    }
    if (comm->rank() == 0) {
      EXPECT_GT(storage.use_count(), 0u);
      rank_0_has_looked.count_down();
    }
    comm->barrier("after");
    comm->all_reduce(at::ones({1}), "next")->wait();
    for (int i = 0; i < 60'000 && storage.use_count() > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(storage.use_count(), 0u) << "and lets go of them afterwards";
  });
}

TEST_P(CommunicatorTest, DoesNotDispatchOperators) {
  // zero/gather/operator_listener.h hears operators to learn which parameters are about to be read.
  thread_local int num_operators = 0;
  testing::run_ranks(2, options(), [](CommunicatorPtr comm) {
    at::Tensor full = at::ones({8});
    at::Tensor shard = at::ones({4});
    auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
          ++num_operators;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
    comm->all_gather(full, shard, "g")->wait();
    comm->reduce_scatter(full, "r")->wait();
    comm->broadcast(full, 1, "b")->wait();
    at::removeCallback(handle);
    EXPECT_EQ(num_operators, 0);
  });
}

}  // namespace
}  // namespace tessera::comm
