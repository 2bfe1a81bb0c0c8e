// Every collective against sums and copies computed here, for worlds of 1 to 9 ranks and shards of odd
// lengths.
#include <gmock/gmock.h>
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
using testing::symmetric;
using testing::uneven;

constexpr int64_t kShardNumels[] = {1, 3, 64, 1001};

/// The types that have a sum, but for bool, whose sum is "or".
constexpr at::ScalarType kNumbers[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong,
                                       at::kInt,   at::kShort,  at::kChar,     at::kByte};

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

void all_gather_brings_every_shard_to_its_slice(const CommunicatorPtr& group) {
  const int size = group->size();
  for (const int64_t numel : kShardNumels) {
    const at::Tensor shard = filled(group->rank(), 0, numel, at::kFloat);
    at::Tensor full = at::full({size * numel}, -1, at::kFloat);
    group->all_gather(full, shard, "apart")->wait();
    at::Tensor in_place = at::full({size * numel}, -1, at::kFloat);
    const at::Tensor slice = in_place.narrow(0, group->rank() * numel, numel);
    slice.copy_(shard);
    group->all_gather(in_place, slice, "in place")->wait();
    for (int r = 0; r < size; ++r) {
      const at::Tensor expected = filled(r, 0, numel, at::kFloat);
      EXPECT_TRUE(at::equal(full.narrow(0, r * numel, numel), expected)) << "slice " << r << " of " << numel;
      EXPECT_TRUE(at::equal(in_place.narrow(0, r * numel, numel), expected))
          << "slice " << r << " of " << numel;
    }
    EXPECT_TRUE(at::equal(shard, filled(group->rank(), 0, numel, at::kFloat)))
        << "the shard must stay as it is";
  }
}

void reduce_scatter_sums_the_own_slice(const CommunicatorPtr& group) {
  const int size = group->size();
  for (const int64_t numel : kShardNumels) {
    const at::Tensor full = filled(group->rank(), 0, size * numel, at::kFloat);
    group->reduce_scatter(full, "gradients")->wait();
    const int64_t begin = group->rank() * numel;
    EXPECT_TRUE(at::equal(full.narrow(0, begin, numel), summed(size, begin, numel, at::kFloat))) << numel;
  }
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

void reduce_scatter_adds_in_a_fixed_order_in_fp32(const CommunicatorPtr& group, const std::string& backend) {
  const int size = group->size();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    constexpr int64_t kNumel = 501;
    const at::Tensor full = uneven(group->rank(), size * kNumel).to(dtype);
    const at::Tensor shard = at::zeros({kNumel});
    group->reduce_scatter(full, {shard}, "gradients")->wait();
    const at::Tensor expected = ordered_sum(backend, size, dtype, [&](int r) {
      return uneven(r, size * kNumel).to(dtype).narrow(0, group->rank() * kNumel, kNumel);
    });
    EXPECT_TRUE(at::equal(shard, expected)) << dtype;
  }
}

void reduce_scatter_in_every_dtype(const CommunicatorPtr& group) {
  const int size = group->size();
  constexpr int64_t kNumel = 37;
  const int64_t begin = group->rank() * kNumel;
  for (const auto dtype : kNumbers) {
    const at::Tensor full = filled(group->rank(), 0, size * kNumel, dtype);
    const at::Tensor shard = at::full({kNumel}, 3, dtype);
    group->reduce_scatter(full, {shard, 1, /*add=*/true}, "added")->wait();
    EXPECT_TRUE(at::equal(shard, summed(size, begin, kNumel, dtype) + 3)) << dtype;
    group->reduce_scatter(full.clone(), {shard}, "replaced")->wait();
    EXPECT_TRUE(at::equal(shard, summed(size, begin, kNumel, dtype))) << dtype;
  }
  const at::Tensor flags = at::zeros({size * 3}, at::kBool);
  flags[3 * group->rank()] = true;  // the first of one's own
  const at::Tensor any = at::zeros({3}, at::kBool);
  group->reduce_scatter(flags, {any}, "flags")->wait();
  EXPECT_TRUE(at::equal(any, at::tensor({1, 0, 0}).to(at::kBool)));
  const at::Tensor own = at::ones({size * 2});
  EXPECT_THROW(group->reduce_scatter(own, {own.narrow(0, 2 * group->rank(), 2), 1, /*add=*/true}, "itself"),
               std::logic_error);
}

