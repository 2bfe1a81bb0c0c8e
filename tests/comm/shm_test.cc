// Shared memory: what only this backend has (the rest is in collectives_test and failures_test, for both).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <thread>

#include "comm/group_store.h"
#include "comm/init.h"
#include "comm/shm/available_memory.h"
#include "comm/shm/peer_sockets.h"
#include "comm/shm/reduce.h"
#include "comm/shm/shared_memory.h"
#include "comm/torch_dtype.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::element;
using testing::error_of;
using testing::filled;
using testing::quick_options;

at::Tensor symmetric(Communicator& comm, int64_t numel, at::ScalarType dtype) {
  return comm.allocate_symmetric(numel * static_cast<int64_t>(at::elementSize(dtype)), at::kCPU, "buffer")
      .view(dtype);
}

// ------------------------------------------------------------------------------------------------ sums

using Inputs = std::vector<at::Tensor>;

/// Element by element in fp32, as reduce() promises.
float expected_sum(const Inputs& inputs, int64_t i, float scale, const at::Tensor* added) {
  float sum = inputs[0][i].item<float>();
  for (size_t r = 1; r < inputs.size(); ++r) sum = sum + inputs[r][i].item<float>();
  sum = sum * scale;
  return added == nullptr ? sum : sum + (*added)[i].item<float>();
}

TEST(Reduce, SumsInOrderInFp32AndRoundedOnce) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const auto in : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const auto out : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const int num : {1, 2, 3, 5})
        for (const bool add : {false, true}) {
          SCOPED_TRACE(
              str(c10::toString(in), " x ", num, " into ", c10::toString(out), add ? ", added" : ""));
          constexpr int64_t kNumel = 1029;  // more than a block, and odd
          Inputs inputs;
          std::vector<const void*> pointers;
          for (int r = 0; r < num; ++r) {
            at::Tensor values = at::empty({kNumel});
            for (int64_t i = 0; i < kNumel; ++i)
              values.data_ptr<float>()[i] = normal(random) * std::exp2(static_cast<float>(r * 3));
            inputs.push_back(values.to(in));
            pointers.push_back(inputs.back().data_ptr());
          }
          at::Tensor result = at::full({kNumel}, 0.75, out);
          const at::Tensor before = result.clone();
          const float scale = num == 3 ? 1.0f / 3 : 1.0f;
          shm::reduce({.dtype = from_torch(in),
                       .inputs = pointers.data(),
                       .num_inputs = num,
                       .numel = kNumel,
                       .output = {result.data_ptr(), from_torch(out), scale, add}});
          at::Tensor expected = at::empty({kNumel});
          for (int64_t i = 0; i < kNumel; ++i)
            expected.data_ptr<float>()[i] = expected_sum(inputs, i, scale, add ? &before : nullptr);
          EXPECT_TRUE(at::equal(result, expected.to(out)));
        }
}

// -------------------------------------------------------------------------------------------- reductions

class ReduceIntoTest : public ::testing::TestWithParam<std::tuple<int, std::string>> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ReduceIntoTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values("gloo", "shm")),
                         [](const auto& info) {
                           return str(std::get<1>(info.param), "_", std::get<0>(info.param));
                         });

