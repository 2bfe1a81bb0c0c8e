// Every collective against sums and copies computed here, for worlds of 1 to 9 ranks and shards of odd
// lengths.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <thread>

#include "comm/init/init.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"
#include "tests/support/watched_communicator.h"

namespace tessera::comm {
namespace {

using testing::element;
using testing::filled;
using testing::quick_options;
using testing::summed;

constexpr int64_t kShardNumels[] = {1, 3, 64, 1001};

using Param = std::tuple<int, std::string>;  // ranks, backend

std::string name_of_param(const ::testing::TestParamInfo<Param>& info) {
  return std::get<1>(info.param) + "_" + std::to_string(std::get<0>(info.param));
}

class CollectivesTest : public ::testing::TestWithParam<Param> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  JoinOptions options() const { return quick_options(std::get<1>(GetParam())); }
};
const auto kBackends =
    ::testing::Values("gloo", "gloo_verified", "shm", "hybrid", "hybrid_verified", "staged");
INSTANTIATE_TEST_SUITE_P(Worlds, CollectivesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5, 8), kBackends), name_of_param);
INSTANTIATE_TEST_SUITE_P(OtherWorlds, CollectivesTest,
                         ::testing::Combine(::testing::Values(4, 6, 7, 9), kBackends), name_of_param);

TEST_P(CollectivesTest, AllGatherBringsEveryShardToItsSlice) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    for (const int64_t numel : kShardNumels) {
      const at::Tensor shard = filled(comm->rank(), 0, numel, at::kFloat);
      at::Tensor full = at::full({size * numel}, -1, at::kFloat);
      comm->all_gather(full, shard, "apart")->wait();
      at::Tensor in_place = at::full({size * numel}, -1, at::kFloat);
      const at::Tensor slice = in_place.narrow(0, comm->rank() * numel, numel);
      slice.copy_(shard);
      comm->all_gather(in_place, slice, "in place")->wait();
      for (int r = 0; r < size; ++r) {
        const at::Tensor expected = filled(r, 0, numel, at::kFloat);
        EXPECT_TRUE(at::equal(full.narrow(0, r * numel, numel), expected))
            << "slice " << r << " of " << numel;
        EXPECT_TRUE(at::equal(in_place.narrow(0, r * numel, numel), expected))
            << "slice " << r << " of " << numel;
      }
      EXPECT_TRUE(at::equal(shard, filled(comm->rank(), 0, numel, at::kFloat)))
          << "the shard must stay as it is";
    }
  });
}

TEST_P(CollectivesTest, ReduceScatterSumsTheOwnSlice) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    for (const int64_t numel : kShardNumels) {
      const at::Tensor full = filled(comm->rank(), 0, size * numel, at::kFloat);
      comm->reduce_scatter(full, "gradients")->wait();
      const int64_t begin = comm->rank() * numel;
      EXPECT_TRUE(at::equal(full.narrow(0, begin, numel), summed(size, begin, numel, at::kFloat))) << numel;
    }
  });
}

/// Numbers whose sum depends on the order of addition.
at::Tensor uneven(int rank, int64_t numel) {
  at::Tensor values = at::empty({numel}, at::kFloat);
  for (int64_t i = 0; i < numel; ++i)
    values.data_ptr<float>()[i] =
        static_cast<float>(element(rank, i)) * std::ldexp(0.1f, static_cast<int>((i + 5 * rank) % 17));
  return values;
}

/// The sum that is promised: in rank order, in fp32, rounded once; hybrid: of each host's sum, rounded for
/// the network.
at::Tensor ordered_sum(const std::string& backend, int size, at::ScalarType dtype,
                       const std::function<at::Tensor(int rank)>& part) {
  std::vector<at::Tensor> hosts;
  for (int r = 0; r < size; ++r) {
    const bool new_host = r == 0 || (backend.starts_with("hybrid") && 2 * r >= size && 2 * (r - 1) < size);
    if (new_host) {
      hosts.push_back(part(r).to(at::kFloat));
    } else {
      hosts.back() = hosts.back() + part(r).to(at::kFloat);
    }
  }
  if (hosts.size() == 1) return hosts[0];
  return hosts[0].to(dtype).to(at::kFloat) + hosts[1].to(dtype).to(at::kFloat);
}

TEST_P(CollectivesTest, ReduceScatterAddsInAFixedOrderInFp32) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      constexpr int64_t kNumel = 501;
      const at::Tensor full = uneven(comm->rank(), size * kNumel).to(dtype);
      const at::Tensor shard = at::zeros({kNumel});
      comm->reduce_scatter(full, {shard}, "gradients")->wait();
      const at::Tensor expected = ordered_sum(std::get<1>(GetParam()), size, dtype, [&](int r) {
        return uneven(r, size * kNumel).to(dtype).narrow(0, comm->rank() * kNumel, kNumel);
      });
      EXPECT_TRUE(at::equal(shard, expected)) << dtype;
    }
  });
}

