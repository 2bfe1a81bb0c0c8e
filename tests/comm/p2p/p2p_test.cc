// p2p: the protocol between streams, over host memory: bits, order, flags, and streams that wait for a rank
// that does not come. What p2p has in common with other backends is in collectives_test, failures_test,
// split_test and killed_rank_test.
#include "comm/p2p/p2p.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "comm/init/init.h"
#include "comm/init/transport_communicator.h"
#include "comm/p2p/flags.h"
#include "comm/p2p/group.h"
#include "comm/p2p/host_device.h"
#include "core/error.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_of;
using testing::filled;
using testing::quick_options;
using testing::seconds_since;
using testing::summed;
using testing::symmetric;
using Clock = std::chrono::steady_clock;

/// Ranks as threads, with what JoinOptions cannot say. `device`: of a rank.
void run_p2p(int size, const std::function<std::shared_ptr<p2p::Device>(int rank)>& device,
             const std::function<void(std::shared_ptr<TransportCommunicator>)>& body,
             uint64_t first_number = 1, milliseconds timeout = seconds(30)) {
  const GroupStore store(c10::make_intrusive<c10d::HashStore>(), "the threads' store");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      const auto make = [&](const GroupStore& under, FailureHook on_failure) {
        return make_p2p_transport(under,
                                  {.rank = rank,
                                   .size = size,
                                   .timeout = timeout,
                                   .connect_timeout = seconds(30),
                                   .device = device(rank),
                                   .first_number = first_number},
                                  std::move(on_failure));
      };
      const auto context = std::make_shared<GroupContext>(store, rank, size, false);
      const std::string error =
          error_of([&] { body(std::make_shared<TransportCommunicator>(context, timeout, make)); });
      EXPECT_EQ(error, "") << "rank " << rank;
    });
  for (std::thread& thread : threads) thread.join();
}

std::function<std::shared_ptr<p2p::Device>(int)> host_device(microseconds lag, int64_t half_mailbox_bytes) {
  return [=](int) { return p2p::make_host_device({lag, half_mailbox_bytes}); };
}

/// Every collective, in memory that all ranks have mapped or not, whose results are known.
void check_collectives(Communicator& comm, bool in_place, int64_t numel) {
  const int size = comm.size(), rank = comm.rank();
  const auto buffer = [&](int64_t n) {
    return in_place ? symmetric(comm, n, at::kFloat) : at::empty({n}, at::kFloat);
  };
  at::Tensor full = buffer(size * numel), sum = buffer(numel + 1), copied = buffer(numel);
  for (int round = 0; round < 3; ++round) {
    full.copy_(filled(rank, round, size * numel, at::kFloat));
    sum.copy_(filled(rank, round, numel + 1, at::kFloat));
    copied.fill_(rank + round);
    const at::Tensor shard = at::full({numel}, 0.5f);
    const WorkPtr reduced = comm.reduce_scatter(full, {shard, 0.5, /*add=*/true}, "gradients");
    const WorkPtr added = comm.all_reduce(sum, "sum", 2);
    const WorkPtr sent = comm.broadcast(copied, round % size, "copy");
    sent->wait();
    reduced->wait();
    ASSERT_TRUE(at::equal(shard, 0.5 + 0.5 * summed(size, round + rank * numel, numel, at::kFloat)));
    const WorkPtr gathered = comm.all_gather(full, shard, "parameters");
    added->wait();
    ASSERT_TRUE(at::equal(sum, 2 * summed(size, round, numel + 1, at::kFloat)));
    ASSERT_TRUE(copied.eq(round % size + round).all().item<bool>());
    gathered->wait();
    ASSERT_TRUE(at::equal(full, 0.5 + 0.5 * summed(size, round, size * numel, at::kFloat)));
    comm.barrier("next round");
  }
}

// Streams that are late by different times; a mailbox that holds little.
TEST(P2p, StreamsWaitForEachOther) {
  for (const int size : {2, 3, 5})
    for (const bool in_place : {false, true})
      run_p2p(size, host_device(microseconds(200), 4096), [&](const auto& comm) {
        const auto twin = comm->duplicate("twin");
        for (const int64_t numel : {1, 37, 3001}) {
          check_collectives(*comm, in_place, numel);
          check_collectives(*twin, in_place, numel);
        }
      });
}

TEST(P2p, NumbersPassTheLowerHalfOfAFlag) {
  run_p2p(
      3, host_device(microseconds(50), 4096), [](const auto& comm) { check_collectives(*comm, false, 9001); },
      /*first_number=*/(uint64_t{1} << 32) - 40);
}