TEST_P(ReduceIntoTest, ScalesAddsAndCasts) {
  const int size = std::get<0>(GetParam());
  run_threads(size, quick_options(std::get<1>(GetParam())), [&](CommunicatorPtr comm) {
    for (const bool in_place : {true, false})  // memory the others can read, or not
      for (const int64_t numel : {int64_t{1}, int64_t{64}, int64_t{1001}, int64_t{300'000}}) {
        const at::Tensor values = filled(comm->rank(), 0, size * numel, at::kBFloat16);
        at::Tensor full = in_place ? symmetric(*comm, size * numel, at::kBFloat16) : at::empty_like(values);
        full.copy_(values);
        const at::Tensor shard = at::full({numel}, 3.0f);
        comm->reduce_scatter(full, {shard, 0.5, /*add=*/true}, "gradients")->wait();
        const at::Tensor sum = testing::summed(size, comm->rank() * numel, numel, at::kFloat);
        EXPECT_TRUE(at::equal(shard, 3 + sum / 2)) << numel;
        at::Tensor whole = in_place ? symmetric(*comm, numel, at::kFloat) : at::empty({numel});
        whole.copy_(filled(comm->rank(), 5, numel, at::kFloat));
        comm->all_reduce(whole, "whole", 0.25)->wait();
        EXPECT_TRUE(at::equal(whole, testing::summed(size, 5, numel, at::kFloat) / 4)) << numel;
      }
  });
}

// Ranks of different speeds share a few buffers: none may be written before everybody has read it.
TEST(SharedMemoryGroup, BuffersAreFreeOnlyWhenEverybodyHasRead) {
  constexpr int kSize = 3, kSlots = 3, kRounds = 400;
  constexpr int64_t kNumel = 4096;
  run_threads(kSize, quick_options("shm"), [&](CommunicatorPtr comm) {
    std::mt19937 random(static_cast<unsigned>(comm->rank()));
    std::vector<at::Tensor> slots;
    for (int slot = 0; slot < kSlots; ++slot) slots.push_back(symmetric(*comm, kSize * kNumel, at::kFloat));
    std::vector<at::Tensor> results(kSlots, at::Tensor());
    std::vector<WorkPtr> works(kSlots);
    const auto check = [&](int round) {
      const int slot = round % kSlots;
      if (random() % 3 == 0) {
        while (!works[slot]->test()) std::this_thread::yield();
      }
      works[slot]->wait();
      ASSERT_TRUE(at::equal(results[slot], at::full({kNumel}, 3.0f * static_cast<float>(round) + 3)))
          << round;
    };
    for (int round = 0; round < kRounds; ++round) {
      const int slot = round % kSlots;
      if (works[slot]) check(round - kSlots);
      slots[slot].fill_(static_cast<float>(round + comm->rank()));
      results[slot] = at::empty({kNumel});
      works[slot] = comm->reduce_scatter(slots[slot], {results[slot]}, "slot");
      if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    }
    for (int round = kRounds - kSlots; round < kRounds; ++round) check(round);
  });
}

// The board has a place for each of 64 operations: the next one waits until all
// ranks have done with the first.
TEST(SharedMemoryGroup, MoreUnderWayThanItCanHoldWaits) {
  std::atomic<int> num_posted = 0;
  std::atomic<bool> has_begun = false;
  run_threads(2, quick_options("shm"), [&](CommunicatorPtr comm) {
    const at::Tensor buffers =
        symmetric(*comm, 200 * 16, at::kFloat).view({200, 16});  // others come through two mailboxes
    std::vector<at::Tensor> sums;
    std::vector<WorkPtr> works;
    if (comm->rank() == 1) {
      while (num_posted < 64) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      has_begun = true;
    }
    for (int i = 0; i < 200; ++i) {
      buffers[i].copy_(filled(comm->rank(), i, 16, at::kFloat));
      sums.push_back(at::empty({8}));
      works.push_back(comm->reduce_scatter(buffers[i], {sums.back()}, str("buffer ", i)));
      if (comm->rank() == 0 && ++num_posted == 65) {
        EXPECT_TRUE(has_begun);
      }
    }
    for (int i = 0; i < 200; ++i) {
      works[i]->wait();
      EXPECT_TRUE(at::equal(sums[i], testing::summed(2, i, 16, at::kFloat).narrow(0, 8 * comm->rank(), 8)))
          << i;
    }
  });
}

TEST(SharedMemoryGroup, WhatIsSharedIsOneMemory) {
  run_threads(3, quick_options("shm"), [&](CommunicatorPtr comm) {
    const at::Tensor full = comm->allocate_shared(3 * 1000 * 4, "unit").view(at::kFloat);
    EXPECT_EQ(full.abs().max().item<float>(), 0) << "new memory is zeros";
    comm->barrier("looked");
    const at::Tensor mine = full.narrow(0, comm->rank() * 1000, 1000);
    mine.fill_(comm->rank() + 1);
    comm->all_gather(full, mine, "unit")->wait();
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(full.narrow(0, r * 1000, 1000).eq(r + 1).all().item<bool>()) << r;
    comm->barrier("read");
    if (comm->rank() == 1) full[7] = 42;
    comm->broadcast(full, 1, "unit")->wait();
    EXPECT_EQ(full[7].item<float>(), 42);
  });
}

TEST(SharedMemoryGroup, OtherBackendsShareNothing) {
  run_threads(2, quick_options("gloo"), [&](CommunicatorPtr comm) {
    EXPECT_FALSE(comm->allocate_shared(64, "unit").defined());
    EXPECT_EQ(comm->allocate_symmetric(64, at::kCPU, "buffer").numel(), 64);
  });
}

TEST(SharedMemoryGroup, NothingIsMemoryToo) {
  run_threads(2, quick_options("shm"), [&](CommunicatorPtr comm) {
    EXPECT_EQ(comm->allocate_shared(0, "an empty unit").numel(), 0);
    EXPECT_EQ(comm->allocate_symmetric(0, at::kCPU, "buffer").numel(), 0);
  });
}

// A failure here must not be blamed on the network, and what was under way must not write any more.
TEST(SharedMemoryGroup, AfterAFailureNothingIsWritten) {
  std::atomic<bool> issued = false;
  run_threads(2, quick_options("shm"), [&](CommunicatorPtr comm) {
    if (comm->rank() == 1) {
      while (!issued) std::this_thread::yield();
      EXPECT_NE(error_of([&] { comm->barrier("something else"); }), "");
      return;
    }
    const at::Tensor buffer = at::ones({8});
    const WorkPtr work = comm->all_reduce(buffer, "sum");
    issued = true;
    EXPECT_NE(error_of([&] { work->wait(); }), "");
    EXPECT_TRUE(work->test()) << "it will never be more finished than this";
    EXPECT_NE(error_of([&] { work->wait(); }), "");
    EXPECT_TRUE(buffer.eq(1).all().item<bool>());
  });
}

// ------------------------------------------------------------------------------------------------ memory

TEST(SharedMemory, TooMuchIsOneLine) {
  EXPECT_EQ(error_of([] {
              shm::SharedMemory::create(int64_t{1} << 60);
            }).find("no 1099511627776 MiB of shared memory: the machine"),
            0u);
  std::array<std::string, 2> errors;
  run_threads(2, quick_options("shm"), [&](CommunicatorPtr comm) {
    errors[comm->rank()] = error_of([&] { comm->allocate_shared(int64_t{1} << 60, "unit 0"); });
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("unit 0"), error.npos) << error;
    EXPECT_NE(error.find("MiB of shared memory"), error.npos) << error;
    EXPECT_EQ(error.find('\n'), error.npos);
  }
}

TEST(SharedMemory, LimitsOfContainersCount) {
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / str("tessera_limits_", getpid());
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root / name).parent_path());
    std::ofstream(root / name) << text;
  };
  write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n");
  EXPECT_EQ(shm::available_memory(root), 8000 * 1024);
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "100\n");
  EXPECT_EQ(shm::available_memory(root), 8000 * 1024);
  write("sys/fs/cgroup/a/memory.max", "5000\n");
  write("sys/fs/cgroup/a/memory.current", "2000\n");
  EXPECT_EQ(shm::available_memory(root), 3000) << "a group above";
  write("sys/fs/cgroup/a/memory.stat",
        "anon 100\nfile 1900\nshmem 400\ninactive_file 1000\nactive_file 500\n");
  EXPECT_EQ(shm::available_memory(root), 4500) << "the cache of files is given up when memory is wanted";
  write("proc/self/cgroup", "9:cpu,memory:/docker/c\n");
  write("sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes", "700\n");
  write("sys/fs/cgroup/memory/docker/c/memory.usage_in_bytes", "800\n");
  EXPECT_EQ(shm::available_memory(root), 0) << "cgroup v1";
  write("sys/fs/cgroup/memory/docker/c/memory.stat",
        "inactive_file 1\ntotal_inactive_file 150\ntotal_active_file 50\n");
  EXPECT_EQ(shm::available_memory(root), 100);
  std::filesystem::remove_all(root);
}