TEST_P(CollectivesTest, ReduceScatterInEveryDtype) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    constexpr int64_t kNumel = 37;
    const int64_t begin = comm->rank() * kNumel;
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kChar, at::kByte}) {
      const at::Tensor full = filled(comm->rank(), 0, size * kNumel, dtype);
      const at::Tensor shard = at::full({kNumel}, 3, dtype);
      comm->reduce_scatter(full, {shard, 1, /*add=*/true}, "added")->wait();
      EXPECT_TRUE(at::equal(shard, summed(size, begin, kNumel, dtype) + 3)) << dtype;
      comm->reduce_scatter(full.clone(), {shard}, "replaced")->wait();
      EXPECT_TRUE(at::equal(shard, summed(size, begin, kNumel, dtype))) << dtype;
    }
    const at::Tensor flags = at::zeros({size * 3}, at::kBool);
    flags[3 * comm->rank()] = true;  // the first of one's own
    const at::Tensor any = at::zeros({3}, at::kBool);
    comm->reduce_scatter(flags, {any}, "flags")->wait();
    EXPECT_TRUE(at::equal(any, at::tensor({1, 0, 0}).to(at::kBool)));
    const at::Tensor own = at::ones({size * 2});
    EXPECT_THROW(comm->reduce_scatter(own, {own.narrow(0, 2 * comm->rank(), 2), 1, /*add=*/true}, "itself"),
                 std::logic_error);
  });
}

TEST_P(CollectivesTest, AllReduceAndBroadcastInEveryDtype) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kChar, at::kByte}) {
      const at::Tensor buffer = filled(comm->rank(), 0, 37, dtype);
      comm->all_reduce(buffer, "sum")->wait();
      EXPECT_TRUE(at::equal(buffer, summed(size, 0, 37, dtype))) << dtype;
      const int root = size - 1;
      const at::Tensor copied = filled(comm->rank(), 5, 13, dtype);
      comm->broadcast(copied, root, "copy")->wait();
      EXPECT_TRUE(at::equal(copied, filled(root, 5, 13, dtype))) << dtype;
    }
    const at::Tensor flags = at::full({3}, comm->rank() == 0, at::kBool);
    comm->broadcast(flags, 0, "flags")->wait();
    EXPECT_TRUE(flags.all().item<bool>());
  });
}

TEST_P(CollectivesTest, Bf16SumsStayWithinItsPrecision) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    const auto value = [](int rank, int64_t i) { return 1.0 + 0.01 * static_cast<double>(element(rank, i)); };
    at::Tensor buffer = at::empty({101}, at::kFloat);
    at::Tensor expected = at::zeros({101}, at::kDouble);
    for (int64_t i = 0; i < 101; ++i) {
      buffer.data_ptr<float>()[i] = static_cast<float>(value(comm->rank(), i));
      for (int r = 0; r < size; ++r) expected.data_ptr<double>()[i] += value(r, i);
    }
    at::Tensor rounded = buffer.to(at::kBFloat16);
    comm->all_reduce(rounded, "bf16")->wait();
    // Each of the size - 1 additions and the inputs round to 8 bits.
    const double tolerance = static_cast<double>(size) / 256;
    EXPECT_TRUE(at::allclose(rounded.to(at::kDouble), expected, tolerance, 0));
  });
}

TEST_P(CollectivesTest, ManyInFlightFinishInAnyOrderOfWaiting) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    constexpr int kBuffers = 12;
    std::vector<at::Tensor> buffers;
    std::vector<WorkPtr> works;
    for (int b = 0; b < kBuffers; ++b) {
      buffers.push_back(filled(comm->rank(), b, size * (b + 1), at::kFloat));
      works.push_back(b % 2 == 0 ? comm->all_reduce(buffers.back(), str("buffer ", b))
                                 : comm->reduce_scatter(buffers.back(), str("buffer ", b)));
    }
    for (int b = kBuffers - 1; b >= 0; --b) {
      works[b]->wait();
      EXPECT_TRUE(works[b]->test());
      works[b]->wait();  // twice does no harm
      const int64_t begin = comm->rank() * (b + 1);
      EXPECT_TRUE(at::equal(buffers[b].narrow(0, begin, b + 1), summed(size, b + begin, b + 1, at::kFloat)))
          << b;
    }
  });
}

