// comm/hybrid/hybrid's plan, carried out on plain arrays: every element reaches its owner once, and the bytes
// that cross are the formula's.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "comm/hybrid/hosts.h"
#include "comm/hybrid/plan.h"
#include "core/str.h"

namespace tessera::comm::hybrid {
namespace {

using Buffer = std::vector<int64_t>;

std::vector<std::vector<int>> groupings() {
  std::vector<std::vector<int>> all{{0, 1},
                                    {0, 0, 1, 1},
                                    {0, 1, 0, 1},
                                    {5, 5, 2},
                                    {0, 0, 0, 1},
                                    {1, 0, 0, 0},
                                    {0, 1, 2, 0, 1, 2},
                                    {0, 0, 0, 1, 1, 2},
                                    {0, 1, 1, 2, 0},
                                    {0, 1, 2},
                                    {3, 3, 3, 3, 1, 1, 1, 1}};
  std::mt19937 random(3);
  for (int i = 0; i < 40; ++i) {
    std::vector<int> hosts(2 + random() % 9);
    for (int& host : hosts) host = static_cast<int>(random() % 4);
    all.push_back(hosts);
  }
  return all;
}

/// An element of rank r's buffer: sums of different ranks differ.
int64_t value(int rank, int64_t i) { return (int64_t{1} << rank) * (i + 1); }

TEST(HybridPlan, EveryColumnIsCarriedOnceOnEveryHost) {
  for (const std::vector<int>& grouping : groupings()) {
    const Hosts hosts(grouping);
    std::vector<std::multiset<int>> carried(hosts.num_hosts());
    for (int rank = 0; rank < hosts.num_ranks(); ++rank) {
      const std::vector<int> columns = hosts.columns_of(rank);
      ASSERT_FALSE(columns.empty());
      carried[hosts.host_of(rank)].insert(columns.begin(), columns.end());
      EXPECT_EQ(hosts.owner(hosts.host_of(rank), hosts.index_of(rank)), rank);
      EXPECT_EQ(hosts.ranks_of(hosts.host_of(rank))[hosts.index_of(rank)], rank);
      // As even as can be.
      const int ranks = static_cast<int>(hosts.ranks_of(hosts.host_of(rank)).size());
      EXPECT_LE(static_cast<int>(columns.size()), (hosts.num_columns() + ranks - 1) / ranks);
    }
    for (const std::multiset<int>& columns : carried) {
      EXPECT_EQ(static_cast<int>(columns.size()), hosts.num_columns());
      EXPECT_EQ(static_cast<int>(std::set<int>(columns.begin(), columns.end()).size()), hosts.num_columns());
    }
  }
}

/// What carriers send each other, element by element; returns each rank's own slice of the sum.
std::vector<Buffer> reduce(const Hosts& hosts, const Slices& slices) {
  std::vector<Buffer> sums(hosts.num_ranks());
  for (int rank = 0; rank < hosts.num_ranks(); ++rank) sums[rank].resize(slices.of(rank).numel);
  for (int rank = 0; rank < hosts.num_ranks(); ++rank)
    for (const ColumnPart& part : column_parts(hosts, rank, slices))
      for (int host = 0; host < hosts.num_hosts(); ++host) {
        const Range& slice = part.slices[host];
        if (slice.numel == 0) continue;
        const int owner = hosts.owner(host, part.column);
        EXPECT_EQ(hosts.carrier(host, part.column), owner);
        EXPECT_EQ(slice, slices.of(owner));
        for (const int other : hosts.ranks_of(hosts.host_of(rank)))
          for (int64_t i = 0; i < slice.numel; ++i) sums[owner][i] += value(other, slice.begin + i);
      }
  return sums;
}

/// Slices after a gather, each rank having its own slice alone before.
std::vector<Buffer> gather(const Hosts& hosts, const Slices& slices, int64_t numel) {
  std::vector<Buffer> brought(hosts.num_ranks(), Buffer(numel, -1)), result = brought;
  for (int rank = 0; rank < hosts.num_ranks(); ++rank) {
    const auto put = [&](const Range& range, int from) {
      for (int64_t i = range.begin; i < range.begin + range.numel; ++i) brought[rank][i] = value(from, i);
    };
    put(slices.of(rank), rank);
    for (const ColumnPart& part : column_parts(hosts, rank, slices))
      for (int host = 0; host < hosts.num_hosts(); ++host)
        if (host != hosts.host_of(rank)) put(part.slices[host], hosts.owner(host, part.column));
  }
  for (int rank = 0; rank < hosts.num_ranks(); ++rank)
    for (int slice = 0; slice < hosts.num_ranks(); ++slice) {
      const int source = source_of(hosts, rank, slice);
      EXPECT_EQ(hosts.host_of(source), hosts.host_of(rank));
      const Range range = slices.of(slice);
      for (int64_t i = range.begin; i < range.begin + range.numel; ++i) result[rank][i] = brought[source][i];
    }
  return result;
}

TEST(HybridPlan, ReducesAndGathersLikeAnArrayOfAllRanks) {
  for (const std::vector<int>& grouping : groupings()) {
    const Hosts hosts(grouping);
    const int world = hosts.num_ranks();
    for (const int64_t numel : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{6} * world}) {
      // Of an all-reduce; of a reduce-scatter in pieces of 4 elements of each slice.
      std::vector<Slices> cases{evenly(0, numel, world), evenly(3, 3 + numel, world)};
      if (numel % world == 0) {
        const int64_t slice = numel / world;
        for (int64_t begin = 0; begin < slice; begin += 4)
          cases.push_back({begin, slice, std::min<int64_t>(4, slice - begin), numel});
      }
      for (const Slices& slices : cases) {
        SCOPED_TRACE(str(world, " ranks on ", hosts.num_hosts(), " hosts, ", numel, " from ", slices.begin));
        const std::vector<Buffer> sums = reduce(hosts, slices), gathered = gather(hosts, slices, numel + 3);
        int64_t all_ranks = 0;
        for (int rank = 0; rank < world; ++rank) all_ranks += int64_t{1} << rank;
        for (int rank = 0; rank < world; ++rank) {
          const Range own = slices.of(rank);
          for (int64_t i = 0; i < own.numel; ++i) EXPECT_EQ(sums[rank][i], all_ranks * (own.begin + i + 1));
          for (int slice = 0; slice < world; ++slice) {
            const Range range = slices.of(slice);
            for (int64_t i = range.begin; i < range.begin + range.numel; ++i)
              EXPECT_EQ(gathered[rank][i], value(slice, i));
          }
        }
      }
    }
  }
}

TEST(HybridPlan, AHostReceivesEachByteThatItLacksOnce) {
  for (const std::vector<int>& grouping : groupings()) {
    const Hosts hosts(grouping);
    const int64_t slice = 10, numel = slice * hosts.num_ranks();
    const Slices slices{0, slice, slice, numel};
    for (int host = 0; host < hosts.num_hosts(); ++host) {
      const auto ranks = static_cast<int64_t>(hosts.ranks_of(host).size());
      int64_t reduced = 0, gathered = 0;
      for (const int rank : hosts.ranks_of(host)) {
        reduced += received_by_reduce(hosts, rank, slices);
        gathered += received_by_gather(hosts, rank, slices);
      }
      EXPECT_EQ(reduced, (hosts.num_hosts() - 1) * ranks * slice) << "one sum from each other host";
      EXPECT_EQ(gathered, numel - ranks * slice);
    }
  }
}

TEST(HybridPlan, BroadcastsReachEveryRankOverItsHost) {
  for (const std::vector<int>& grouping : groupings()) {
    const Hosts hosts(grouping);
    for (const int64_t numel : {int64_t{1}, int64_t{11}, int64_t{64}}) {
      const Slices slices = evenly(0, numel, hosts.num_columns());
      for (int root = 0; root < hosts.num_ranks(); ++root)
        for (int host = 0; host < hosts.num_hosts(); ++host) {
          std::vector<int> received(numel, 0);
          for (const int rank : hosts.ranks_of(host))
            for (const Range& range : broadcast_parts(hosts, rank, slices))
              for (int64_t i = range.begin; i < range.begin + range.numel; ++i) ++received[i];
          EXPECT_EQ(received, std::vector<int>(numel, 1));
          for (int column = 0; column < hosts.num_columns(); ++column) {
            const int source = broadcast_source_of(hosts, hosts.ranks_of(host)[0], root, column);
            EXPECT_EQ(source, host == hosts.host_of(root) ? root : hosts.carrier(host, column));
          }
        }
    }
  }
}

}  // namespace
}  // namespace tessera::comm::hybrid