void all_reduce_and_broadcast_in_every_dtype(const CommunicatorPtr& group) {
  const int size = group->size();
  for (const auto dtype : kNumbers) {
    const at::Tensor buffer = filled(group->rank(), 0, 37, dtype);
    group->all_reduce(buffer, "sum")->wait();
    EXPECT_TRUE(at::equal(buffer, summed(size, 0, 37, dtype))) << dtype;
    const int root = size - 1;
    const at::Tensor copied = filled(group->rank(), 5, 13, dtype);
    group->broadcast(copied, root, "copy")->wait();
    EXPECT_TRUE(at::equal(copied, filled(root, 5, 13, dtype))) << dtype;
  }
  const at::Tensor flags = at::full({3}, group->rank() == 0, at::kBool);
  group->broadcast(flags, 0, "flags")->wait();
  EXPECT_TRUE(flags.all().item<bool>());
  const at::Tensor any = at::tensor({1, group->rank() == 0 ? 1 : 0, 0}).to(at::kBool);
  group->all_reduce(any, "any")->wait();
  EXPECT_TRUE(at::equal(any.view(at::kByte), at::tensor({1, 1, 0}).to(at::kByte))) << "each byte is a bool";
}

/// Types that have no sum are moved as bytes; a sum is refused before anything is sent.
void other_dtypes_are_moved_and_not_summed(const CommunicatorPtr& group) {
  constexpr int64_t kNumel = 5;
  for (const auto dtype :
       {at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble,
        at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kFloat8_e8m0fnu, at::kBits8, at::kBits16}) {
    const auto bytes = kNumel * static_cast<int64_t>(at::elementSize(dtype));
    const auto of = [&](int rank) { return filled(rank, 0, bytes, at::kByte); };
    const at::Tensor shard = of(group->rank()), full = at::zeros({group->size() * bytes}, at::kByte);
    group->all_gather(full.view(dtype), shard.view(dtype), "gathered")->wait();
    for (int r = 0; r < group->size(); ++r)
      EXPECT_TRUE(at::equal(full.narrow(0, r * bytes, bytes), of(r))) << dtype;
    group->broadcast(shard.view(dtype), group->size() - 1, "copy")->wait();
    EXPECT_TRUE(at::equal(shard, of(group->size() - 1))) << dtype;
    const std::string refusal = str("sum is ", c10::toString(dtype));
    EXPECT_THAT(testing::error_of<std::logic_error>([&] { group->all_reduce(shard.view(dtype), "sum"); }),
                ::testing::HasSubstr(refusal));
    EXPECT_THAT(testing::error_of<std::logic_error>([&] { group->reduce_scatter(full.view(dtype), "sum"); }),
                ::testing::HasSubstr(refusal));
  }
}

void bf16_sums_stay_within_its_precision(const CommunicatorPtr& group) {
  const int size = group->size();
  const auto value = [](int rank, int64_t i) { return 1.0 + 0.01 * static_cast<double>(element(rank, i)); };
  at::Tensor buffer = at::empty({101}, at::kFloat);
  at::Tensor expected = at::zeros({101}, at::kDouble);
  for (int64_t i = 0; i < 101; ++i) {
    buffer.data_ptr<float>()[i] = static_cast<float>(value(group->rank(), i));
    for (int r = 0; r < size; ++r) expected.data_ptr<double>()[i] += value(r, i);
  }
  at::Tensor rounded = buffer.to(at::kBFloat16);
  group->all_reduce(rounded, "bf16")->wait();
  // Each of the size - 1 additions and the inputs round to 8 bits.
  const double tolerance = static_cast<double>(size) / 256;
  EXPECT_TRUE(at::allclose(rounded.to(at::kDouble), expected, tolerance, 0));
}

void a_mean_of_fp16_has_no_sum_that_overflows(const CommunicatorPtr& group, const std::string& backend) {
  if (backend.starts_with("hybrid")) return;  // it rounds each host's sum
  const at::Tensor large = at::full({37}, 60000, at::kHalf);
  group->all_reduce(large, "mean", 1.0 / group->size())->wait();
  EXPECT_LT((large.to(at::kFloat) - 60000).abs().max().item<float>(), 100) << large[0];
}

void many_in_flight_finish_in_any_order_of_waiting(const CommunicatorPtr& group) {
  const int size = group->size();
  constexpr int kBuffers = 12;
  std::vector<at::Tensor> buffers;
  std::vector<WorkPtr> works;
  for (int b = 0; b < kBuffers; ++b) {
    buffers.push_back(filled(group->rank(), b, size * (b + 1), at::kFloat));
    works.push_back(b % 2 == 0 ? group->all_reduce(buffers.back(), str("buffer ", b))
                               : group->reduce_scatter(buffers.back(), str("buffer ", b)));
  }
  for (int b = kBuffers - 1; b >= 0; --b) {
    works[b]->wait();
    EXPECT_TRUE(works[b]->test());
    works[b]->wait();  // twice does no harm
    const int64_t begin = group->rank() * (b + 1);
    EXPECT_TRUE(at::equal(buffers[b].narrow(0, begin, b + 1), summed(size, b + begin, b + 1, at::kFloat)))
        << b;
  }
}

