// Ranks placed on hosts in every way, on one ("shm") or several ("hybrid"): results, the order of sums,
// counted bytes, and what is shared.
#include "comm/hybrid/hybrid.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "comm/hybrid/plan.h"
#include "comm/init/given_machine.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"
#include "tests/support/one_core.h"

namespace tessera::comm {
namespace {

using testing::filled;
using testing::quick_options;
using testing::summed;
using testing::symmetric;
using testing::uneven;

using Grouping = std::vector<int>;  // host by rank

bool is_one_host(const Grouping& grouping) { return Hosts(grouping).is_one(); }

void run_on(const Grouping& grouping, const std::function<void(CommunicatorPtr)>& body) {
  const GivenMachine given{.host = [&](int rank) { return str("host ", grouping[rank]); }};
  run_threads(static_cast<int>(grouping.size()), quick_options("hybrid"), given, body);
}

class HybridTest : public ::testing::TestWithParam<Grouping> {
 protected:
  const Grouping& grouping() const { return GetParam(); }
  int size() const { return static_cast<int>(GetParam().size()); }
};
INSTANTIATE_TEST_SUITE_P(Groupings, HybridTest,
                         ::testing::Values(Grouping{0, 0, 0}, Grouping{0, 0, 1, 1}, Grouping{0, 1, 0, 1},
                                           Grouping{0, 0, 0, 1}, Grouping{0, 1, 1, 2, 0},
                                           Grouping{0, 0, 1, 1, 2, 2, 3, 3}, Grouping{0, 1, 2},
                                           Grouping{3, 0, 3, 3, 0, 1}, Grouping{0, 1, 0, 0, 1, 0}),
                         [](const auto& info) {
                           std::string name;
                           for (const int host : info.param) name += std::to_string(host);
                           return name;
                         });

TEST_P(HybridTest, CollectivesAreRightInPlaceAndStaged) {
  const int size = this->size();
  run_on(grouping(), [&](CommunicatorPtr comm) {
    EXPECT_EQ(comm->backend(), is_one_host(grouping()) ? "shm" : "hybrid");
    for (const bool in_place : {true, false})
      for (const int64_t numel : {int64_t{1}, int64_t{100}, int64_t{270'001}}) {
        const auto memory = [&](int64_t count) {
          return in_place ? symmetric(*comm, count, at::kFloat) : at::empty({count});
        };
        const at::Tensor full = memory(size * numel);
        full.copy_(filled(comm->rank(), 0, size * numel, at::kFloat));
        const at::Tensor shard = at::full({numel}, 2.0f);
        comm->reduce_scatter(full, {shard, 0.5, /*add=*/true}, "reduced")->wait();
        EXPECT_TRUE(at::equal(shard, 2 + summed(size, comm->rank() * numel, numel, at::kFloat) / 2)) << numel;
        comm->all_gather(full, filled(comm->rank(), 7, numel, at::kFloat), "gathered")->wait();
        for (int r = 0; r < size; ++r)
          EXPECT_TRUE(at::equal(full.narrow(0, r * numel, numel), filled(r, 7, numel, at::kFloat))) << numel;
        const at::Tensor whole = memory(numel);
        whole.copy_(filled(comm->rank(), 1, numel, at::kFloat));
        comm->all_reduce(whole, "whole", 0.25)->wait();
        EXPECT_TRUE(at::equal(whole, summed(size, 1, numel, at::kFloat) / 4)) << numel;
        for (const int root : {0, size - 1}) {
          whole.copy_(filled(comm->rank(), 3, numel, at::kFloat));
          comm->broadcast(whole, root, "copied")->wait();
          EXPECT_TRUE(at::equal(whole, filled(root, 3, numel, at::kFloat))) << numel;
        }
      }
  });
}

TEST_P(HybridTest, AHostHasOneCopyOfSharedMemory) {
  const int size = this->size();
  run_on(grouping(), [&](CommunicatorPtr comm) {
    const HostRank place = comm->host_rank();
    const int host = grouping()[comm->rank()];
    EXPECT_EQ(place.num_ranks, std::count(grouping().begin(), grouping().end(), host));
    EXPECT_EQ(place.index, std::count(grouping().begin(), grouping().begin() + comm->rank(), host));
    const at::Tensor probe = symmetric(*comm, 1, at::kFloat);
    EXPECT_EQ(comm->peer_view(probe, 0).defined(), is_one_host(grouping()))
        << "of another host's none can be read";

    constexpr int64_t kNumel = 70'001;
    const at::Tensor common = comm->allocate_shared(4 * size * kNumel, "parameters").view(at::kFloat);
    for (int round = 0; round < 3; ++round) {
      comm->barrier("all have read");
      const at::Tensor mine = common.narrow(0, comm->rank() * kNumel, kNumel);
      mine.copy_(filled(comm->rank(), round, kNumel, at::kFloat));
      comm->all_gather(common, mine, "parameters")->wait();
      for (int r = 0; r < size; ++r)
        ASSERT_TRUE(at::equal(common.narrow(0, r * kNumel, kNumel), filled(r, round, kNumel, at::kFloat)));
      comm->barrier("all have read");
      if (place.index == 0) common.fill_(static_cast<float>(comm->rank()));
      comm->broadcast(common, size - 1, "parameters")->wait();
      const int first = static_cast<int>(
          std::find(grouping().begin(), grouping().end(), grouping()[size - 1]) - grouping().begin());
      EXPECT_TRUE(at::equal(common, at::full_like(common, static_cast<float>(first))));
    }
  });
}

/// ((host 0's ranks in order) + (host 1's) + …), hosts in the order of their first ranks.
at::Tensor sum_by_hosts(const Grouping& grouping, int64_t numel) {
  const Hosts hosts(grouping);
  at::Tensor sum;
  for (int host = 0; host < hosts.num_hosts(); ++host) {
    at::Tensor part;
    for (const int rank : hosts.ranks_of(host))
      part = part.defined() ? part + uneven(rank, numel) : uneven(rank, numel);
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

TEST_P(HybridTest, EverySumHasTheOrderOfRanksThenHostsWhateverTheTiming) {
  const int size = this->size();
  constexpr int64_t kNumel = 30'011;
  const at::Tensor expected = sum_by_hosts(grouping(), size * kNumel);
  if (!is_one_host(grouping()) && Hosts(grouping()).ranks_of(1).size() > 1) {
    at::Tensor in_rank_order = uneven(0, size * kNumel);
    for (int r = 1; r < size; ++r) in_rank_order = in_rank_order + uneven(r, size * kNumel);
    EXPECT_FALSE(at::equal(expected, in_rank_order)) << "the test would not notice another order";
  }
  run_on(grouping(), [&](CommunicatorPtr comm) {
    std::mt19937 random(static_cast<unsigned>(comm->rank()));
    const at::Tensor mapped = symmetric(*comm, size * kNumel, at::kFloat);
    for (int round = 0; round < 8; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
      const at::Tensor full = round % 2 == 0 ? mapped : at::empty_like(mapped);
      full.copy_(uneven(comm->rank(), size * kNumel));
      if (round % 4 < 2) {
        comm->all_reduce(full, "sum")->wait();
        EXPECT_TRUE(at::equal(full, expected)) << round;
      } else {
        const at::Tensor shard = at::empty({kNumel});
        comm->reduce_scatter(full, {shard}, "sum")->wait();
        EXPECT_TRUE(at::equal(shard, expected.narrow(0, comm->rank() * kNumel, kNumel))) << round;
      }
    }
  });
}

TEST_P(HybridTest, ReceivesEachByteOnceAHost) {
  const int size = this->size();
  const Hosts hosts(grouping());
  std::vector<std::atomic<int64_t>> reduced(hosts.num_hosts()), gathered(hosts.num_hosts()),
      summed_up(hosts.num_hosts()), copied(hosts.num_hosts());
  constexpr int64_t kNumel = 12'000;
  run_on(grouping(), [&](CommunicatorPtr comm) {
    const int host = hosts.host_of(comm->rank());
    const at::Tensor full = at::ones({size * kNumel});
    int64_t before = comm->bytes_from_other_hosts();
    const auto count = [&](std::vector<std::atomic<int64_t>>& counts) {
      const int64_t now = comm->bytes_from_other_hosts();
      counts[host] += now - std::exchange(before, now);
    };
    comm->reduce_scatter(full, "r")->wait();
    count(reduced);
    const int64_t before_gather = before;
    comm->all_gather(full, full.narrow(0, comm->rank() * kNumel, kNumel), "g")->wait();
    count(gathered);
    // As even as can be: of the columns of slices that a host's ranks carry.
    const auto ranks = static_cast<int64_t>(hosts.ranks_of(host).size());
    EXPECT_LE(before - before_gather,
              (hosts.num_columns() + ranks - 1) / ranks * (hosts.num_hosts() - 1) * 4 * kNumel);
    comm->all_reduce(full, "a")->wait();
    count(summed_up);
    comm->broadcast(full, 0, "b")->wait();
    count(copied);
  });
  for (int host = 0; host < hosts.num_hosts(); ++host) {
    const int64_t all = 4 * size * kNumel,
                  own = 4 * kNumel * static_cast<int64_t>(hosts.ranks_of(host).size());
    EXPECT_EQ(reduced[host], (hosts.num_hosts() - 1) * own);
    EXPECT_EQ(gathered[host], all - own);
    EXPECT_EQ(summed_up[host], reduced[host] + gathered[host]);
    EXPECT_EQ(copied[host], host == 0 ? 0 : all);
  }
}

// Many collectives of all kinds at once, with random pauses, waited for in any order.
TEST_P(HybridTest, ManyInFlight) {
  const int size = this->size();
  run_on(grouping(), [&](CommunicatorPtr comm) {
    std::mt19937 random(static_cast<unsigned>(comm->rank())), same(5);
    for (int round = 0; round < 3; ++round) {
      std::vector<at::Tensor> buffers;
      std::vector<WorkPtr> works;
      std::vector<int> kinds;
      std::vector<int64_t> numels;
      for (int i = 0; i < 30; ++i) {
        const int64_t numel = 1 + static_cast<int64_t>(same() % 20'000);
        const int kind = static_cast<int>(same() % 3);
        const bool in_place = same() % 4 == 0;
        at::Tensor full = in_place ? symmetric(*comm, size * numel, at::kFloat) : at::empty({size * numel});
        full.copy_(filled(comm->rank(), i, size * numel, at::kFloat));
        works.push_back(kind == 0   ? comm->all_reduce(full, "a")
                        : kind == 1 ? comm->all_gather(full, full.narrow(0, comm->rank() * numel, numel), "g")
                                    : comm->reduce_scatter(full, "r"));
        buffers.push_back(full);
        kinds.push_back(kind);
        numels.push_back(numel);
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      }
      std::vector<int> order(works.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (const int i : order) {
        works[i]->wait();
        const int64_t numel = numels[i], begin = comm->rank() * numel;
        if (kinds[i] == 0) {
          EXPECT_TRUE(at::equal(buffers[i], summed(size, i, size * numel, at::kFloat)));
        } else if (kinds[i] == 2) {
          EXPECT_TRUE(
              at::equal(buffers[i].narrow(0, begin, numel), summed(size, i + begin, numel, at::kFloat)));
        } else {
          for (int r = 0; r < size; ++r)
            EXPECT_TRUE(at::equal(buffers[i].narrow(0, r * numel, numel),
                                  filled(r, i + r * numel, numel, at::kFloat)));
        }
      }
    }
  });
}

// Rank 1 has posted its buffer, and gets a few thousandths of the core while rank 0 waits.
TEST(Hybrid, ABufferIsItsCallersWhenTheRanksOfItsHostHaveReadIt) {
  constexpr int kRounds = 6;
  constexpr int64_t kNumel = 60'000;
  std::array<std::atomic<bool>, kRounds> overwritten{};
  run_on({0, 0, 1, 1}, [&](CommunicatorPtr world) {
    const int rank = world->rank();
    tessera::testing::run_on_one_core(/*idle=*/rank == 1);
    const auto comm = world->duplicate("of threads on one core");
    const at::Tensor full = symmetric(*comm, 4 * kNumel, at::kFloat), shard = at::empty({kNumel});
    for (int round = 0; round < kRounds; ++round) {
      full.copy_(filled(rank, round, 4 * kNumel, at::kFloat));
      comm->barrier("the buffers are filled");
      std::thread busy;
      if (rank == 2)
        busy = std::thread([&overwritten = overwritten[round]] {
          const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
          while (!overwritten && std::chrono::steady_clock::now() < end) {
          }
        });
      const bool scatters = round % 2 == 0;
      const WorkPtr work = scatters ? comm->reduce_scatter(full, {shard}, "r") : comm->all_reduce(full, "a");
      work->wait();
      const at::Tensor sum = scatters ? shard : full.clone();
      if (rank == 0) full.fill_(-1), overwritten[round] = true;
      if (busy.joinable()) busy.join();
      comm->barrier("all have read");
      const int64_t begin = scatters ? rank * kNumel : 0;
      EXPECT_TRUE(at::equal(sum, summed(4, round + begin, sum.numel(), at::kFloat)))
          << "rank " << rank << ", round " << round;
    }
  });
}

}  // namespace
}  // namespace tessera::comm