// ------------------------------------------------------------------------------------ who waits, and for
// whom

using std::chrono::milliseconds;

GroupStore new_store() { return {c10::make_intrusive<c10d::HashStore>(), "the test's store"}; }

/// Two ends, rank 0's and rank 1's.
std::array<std::unique_ptr<shm::PeerSockets>, 2> two_peers() {
  const GroupStore store = new_store();
  std::array<std::unique_ptr<shm::PeerSockets>, 2> peers;
  std::thread other(
      [&] { peers[1] = std::make_unique<shm::PeerSockets>(store, 1, 2, std::chrono::seconds(10)); });
  peers[0] = std::make_unique<shm::PeerSockets>(store, 0, 2, std::chrono::seconds(10));
  other.join();
  return peers;
}

TEST(PeerSockets, ConnectingHasALimit) {
  EXPECT_EQ(error_of([] { shm::PeerSockets(new_store(), 0, 2, milliseconds(200)); }),
            "rank 1 did not set up shared memory within 0.2 s");
  const GroupStore store = new_store();
  store.set("socket/1", std::string(32, '0'));  // it has come so far
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(error_of([&] { shm::PeerSockets(store, 0, 2, milliseconds(200)); }),
            "rank 1 did not connect to rank 0 over a Unix socket within 0.2 s");
  EXPECT_LT(testing::seconds_since(start), 3);
}