/// In memory that the others can read, or not; more than a slot of staging memory holds.
void reductions_scale_add_and_cast(const CommunicatorPtr& group) {
  const int size = group->size();
  for (const bool in_place : {true, false})
    for (const int64_t numel : {int64_t{1}, int64_t{64}, int64_t{1001}, int64_t{300'000}}) {
      if (numel > 1001 && size != 3) continue;
      const at::Tensor values = filled(group->rank(), 0, size * numel, at::kBFloat16);
      at::Tensor full = in_place ? symmetric(*group, size * numel, at::kBFloat16) : at::empty_like(values);
      full.copy_(values);
      const at::Tensor shard = at::full({numel}, 3.0f);
      group->reduce_scatter(full, {shard, 0.5, /*add=*/true}, "gradients")->wait();
      EXPECT_TRUE(at::equal(shard, 3 + summed(size, group->rank() * numel, numel, at::kFloat) / 2)) << numel;
      at::Tensor whole = in_place ? symmetric(*group, numel, at::kFloat) : at::empty({numel});
      whole.copy_(filled(group->rank(), 5, numel, at::kFloat));
      group->all_reduce(whole, "whole", 0.25)->wait();
      EXPECT_TRUE(at::equal(whole, summed(size, 5, numel, at::kFloat) / 4)) << numel;
    }
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

void exchange_returns_the_values_in_rank_order(const CommunicatorPtr& group) {
  const int size = group->size();
  for (int round = 0; round < 5; ++round) {
    const std::string value = str("rank ", group->rank(), "\nround ", round, std::string(1, '\0'));
    const std::vector<std::string> values = group->exchange(value, "texts");
    ASSERT_EQ(values.size(), static_cast<size_t>(size));
    for (int r = 0; r < size; ++r)
      EXPECT_EQ(values[r], str("rank ", r, "\nround ", round, std::string(1, '\0')));
  }
  for (const std::string& value : group->exchange("", "nothing")) EXPECT_EQ(value, "");
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

void a_watched_communicator_counts_calls_and_bytes(const CommunicatorPtr& group) {
  const int size = group->size();
  tessera::testing::WatchedCommunicator comm(group);
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
}

void empty_buffers_are_fine(const CommunicatorPtr& group) {
  at::Tensor none = at::zeros({0}, at::kFloat);
  group->all_gather(none, none, "g")->wait();
  group->reduce_scatter(none, "r")->wait();
  group->all_reduce(none, "a")->wait();
  group->broadcast(none, 0, "b")->wait();
}

/// All in one group: what one leaves behind must not disturb the next.
TEST_P(CollectivesTest, HaveTheirResults) {
  using Check = std::pair<const char*, void (*)(const CommunicatorPtr&)>;
  constexpr Check kChecks[] = {
      {"all_gather_brings_every_shard_to_its_slice", all_gather_brings_every_shard_to_its_slice},
      {"reduce_scatter_sums_the_own_slice", reduce_scatter_sums_the_own_slice},
      {"reduce_scatter_in_every_dtype", reduce_scatter_in_every_dtype},
      {"all_reduce_and_broadcast_in_every_dtype", all_reduce_and_broadcast_in_every_dtype},
      {"other_dtypes_are_moved_and_not_summed", other_dtypes_are_moved_and_not_summed},
      {"bf16_sums_stay_within_its_precision", bf16_sums_stay_within_its_precision},
      {"many_in_flight_finish_in_any_order_of_waiting", many_in_flight_finish_in_any_order_of_waiting},
      {"exchange_returns_the_values_in_rank_order", exchange_returns_the_values_in_rank_order},
      {"a_watched_communicator_counts_calls_and_bytes", a_watched_communicator_counts_calls_and_bytes},
      {"empty_buffers_are_fine", empty_buffers_are_fine},
      {"reductions_scale_add_and_cast", reductions_scale_add_and_cast},
  };
  testing::run_ranks(size(), options(), [&](CommunicatorPtr group) {
    for (const auto& [name, check] : kChecks) {
      SCOPED_TRACE(name);
      check(group);
    }
    reduce_scatter_adds_in_a_fixed_order_in_fp32(group, std::get<1>(GetParam()));
    a_mean_of_fp16_has_no_sum_that_overflows(group, std::get<1>(GetParam()));
  });
}

}  // namespace
}  // namespace tessera::comm