TEST(P2p, AFlagIsNeverReadAsTooLargeAndStaysReleased) {
  p2p::Flag flag{};
  flag.low = 0xffffffffu;
  EXPECT_TRUE(flag.has_reached(0xffffffffull));
  EXPECT_FALSE(flag.has_reached(1ull << 32));
  flag.low = 0;  // a stream that passes 2^32 writes this half first
  EXPECT_FALSE(flag.has_reached(0xffffffffull));
  flag.high = 1;
  EXPECT_TRUE(flag.has_reached(1ull << 32));
  EXPECT_FALSE(flag.has_reached((1ull << 32) + 1));
  flag.release();
  flag.low = 7;  // a late write of a stream
  EXPECT_TRUE(flag.is_released());
  EXPECT_TRUE(flag.has_reached(1ull << 61));
  EXPECT_GT(static_cast<int64_t>(flag.value()), 0) << "a stream compares signed numbers";
}

// More operations than ranks keep keys of, none waited for: ranks issue at different speeds.
TEST(P2p, ManyMoreUnderWayThanKeysAreKept) {
  run_p2p(3, host_device(microseconds(0), 4096), [](const auto& comm) {
    constexpr int kNum = 3 * p2p::kMaxUnchecked;
    const at::Tensor buffers = at::empty({kNum, 6});
    std::vector<WorkPtr> works;
    for (int i = 0; i < kNum; ++i) {
      buffers[i].copy_(filled(comm->rank(), i, 6, at::kFloat));
      works.push_back(comm->all_reduce(buffers[i], str("buffer ", i)));
      if (comm->rank() == 1 && i % 500 == 0) std::this_thread::sleep_for(milliseconds(20));
    }
    for (int i = 0; i < kNum; ++i) {
      works[static_cast<size_t>(i)]->wait();
      ASSERT_TRUE(at::equal(buffers[i], summed(3, i, 6, at::kFloat))) << i;
    }
  });
}

// Sums are shared memory's, bit for bit, wherever the buffer lies.
TEST(P2p, SumsHaveTheBitsOfSharedMemory) {
  constexpr int kSize = 4;
  constexpr int64_t kNumel = 70'001;  // several pieces of a mailbox
  const auto results_of = [&](const std::string& backend, bool in_place) {
    std::vector<std::vector<at::Tensor>> results(kSize);
    run_threads(kSize, quick_options(backend), [&](CommunicatorPtr comm) {
      for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        std::mt19937 random(static_cast<unsigned>(comm->rank()));
        std::normal_distribution<float> normal;
        at::Tensor values = at::empty({kSize * kNumel});
        for (int64_t i = 0; i < values.numel(); ++i) values.data_ptr<float>()[i] = normal(random);
        at::Tensor full =
            in_place ? symmetric(*comm, kSize * kNumel, type) : at::empty({kSize * kNumel}, type);
        full.copy_(values);
        at::Tensor shard = at::ones({kNumel}, type == at::kDouble ? at::kDouble : at::kFloat);
        comm->reduce_scatter(full, {shard, 1.0 / 3, /*add=*/true}, "gradients")->wait();
        full.copy_(values);
        comm->all_reduce(full, "all", 1.0 / 3)->wait();
        auto& mine = results[static_cast<size_t>(comm->rank())];
        mine.push_back(shard);
        mine.push_back(full.clone());
        comm->barrier("read");
      }
    });
    return results;
  };
  const auto expected = results_of("shm", true);
  for (const bool in_place : {false, true}) {
    const auto found = results_of("p2p", in_place);
    for (size_t rank = 0; rank < kSize; ++rank)
      for (size_t i = 0; i < expected[rank].size(); ++i)
        EXPECT_TRUE(at::equal(found[rank][i], expected[rank][i])) << rank << ", result " << i;
  }
}

