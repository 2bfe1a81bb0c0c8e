#include "comm/memory/cpu_allocator.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "core/memory/allocation_failure.h"
#include "core/memory/process_memory.h"

namespace tessera::comm {
namespace {

constexpr int64_t kMegabyte = 1 << 20;

at::Tensor bytes(int64_t size) { return at::empty({size}, at::kByte); }
/// Touches all of it.
at::Tensor filled(int64_t size, int value) { return bytes(size).fill_(value); }

class CpuAllocator : public ::testing::Test {
 protected:
  void SetUp() override {
    install_cpu_allocator();
    if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) GTEST_SKIP() << "not with a sanitizer";
    cpu_allocator_step();
    cpu_allocator_step();  // what earlier tests have used no longer counts
    before_ = large_blocks();
  }
  int64_t in_use() const { return large_blocks().in_use - before_.in_use; }

  LargeBlocks before_;
};

TEST_F(CpuAllocator, TensorsOfEverySizeAreAlignedAndWhole) {
  std::mt19937 random(1);
  std::vector<std::pair<at::Tensor, int>> tensors;
  for (int round = 0; round < 300; ++round) {
    const int64_t size = int64_t{1} << (random() % 23);
    const int value = static_cast<int>(random() % 256);
    tensors.emplace_back(filled(size + static_cast<int64_t>(random() % 100), value), value);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors.back().first.data_ptr()) % 64, 0U);
    if (tensors.size() > 40) {
      const size_t which = random() % tensors.size();
      const auto& [tensor, expected] = tensors[which];
      const auto* data = tensor.const_data_ptr<uint8_t>();
      EXPECT_EQ(data[0], expected);
      EXPECT_EQ(std::memcmp(data, data + 1, tensor.nbytes() - 1), 0);  // every byte is that of its neighbour
      tensors.erase(tensors.begin() + static_cast<ptrdiff_t>(which));
    }
  }
  EXPECT_EQ(bytes(0).data_ptr(), nullptr);
}

TEST_F(CpuAllocator, AFreedBlockServesTheNextOfAboutItsSize) {
  const void* first = filled(16 * kMegabyte, 1).data_ptr();
  EXPECT_EQ(large_blocks().kept - before_.kept, 16 * kMegabyte);
  {
    const at::Tensor slightly_smaller = bytes(15 * kMegabyte);
    EXPECT_EQ(slightly_smaller.data_ptr(), first);
    EXPECT_EQ(in_use(), 16 * kMegabyte);
  }
  const at::Tensor much_smaller = bytes(8 * kMegabyte);
  EXPECT_EQ(in_use(), 8 * kMegabyte);
}

TEST_F(CpuAllocator, WhatIsKeptNeverRaisesThePeak) {
  std::mt19937 random(2);
  std::vector<at::Tensor> tensors;
  int64_t most = before_.in_use;
  for (int round = 0; round < 2000; ++round) {
    if (tensors.size() < 12 && random() % 2 == 0) {
      tensors.push_back(bytes(kMegabyte + static_cast<int64_t>(random() % (20 * kMegabyte))));
    } else if (!tensors.empty()) {
      tensors.erase(tensors.begin() + static_cast<ptrdiff_t>(random() % tensors.size()));
    }
    const LargeBlocks now = large_blocks();
    most = std::max(most, now.in_use);
    EXPECT_EQ(now.most_used, most);
    EXPECT_LE(now.in_use + now.kept, most);
  }
  EXPECT_GT(large_blocks().kept, 0);
}

TEST_F(CpuAllocator, ThePeakOfAnEarlierStepIsForgotten) {
  for (int i = 0; i < 4; ++i) filled(50 * kMegabyte, i);
  EXPECT_EQ(large_blocks().kept, 50 * kMegabyte);
  cpu_allocator_step();  // it was the last step's
  EXPECT_EQ(large_blocks().kept, 50 * kMegabyte);
  cpu_allocator_step();
  EXPECT_EQ(large_blocks().kept, 0);
}

TEST_F(CpuAllocator, BlocksThatAreReturnedAreTheSystemsAgain) {
  const double without = own_bytes();
  {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 8; ++i) tensors.push_back(filled(10 * kMegabyte, i));
    EXPECT_GE(own_bytes(), without + 80e6);
  }
  cpu_allocator_step();
  cpu_allocator_step();
  EXPECT_LT(own_bytes(), without + 5e6);
}

// Between blocks in use, so that neighbours do not merge: an aligned block of glibc before 2.38 is not found
// again.
TEST_F(CpuAllocator, ASmallBlockFitsWhereOneOfItsSizeWasFreed) {
  std::vector<at::Tensor> kept, freed;
  for (int i = 0; i < 64; ++i) (i % 2 == 0 ? kept : freed).push_back(filled(100'000, i));
  std::set<const void*> before, after;
  for (const at::Tensor& tensor : freed) before.insert(tensor.data_ptr());
  freed.clear();
  for (int i = 0; i < 32; ++i) freed.push_back(filled(100'000, i));
  for (const at::Tensor& tensor : freed) after.insert(tensor.data_ptr());
  EXPECT_EQ(before, after);
}

TEST_F(CpuAllocator, ThreadsAndForkedProcesses) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 300; ++i) {
        const at::Tensor tensor = filled(kMegabyte + 4096 * (i % 7), t);
        ASSERT_EQ(tensor[kMegabyte - 1].item<int>(), t);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {  // while the threads have the mutex now and then
    const pid_t child = ::fork();
    if (child == 0) {
      alarm(20);
      void* const data = c10::GetCPUAllocator()->raw_allocate(4 * kMegabyte);
      std::memset(data, 1, 4 * kMegabyte);
      c10::GetCPUAllocator()->raw_deallocate(data);
      ::_exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CpuAllocator, MoreThanThereIsIsAnOutOfMemoryError) {
  EXPECT_THROW(bytes(int64_t{1} << 60), c10::OutOfMemoryError);
  const std::optional<AllocationFailure> failure = take_allocation_failure();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->bytes, int64_t{1} << 60);
  EXPECT_GT(failure->available.value(), 0);
  EXPECT_EQ(in_use(), 0);
  EXPECT_LT(large_blocks().most_used, int64_t{1} << 40);  // or everything would be kept from now on
  EXPECT_EQ(filled(2 * kMegabyte, 3)[5].item<int>(), 3);
}

}  // namespace
}  // namespace tessera::comm
