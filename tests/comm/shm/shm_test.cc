// Shared memory: what only this backend has (the rest is in collectives_test and failures_test, for both).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "comm/init/init.h"
#include "comm/shm/shared_memory.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::error_of;
using testing::filled;
using testing::quick_options;
using testing::symmetric;

// Ranks of different speeds share a few buffers: none may be written before all ranks have read it.
TEST(SharedMemoryGroup, BuffersAreFreeOnlyWhenAllHaveRead) {
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

// The board has places for 64 operations: the next one waits until all ranks have finished the first.
TEST(SharedMemoryGroup, MoreUnderWayThanItCanHoldWaits) {
  std::atomic<int> num_posted = 0;
  std::atomic<bool> has_begun = false;
  run_threads(2, quick_options("shm"), [&](CommunicatorPtr comm) {
    const at::Tensor buffers =
        symmetric(*comm, 200 * 16, at::kFloat).view({200, 16});  // other memory is staged, in two slots
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

// What was under way when an operation fails must write nothing afterwards.
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