// A rank that leaves releases the others' streams, which run out over whatever is there. No result of that
// is taken for one.
TEST(P2p, WhatAReleasedStreamLeavesBehindIsNoResult) {
  int num_failures = 0;
  for (int round = 0; round < 60; ++round) {
    std::atomic<int> num_results = 0;
    run_p2p(3, host_device(microseconds(100), 4096), [&](const std::shared_ptr<TransportCommunicator>& comm) {
      std::mt19937 random(static_cast<unsigned>(round));
      const int leaves_after = static_cast<int>(random() % 12);
      const at::Tensor slots = at::empty({20, 3 * 64});
      const std::string error = error_of([&] {
        std::vector<WorkPtr> works;
        for (int i = 0; i < 20; ++i) {
          slots[i].copy_(filled(comm->rank(), i, 3 * 64, at::kFloat));
          works.push_back(comm->all_reduce(slots[i], str("slot ", i)));
          if (comm->rank() == 1 && i == leaves_after) {
            std::this_thread::sleep_for(microseconds(random() % 3000));
            return comm->abort("it has had enough");
          }
        }
        for (int i = 0; i < 20; ++i) {
          works[static_cast<size_t>(i)]->wait();
          EXPECT_TRUE(at::equal(slots[i], summed(3, i, 3 * 64, at::kFloat))) << i;
          ++num_results;
        }
      });
      if (comm->rank() == 1) return;
      EXPECT_NE(error.find("rank 1 left the group: it has had enough"), std::string::npos) << error;
    });
    num_failures += num_results < 40 ? 1 : 0;
  }
  EXPECT_EQ(num_failures, 60);
}

// As on a device, whose streams wait while the host does not: nothing but the group's own thread sees that a
// rank does not come.
TEST(P2p, AStreamThatWaitsForALateRankIsReleasedAtTheTimeout) {
  const auto start = Clock::now();
  run_p2p(
      2, host_device(microseconds(0), 4096),
      [](const std::shared_ptr<TransportCommunicator>& comm) {
        at::Tensor buffer = at::ones({8});
        comm->all_reduce(buffer, "unit 0")->wait();
        if (comm->rank() == 1) {
          std::this_thread::sleep_for(milliseconds(1500));
          error_of([&] { comm->all_reduce(buffer, "unit 1")->wait(); });
          return;
        }
        comm->all_reduce(buffer, "unit 1");  // neither waited for nor polled
        std::this_thread::sleep_for(milliseconds(1000));
        const std::string error = error_of([&] { comm->exchange("", "what was learnt"); });
        EXPECT_EQ(error,
                  "all_reduce of \"unit 1\" (8 x Float), collective 2: rank 1 has not arrived within 0.3 s");
      },
      1, milliseconds(300));
  EXPECT_LT(seconds_since(start), 6);
}

/// A host device on which something fails.
class FailingDevice final : public p2p::Device {
 public:
  explicit FailingDevice(int allocations) : left_(allocations) {}
  at::Device place() const override { return inner_->place(); }
  int64_t half_mailbox_bytes() const override { return inner_->half_mailbox_bytes(); }
  std::shared_ptr<p2p::Memory> allocate(int64_t bytes) override {
    if (left_-- == 0) throw CommError("out of memory");
    return inner_->allocate(bytes);
  }
  FileDescriptor share(p2p::Memory& memory) override { return inner_->share(memory); }
  std::shared_ptr<p2p::Memory> adopt(FileDescriptor fd, int64_t bytes) override {
    return inner_->adopt(std::move(fd), bytes);
  }
  std::shared_ptr<void> register_flags(std::byte* data, int64_t bytes) override {
    return inner_->register_flags(data, bytes);
  }
  std::unique_ptr<p2p::Stream> make_stream() override { return inner_->make_stream(); }

 private:
  const std::shared_ptr<p2p::Device> inner_ = p2p::make_host_device();
  int left_;
};

TEST(P2p, ADeviceThatIsFullIsNamedOnAllRanks) {
  run_p2p(
      3, [](int rank) { return std::make_shared<FailingDevice>(rank == 1 ? 1 : -1); },
      [](const std::shared_ptr<TransportCommunicator>& comm) {
        const std::string error = error_of([&] { comm->allocate_symmetric(5 << 20, at::kCPU, "gradients"); });
        EXPECT_EQ(error, comm->rank() == 1 ? "memory for gradients: out of memory"
                                           : "memory for gradients: rank 1 found no 5 MiB of device memory");
      });
}

TEST(P2p, TryingItOutFindsWhoCannotMapMemory) {
  const GroupStore store(c10::make_intrusive<c10d::HashStore>(), "the threads' store");
  for (const bool works : {true, false}) {
    std::vector<std::string> obstacles(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        obstacles[static_cast<size_t>(rank)] =
            obstacle_to_p2p(store.under(works ? "works" : "fails"),
                            {.rank = rank,
                             .size = 2,
                             .connect_timeout = seconds(10),
                             .device = std::make_shared<FailingDevice>(rank == 1 && !works ? 0 : -1)});
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(obstacles[0], works ? "" : "rank 1 found no 1 MiB of device memory");
    EXPECT_EQ(obstacles[1], works ? "" : "out of memory");
  }
}

}  // namespace
}  // namespace tessera::comm