TEST(PeerSockets, ReceivingHasALimit) {
  const auto peers = two_peers();
  int num_looks = 0;
  const auto watch = [&] {
    if (++num_looks > 100) throw std::logic_error("it still waits");
  };
  EXPECT_EQ(error_of([&] { peers[1]->receive(0, milliseconds(200), watch); }),
            "timed out after 0.2 s: rank 0 has sent no shared memory");
}

TEST(PeerSockets, SendingHasALimit) {
  const auto peers = two_peers();
  const auto send_for_ever = [&] {
    for (int i = 0; i < 1'000'000; ++i) peers[0]->send(1, -1, i, milliseconds(200));
  };
  EXPECT_EQ(error_of(send_for_ever), "timed out after 0.2 s: rank 1 takes no shared memory");
}

TEST(PeerSockets, WhatTheStoreHasIsTakenOnlyInTheRightLength) {
  for (const size_t length : {size_t{0}, size_t{31}, size_t{33}, size_t{4000}}) {
    const GroupStore store = new_store();
    store.set("socket/0", std::string(length, 'x'));
    EXPECT_EQ(error_of([&] { shm::PeerSockets(store, 1, 2, milliseconds(200)); }),
              str("the store has ", length, " bytes as socket/0, not 32"));
  }
  const GroupStore store = new_store();
  std::thread zero(
      [&] { EXPECT_NE(error_of([&] { shm::PeerSockets(store, 0, 2, milliseconds(500)); }), ""); });
  while (!store.has("socket/0")) std::this_thread::yield();
  store.set("secret/0", "short");
  EXPECT_EQ(error_of([&] { shm::PeerSockets(store, 1, 2, milliseconds(500)); }),
            "the store has 5 bytes as secret/0, not 32");
  zero.join();
}

TEST(SharedMemory, AFileThatIsShorterOrMayShrinkIsRefused) {
  FileDescriptor shorter(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(shorter.get(), 4096), 0);
  ASSERT_EQ(fcntl(shorter.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(error_of([&] { shm::SharedMemory::adopt(std::move(shorter), 8192); }),
            "what came as 8192 bytes of shared memory is a file of 4096 bytes");
  FileDescriptor unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), 8192), 0);
  EXPECT_EQ(error_of([&] { shm::SharedMemory::adopt(std::move(unsealed), 8192); }),
            "what came as 8192 bytes of shared memory is a file of 8192 bytes that can shrink");
}

}  // namespace
}  // namespace tessera::comm
