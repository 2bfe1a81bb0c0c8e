// DataLoader: prefetches batches on worker threads and returns them in order, as torch.utils.data.DataLoader
// does with worker processes.
//
// The contents of a batch (its samples, and the seed of the generator for its augmentation) are decided when
// it is planned, on the thread that uses the loader and in the order of use. Workers only carry the plan out.
// So results are bitwise equal for any num_workers, and a resumed run gets the same random numbers as an
// uninterrupted one.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "train/task/task.h"
#include "train/task/trainer_config.h"

namespace c10 {
class ThreadLocalDebugInfo;
}

namespace tessera::train {

struct DataLoaderOptions {
  int64_t num_workers = 0;       ///< threads; 0: next() makes each batch itself
  int64_t prefetch_factor = 2;   ///< batches made ahead for each worker
  bool pin_memory = true;        ///< CUDA only: copies from page-locked memory, asynchronously
  at::Device device = at::kCPU;  ///< of the returned batches
};

/// The options that trainer.dataloader_* gives.
DataLoaderOptions data_loader_options(const TrainerConfig& trainer, at::Device device);

/// The batch with its tensors on `device`. From page-locked memory the copy is asynchronous on the
/// current stream. For the CPU the tensors are returned as they are.
Batch to_device(Batch batch, at::Device device);

/// Makes the batches of a plan ahead of the caller. Owns the worker threads and the prefetched batches, at
/// most num_workers * prefetch_factor. Used by one thread. Workers run torch's operators single-threaded.
/// Their allocations count as MemoryUse::kOther on the memory meter of the thread that created the loader.
class DataLoader {
 public:
  /// Makes one batch on the CPU. Called on any thread; several may run at once.
  using Make = std::function<Batch()>;
  /// Returns the function that makes the next batch; empty: the end of the data. Called on the thread that
  /// uses the loader.
  using Plan = std::function<Make()>;

  /// Throws Error when a worker thread cannot be created.
  DataLoader(const DataLoaderOptions& options, Plan plan);
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;
  /// Waits for the batches that are being made. Drops those not started.
  ~DataLoader();

  /// The next batch in the order of the plan, on the device; nullopt at the end. Rethrows what the
  /// batch's Make has thrown, at its place in the order. The batches after it can still be read.
  std::optional<Batch> next();

 private:
  struct Slot;
  void start(int64_t num_workers);
  void stop();
  void prefetch();
  void work(const std::shared_ptr<c10::ThreadLocalDebugInfo>& meter);
  Batch pinned(Batch batch) const;

  DataLoaderOptions options_;
  Plan plan_;
  bool plan_ended_ = false;
  std::deque<std::shared_ptr<Slot>> prefetched_;  // planned and not yet returned, in order

  std::mutex mutex_;  // guards the members below, and slots that are not done
  std::condition_variable work_available_, batch_done_;
  std::deque<std::shared_ptr<Slot>> to_make_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::train
