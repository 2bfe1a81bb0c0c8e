// BatchReader: reads the tensors of a checkpoint in batches of fixed size, ahead of the caller, on a thread
// of its own. Part of consolidate(), checkpoint/consolidate/consolidate.h.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/read/reader.h"
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

/// A tensor of the checkpoint: a range of a unit, of which rank r's file has the r-th of equal shards. Which
/// files have it is computed as it is read, so that tables don't grow with the number of ranks.
struct StoredTensor {
  DType type = DType::kFloat32;
  std::string dataset;      ///< of the unit, in each rank's file; of a whole tensor, in rank 0's
  int64_t begin = 0;        ///< byte of the unit
  int64_t end = 0;          ///< and the one after the last
  int64_t shard_bytes = 0;  ///< of a rank

  /// The bytes from `next` on that one file has, at most `most`.
  SavedRange range(const Checkpoint& checkpoint, int64_t next, int64_t most) const;
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
  /// Both must outlive the planner.
  BatchPlanner(const Checkpoint& checkpoint, const std::vector<StoredTensor>& saved)
      : checkpoint_(checkpoint), saved_(saved) {}

  /// Fills in the next batch's parts and reads; false when there is nothing left.
  bool next(SavedBatch& batch);

 private:
  const Checkpoint& checkpoint_;
  const std::vector<StoredTensor>& saved_;
  size_t tensor_ = 0;
  int64_t taken_ = 0;  // bytes of the tensor that earlier batches have
};

/// Reads batches ahead of the caller, on a thread of its own. Owns the thread and the batches. At any time a
/// batch is used either by the thread or by the caller. All members are called by one thread.
class BatchReader {
 public:
  /// Starts reading. Checkpoint and tensors must outlive the reader.
  BatchReader(const Checkpoint& checkpoint, const std::vector<StoredTensor>& saved);
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;
  ~BatchReader();

  /// The next batch, valid until the next call; nullptr after the last. Throws what reading threw.
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
