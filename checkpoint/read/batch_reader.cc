#include "checkpoint/read/batch_reader.h"

#include <algorithm>
#include <span>
#include <utility>

namespace tessera::checkpoint {

SavedRange StoredTensor::range(const Checkpoint& checkpoint, int64_t next, int64_t most) const {
  const auto rank = static_cast<int>(next / shard_bytes);
  const int64_t stop = std::min(end, (rank + int64_t{1}) * shard_bytes);
  return {rank, &checkpoint.dataset(rank, dataset), next - rank * shard_bytes, std::min(stop - next, most)};
}

bool BatchPlanner::next(SavedBatch& batch) {
  batch.parts.clear();
  batch.reads.clear();
  int64_t filled = 0;
  for (; tensor_ < saved_.size(); ++tensor_, taken_ = 0) {
    const StoredTensor& tensor = saved_[tensor_];
    const int64_t before = filled, element_bytes = size_bytes(tensor.type);
    while (tensor.begin + taken_ < tensor.end) {
      // Whole elements, because they are converted.
      const int64_t room = (kBatchBytes - filled) / element_bytes * element_bytes;
      if (room == 0) break;
      batch.reads.push_back({tensor.range(checkpoint_, tensor.begin + taken_, room), filled});
      filled += batch.reads.back().range.bytes;
      taken_ += batch.reads.back().range.bytes;
    }
    if (filled > before) batch.parts.push_back({tensor_, filled - before});
    if (tensor.begin + taken_ < tensor.end) break;  // the batch is full
  }
  return filled > 0;
}

BatchReader::BatchReader(const Checkpoint& checkpoint, const std::vector<StoredTensor>& saved)
    : checkpoint_(checkpoint), planner_(checkpoint, saved), thread_([this] { run(); }) {}

BatchReader::~BatchReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

const SavedBatch* BatchReader::next() {
  std::unique_lock lock(mutex_);
  if (holding_) {
    ++num_taken_;
    holding_ = false;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return num_read_ > num_taken_ || ended_; });
  if (num_read_ > num_taken_) {
    holding_ = true;
    return &batches_[num_taken_ % kNumBatches];
  }
  if (error_) std::rethrow_exception(error_);
  return nullptr;
}

void BatchReader::run() {
  std::exception_ptr error;
  try {
    while (read_one()) {
    }
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  error_ = error;
  ended_ = true;
  changed_.notify_all();
}

bool BatchReader::read_one() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || num_read_ - num_taken_ < kNumBatches; });
    if (stop_) return false;
  }
  SavedBatch& batch = batches_[num_read_ % kNumBatches];
  if (!planner_.next(batch)) return false;
  std::sort(batch.reads.begin(), batch.reads.end(), [](const SavedBatch::Read& a, const SavedBatch::Read& b) {
    const auto place = [](const SavedRange& range) {
      return std::pair(range.rank, range.dataset->offset + range.begin);
    };
    return place(a.range) < place(b.range);
  });
  for (const SavedBatch::Read& read : batch.reads) {
    const auto to =
        std::span(batch.buffer).subspan(static_cast<size_t>(read.to), static_cast<size_t>(read.range.bytes));
    checkpoint_.read(read.range.rank, *read.range.dataset, read.range.begin, to);
  }
  {
    const std::lock_guard lock(mutex_);
    ++num_read_;
  }
  changed_.notify_all();
  return true;
}

}  // namespace tessera::checkpoint
