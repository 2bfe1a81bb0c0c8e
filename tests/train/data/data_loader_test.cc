#include "train/data/data_loader.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "core/error.h"
#include "engine/profile/memory_meter.h"

namespace tessera::train {
namespace {

using std::chrono::microseconds;

Batch batch_of(int64_t number) {
  Batch batch;
  batch.inputs = {at::full({3}, number, at::kLong)};
  batch.target = at::full({1}, number, at::kLong);
  return batch;
}

/// Batches 0 .. count-1; later ones are often finished earlier.
DataLoader::Plan numbered(int64_t count) {
  return [count, next = int64_t{0}]() mutable -> DataLoader::Make {
    if (next == count) return {};
    return [number = next++] {
      std::this_thread::sleep_for(microseconds(37 * (number * 7 % 11)));
      return batch_of(number);
    };
  };
}

TEST(DataLoader, KeepsTheOrderWithAnyNumberOfWorkers) {
  for (const int64_t num_workers : {0, 1, 2, 5}) {
    for (const int64_t prefetch_factor : {1, 3}) {
      DataLoader loader({.num_workers = num_workers, .prefetch_factor = prefetch_factor}, numbered(40));
      for (int64_t i = 0; i < 40; ++i) {
        const std::optional<Batch> batch = loader.next();
        ASSERT_TRUE(batch);
        EXPECT_EQ(batch->target.item<int64_t>(), i) << num_workers << " workers";
        EXPECT_EQ(batch->inputs.at(0).sum().item<int64_t>(), 3 * i);
        EXPECT_FALSE(batch->mask.defined());
      }
      EXPECT_FALSE(loader.next());
      EXPECT_FALSE(loader.next()) << "again at the end";
    }
  }
}

TEST(DataLoader, MakesAsManyAheadAsAllowedAndOnOtherThreads) {
  int64_t num_planned = 0;
  std::set<std::thread::id> threads;
  std::mutex mutex;
  DataLoader loader({.num_workers = 2, .prefetch_factor = 3}, [&]() -> DataLoader::Make {
    return [&, number = num_planned++] {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
      return batch_of(number);
    };
  });
  EXPECT_EQ(num_planned, 0) << "nothing before the first next()";
  for (int64_t i = 0; i < 20; ++i) {
    loader.next();
    EXPECT_EQ(num_planned, i + 1 + 2 * 3);
  }
  const std::lock_guard lock(mutex);
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
}

TEST(DataLoader, AnErrorComesAtTheBatchItBelongsTo) {
  for (const int64_t num_workers : {0, 1, 3}) {
    DataLoader loader({.num_workers = num_workers}, [next = int64_t{0}]() mutable -> DataLoader::Make {
      return [number = next++] {
        if (number % 5 == 3) throw DataError("image " + std::to_string(number) + " cannot be read");
        return batch_of(number);
      };
    });
    for (int64_t i = 0; i < 20; ++i) {
      if (i % 5 != 3) {
        EXPECT_EQ(loader.next()->target.item<int64_t>(), i);
        continue;
      }
      try {
        loader.next();
        ADD_FAILURE() << "batch " << i << " was returned";
      } catch (const DataError& error) {
        EXPECT_EQ(error.what(), "image " + std::to_string(i) + " cannot be read");
      }
    }
  }
}

TEST(DataLoader, EndsInMidFlight) {
  for (const int64_t num_workers : {1, 4}) {
    for (const int64_t num_taken : {0, 1, 7}) {
      std::atomic<int64_t> num_making = 0, num_made = 0;
      int64_t num_planned = 0;
      {
        DataLoader loader({.num_workers = num_workers, .prefetch_factor = 4}, [&]() -> DataLoader::Make {
          ++num_planned;
          return [&] {
            ++num_making;
            std::this_thread::sleep_for(microseconds(300));
            --num_making;
            ++num_made;
            return batch_of(0);
          };
        });
        for (int64_t i = 0; i < num_taken; ++i) loader.next();
      }
      EXPECT_EQ(num_making, 0) << "no batch is made after the destructor";
      EXPECT_GE(num_made, num_taken);
      EXPECT_EQ(num_planned, num_taken == 0 ? 0 : num_taken + 4 * num_workers);
      EXPECT_LE(num_made, num_planned);
    }
  }
}

TEST(DataLoader, AWorkerUsesOneThreadAndTheOthersKeepTheirs) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  const at::Tensor source = at::arange(3'000'000).view({3'000, 1'000});
  std::atomic<int> in_worker = 0;
  DataLoader loader({.num_workers = 1}, [&]() -> DataLoader::Make {
    return [&] {
      Batch batch;
      batch.inputs = {source.index_select(0, at::arange(2'000))
                          .to(at::kFloat)
                          .div_(255)};  // would be shared between threads
      in_worker = at::get_num_threads();
      return batch;
    };
  });
  EXPECT_EQ(loader.next()->inputs[0].size(0), 2'000);
  EXPECT_EQ(in_worker, 1);
  EXPECT_EQ(at::get_num_threads(), 3);
  int in_another = 0;
  std::thread([&] { in_another = at::get_num_threads(); }).join();
  EXPECT_EQ(in_another, 3) << "in a thread started later";
  at::set_num_threads(before);
}

TEST(DataLoader, TheMeterOfItsThreadCountsWhatWorkersAllocate) {
  constexpr int64_t kBytes = 1 << 20;
  for (const int64_t num_workers : {0, 2}) {
    MemoryMeter meter(at::kCPU);
    meter.set_default_use(MemoryUse::kActivations);
    {
      DataLoader loader({.num_workers = num_workers, .prefetch_factor = 2},
                        [next = 0]() mutable -> DataLoader::Make {
                          if (next++ == 5) return {};
                          return [] {
                            Batch batch;
                            batch.inputs = {at::zeros({kBytes}, at::kByte)};
                            return batch;
                          };
                        });
      for (int i = 0; i < 5; ++i) {
        const std::optional<Batch> batch = loader.next();
        EXPECT_GE(meter.now()[MemoryUse::kOther], kBytes);
        EXPECT_EQ(meter.now()[MemoryUse::kActivations], 0);
      }
    }
    EXPECT_LT(meter.now().total(), kBytes) << "all freed";
    EXPECT_LT(meter.peak().total(), (num_workers * 2 + 2) * kBytes);
  }
}

}  // namespace
}  // namespace tessera::train
