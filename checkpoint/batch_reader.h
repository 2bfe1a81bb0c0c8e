// BatchReader: reads the tensors of a checkpoint in batches of fixed size, ahead of the caller, on a thread
// of its own. Part of consolidate(): see [Note: consolidation is a stream] in checkpoint/consolidate.h.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

inline constexpr int64_t kBatchBytes = int64_t{8} << 20;

/// Consecutive bytes of one tensor in one file.
struct SavedRange {
  int rank = 0;
  const DatasetRecord* dataset = nullptr;
  int64_t begin = 0;  ///< byte within the dataset
  int64_t bytes = 0;
};

/// A tensor of the checkpoint: its bytes in the order of its elements.
struct SavedTensor {
  DType type = DType::kFloat32;
  std::vector<SavedRange> ranges;
};

/// Bytes as saved, of consecutive elements of consecutive tensors.
struct SavedBatch {
  struct Part {
    size_t tensor;
    int64_t bytes;
  };
  struct Read {
    SavedRange range;
    int64_t to;  ///< byte within the buffer
  };
  std::vector<std::byte> buffer = std::vector<std::byte>(kBatchBytes);
  std::vector<Part> parts;
  std::vector<Read> reads;
};

/// Divides tensors into batches. Not thread-safe.
class BatchPlanner {
 public:
  /// `saved` must outlive the planner.
  explicit BatchPlanner(const std::vector<SavedTensor>& saved) : saved_(saved) {}

  /// Local. Fills in the next batch's parts and reads; false when there is nothing left.
  bool next(SavedBatch& batch);

 private:
  const std::vector<SavedTensor>& saved_;
  size_t tensor_ = 0;
  size_t range_ = 0;   // of the tensor
  int64_t taken_ = 0;  // bytes of the range that earlier batches have
};

/// Owns the thread and the batches. At any time a batch is used either by the thread or by the caller. All
/// members are called by one thread.
class BatchReader {
 public:
  /// Starts reading. Checkpoint and tensors must outlive the reader.
  BatchReader(const Checkpoint& checkpoint, const std::vector<SavedTensor>& saved);
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;
  ~BatchReader();

  /// Local. The next batch, valid until the next call; nullptr after the last. Throws what reading threw.
  const SavedBatch* next();

 private:
  static constexpr size_t kNumBatches = 3;

  void run();
  bool read_one();

  const Checkpoint& checkpoint_;
  BatchPlanner planner_;  // used by the thread only
  std::array<SavedBatch, kNumBatches> batches_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  size_t num_read_ = 0;   // written by the thread only
  size_t num_taken_ = 0;  // given back by the caller
  bool holding_ = false;
  bool stop_ = false;
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last: starts when all other members exist
};

}  // namespace tessera::checkpoint
