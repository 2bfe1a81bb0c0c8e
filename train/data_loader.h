// DataLoader: batches made ahead of their use on threads, in order, as
// torch.utils.data.DataLoader does with processes.
//
// [Note: the same batches from any number of workers]
// What is in a batch is decided when it is planned, on the thread that uses the loader and in the order of
// use: its samples, and the seed of the generator that its augmentation draws from. Workers only carry the
// plan out. So results do not depend on num_workers to the bit, and a run that goes on after a checkpoint
// draws what the uninterrupted one draws.
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

#include "train/task.h"
#include "train/trainer_config.h"

namespace c10 {
class ThreadLocalDebugInfo;
}

namespace tessera::train {

struct DataLoaderOptions {
  int64_t num_workers =
      0;  ///< threads; 0: batches are made by the thread that uses the loader, when it asks for them
  int64_t prefetch_factor = 2;  ///< batches that are made ahead, for each worker
  bool pin_memory =
      true;  ///< CUDA only: through page-locked memory, so that the copy to the device waits for nobody
  at::Device device = at::kCPU;  ///< where batches are handed over
};

/// Local. What trainer.dataloader_* says.
DataLoaderOptions data_loader_options(const TrainerConfig& trainer, at::Device device);

/// Local. The batch with its tensors on `device`; from page-locked memory asynchronously on the current
/// stream. On the CPU it is the same one.
Batch to_device(Batch batch, at::Device device);

/// Owns its workers and the batches under way, at most num_workers * prefetch_factor. Used by one thread.
/// Each worker runs torch's operators on itself alone, and what it allocates is MemoryUse::kOther of the
/// meter of the thread that made the loader.
class DataLoader {
 public:
  /// Makes one batch, on the CPU; on any thread, and several at once.
  using Make = std::function<Batch()>;
  /// What makes the next batch; empty: there is none, and never will be. Called
  /// on the thread that uses the loader.
  using Plan = std::function<Make()>;

  /// Local. Throws Error when the system has no thread to give.
  DataLoader(const DataLoaderOptions& options, Plan plan);
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;
  /// Waits for batches that are being made; those not begun are dropped.
  ~DataLoader();

  /// Local. The next batch in the order of the plan, on the device; nothing at its end.
  /// Throws what its Make threw, at its place in the order: the batches before it come as
  /// ever, and those behind it still can be had.
  std::optional<Batch> next();

 private:
  struct Slot;
  void start(int64_t num_workers);
  void stop();
  void plan_ahead();
  void work(const std::shared_ptr<c10::ThreadLocalDebugInfo>& meter);
  Batch pinned(Batch batch) const;

  DataLoaderOptions options_;
  Plan plan_;
  bool plan_ended_ = false;
  std::deque<std::shared_ptr<Slot>> ahead_;  // planned and not handed over, in order

  std::mutex mutex_;  // guards what follows, and what is in slots that are not done
  std::condition_variable work_, done_;
  std::deque<std::shared_ptr<Slot>> to_make_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::train