TEST_P(CollectivesTest, BarrierHoldsEveryoneBack) {
  const int size = this->size();
  std::atomic<int> arrived{0};
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    for (int round = 1; round <= 3; ++round) {
      ++arrived;
      comm->barrier("all here");
      EXPECT_GE(arrived.load(), round * size);
      comm->barrier("next round");
    }
  });
}

TEST_P(CollectivesTest, ExchangeReturnsTheValuesInRankOrder) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    for (int round = 0; round < 5; ++round) {
      const std::string value = str("rank ", comm->rank(), "\nround ", round, std::string(1, '\0'));
      const std::vector<std::string> values = comm->exchange(value, "texts");
      ASSERT_EQ(values.size(), static_cast<size_t>(size));
      for (int r = 0; r < size; ++r)
        EXPECT_EQ(values[r], str("rank ", r, "\nround ", round, std::string(1, '\0')));
    }
    for (const std::string& value : comm->exchange("", "nothing")) EXPECT_EQ(value, "");
  });
}

TEST_P(CollectivesTest, DuplicatesNeedNoCommonOrder) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    const auto first = comm->duplicate("first");
    const auto second = first->duplicate("second");
    EXPECT_EQ(second->rank(), comm->rank());
    EXPECT_EQ(second->size(), size);
    EXPECT_EQ(second->timeout(), comm->timeout());
    at::Tensor a = filled(comm->rank(), 0, 100, at::kFloat);
    at::Tensor b = filled(comm->rank(), 9, 70, at::kFloat);
    WorkPtr work_a, work_b;
    if (comm->rank() % 2 == 0) {
      work_a = first->all_reduce(a, "a");
      work_b = second->all_reduce(b, "b");
      work_a->wait();
      work_b->wait();
    } else {
      second->all_reduce(b, "b")->wait();
      first->all_reduce(a, "a")->wait();
    }
    EXPECT_TRUE(at::equal(a, summed(size, 0, 100, at::kFloat)));
    EXPECT_TRUE(at::equal(b, summed(size, 9, 70, at::kFloat)));
  });
}

TEST_P(CollectivesTest, ADuplicateForExchangeHasExchangesOfItsOwn) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr comm) {
    const auto aside = comm->duplicate_for_exchange("aside");
    EXPECT_EQ(aside->rank(), comm->rank());
    EXPECT_EQ(aside->size(), size);
    std::vector<int> first, second;
    if (comm->rank() % 2 == 0) {
      std::thread later([&] { second = aside->exchange(10 + comm->rank(), "on another thread"); });
      first = comm->exchange(comm->rank(), "meanwhile");
      later.join();
    } else {
      second = aside->exchange(10 + comm->rank(), "on another thread");
      first = comm->exchange(comm->rank(), "meanwhile");
    }
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(first[static_cast<size_t>(r)], r);
      EXPECT_EQ(second[static_cast<size_t>(r)], 10 + r);
    }
    comm->barrier("both done");
    at::Tensor buffer = at::ones({size});
    if (size > 1) {
      EXPECT_NE(error_of([&] { aside->all_reduce(buffer, "sum"); }).find("for exchange() alone"),
                std::string::npos);
    }
  });
}

TEST_P(CollectivesTest, AWatchedCommunicatorCountsCallsAndBytes) {
  const int size = this->size();
  testing::run_ranks(size, options(), [&](CommunicatorPtr inner) {
    tessera::testing::WatchedCommunicator comm(inner);
    at::Tensor full = at::zeros({size * 10}, at::kFloat);
    comm.all_gather(full, full.narrow(0, comm.rank() * 10, 10), "g")->wait();
    comm.reduce_scatter(full, "r")->wait();
    comm.reduce_scatter(full, "r")->wait();
    comm.all_reduce(full, "a")->wait();
    comm.broadcast(full, 0, "b")->wait();
    comm.barrier("end");
    const tessera::testing::CollectiveCounts& counts = comm.counts();
    EXPECT_EQ(counts.all_gathers, 1);
    EXPECT_EQ(counts.reduce_scatters, 2);
    EXPECT_EQ(counts.all_reduces, 1);
    EXPECT_EQ(counts.broadcasts, 1);
    EXPECT_EQ(counts.barriers, 1);
    EXPECT_EQ(counts.bytes, 5 * size * 10 * 4);
  });
}

TEST_P(CollectivesTest, EmptyBuffersAreFine) {
  testing::run_ranks(size(), options(), [&](CommunicatorPtr comm) {
    at::Tensor none = at::zeros({0}, at::kFloat);
    comm->all_gather(none, none, "g")->wait();
    comm->reduce_scatter(none, "r")->wait();
    comm->all_reduce(none, "a")->wait();
    comm->broadcast(none, 0, "b")->wait();
  });
}

}  // namespace
}  // namespace tessera::comm
