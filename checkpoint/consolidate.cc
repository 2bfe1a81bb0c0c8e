#include "checkpoint/consolidate.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/convert.h"
#include "checkpoint/reader.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kBatchBytes = int64_t{8} << 20;
constexpr size_t kNumBatches = 3;
constexpr int64_t kConvertNumel = int64_t{1} << 16;  // at a time: stays in the cache

/// Consecutive bytes of one tensor in one file.
struct Source {
  int rank = 0;
  const DatasetRecord* dataset = nullptr;
  int64_t begin = 0;  // byte within the dataset
  int64_t bytes = 0;
};

/// A tensor of the checkpoint, in the order of its elements.
struct SavedTensor {
  DType type = DType::kFloat32;
  std::vector<Source> sources;
};

DType output_type(DType saved, DType dtype) { return is_floating(saved) ? dtype : saved; }

struct Model {
  std::vector<ModelTensor> tensors;  // as they will be written
  std::vector<SavedTensor> saved;    // by tensor
};

// A parameter is one range of its unit, and the unit's slices are in the ranks' files.
SavedTensor saved_parameter(const Checkpoint& checkpoint, const SavedParameter& parameter) {
  const SavedLayout& layout = checkpoint.manifest().layout;
  SavedTensor saved{layout.weights_type(parameter.unit), {}};
  const int64_t shard_numel = layout.shard_numel(parameter.unit), element_bytes = size_bytes(saved.type);
  const std::string dataset = weights_dataset(layout, parameter.unit);
  for (int64_t next = parameter.offset, end = next + parameter.numel(); next < end;) {
    const auto rank = static_cast<int>(next / shard_numel);
    const int64_t stop = std::min(end, (rank + int64_t{1}) * shard_numel);
    saved.sources.push_back({rank, &checkpoint.dataset(rank, dataset),
                             (next - rank * shard_numel) * element_bytes, (stop - next) * element_bytes});
    next = stop;
  }
  return saved;
}

Model model_of(const Checkpoint& checkpoint, DType dtype) {
  const Manifest& manifest = checkpoint.manifest();
  Model model;
  for (const SavedParameter& parameter : manifest.layout.parameters) {
    model.saved.push_back(saved_parameter(checkpoint, parameter));
    model.tensors.push_back(
        {parameter.name, parameter.shape, output_type(model.saved.back().type, dtype), parameter.aliases});
  }
  for (const TensorRecord& record : manifest.tensors) {
    const DatasetRecord& dataset = checkpoint.dataset(0, record.dataset);
    model.saved.push_back({dataset.type, {}});
    if (dataset.bytes > 0) model.saved.back().sources.push_back({0, &dataset, 0, dataset.bytes});
    model.tensors.push_back({record.name, dataset.shape, output_type(dataset.type, dtype), {}});
  }
  return model;
}

/// Part of the model on its way: bytes as saved, of consecutive elements of consecutive tensors.
struct Batch {
  struct Part {
    size_t tensor;
    int64_t bytes;
  };
  struct Read {
    Source source;
    int64_t to;  // byte of the buffer
  };
  std::vector<std::byte> buffer = std::vector<std::byte>(kBatchBytes);
  std::vector<Part> parts;
  std::vector<Read> reads;
};

/// Cuts the model into batches.
class Cutter {
 public:
  explicit Cutter(const std::vector<SavedTensor>& saved) : saved_(saved) {}

  /// False when there is nothing left.
  bool next(Batch& batch) {
    batch.parts.clear();
    batch.reads.clear();
    int64_t filled = 0;
    for (; tensor_ < saved_.size(); ++tensor_, source_ = 0) {
      const SavedTensor& tensor = saved_[tensor_];
      const int64_t before = filled, element_bytes = size_bytes(tensor.type);
      for (; source_ < tensor.sources.size(); ++source_, taken_ = 0) {
        const Source& source = tensor.sources[source_];
        const int64_t room =
            (kBatchBytes - filled) / element_bytes * element_bytes;  // whole elements, to be converted
        const int64_t bytes = std::min(source.bytes - taken_, room);
        if (bytes > 0)
          batch.reads.push_back({{source.rank, source.dataset, source.begin + taken_, bytes}, filled});
        filled += bytes;
        taken_ += bytes;
        if (taken_ < source.bytes) break;
      }
      if (filled > before) batch.parts.push_back({tensor_, filled - before});
      if (source_ < tensor.sources.size()) break;  // the batch is full
    }
    return filled > 0;
  }

 private:
  const std::vector<SavedTensor>& saved_;
  size_t tensor_ = 0;
  size_t source_ = 0;  // of the tensor
  int64_t taken_ = 0;  // bytes of the source
};

/// Reads ahead on a thread of its own. Owns the thread and the batches; a batch belongs to the reader or to
/// the caller, never to both. What the reader throws comes out of next().
class BatchReader {
 public:
  BatchReader(const Checkpoint& checkpoint, const std::vector<SavedTensor>& saved)
      : checkpoint_(checkpoint), cutter_(saved), thread_([this] { run(); }) {}

  ~BatchReader() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;

  /// The next batch, which stays the caller's until the next call; nullptr after the last.
  const Batch* next() {
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

 private:
  void run() {
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

  bool read_one() {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || num_read_ - num_taken_ < kNumBatches; });
      if (stop_) return false;
    }
    Batch& batch = batches_[num_read_ % kNumBatches];
    if (!cutter_.next(batch)) return false;
    std::sort(batch.reads.begin(), batch.reads.end(), [](const Batch::Read& a, const Batch::Read& b) {
      const auto place = [](const Source& source) {
        return std::pair(source.rank, source.dataset->offset + source.begin);
      };
      return place(a.source) < place(b.source);
    });
    for (const Batch::Read& read : batch.reads) {
      const auto to = std::span(batch.buffer)
                          .subspan(static_cast<size_t>(read.to), static_cast<size_t>(read.source.bytes));
      checkpoint_.read(read.source.rank, *read.source.dataset, read.source.begin, to);
    }
    {
      const std::lock_guard lock(mutex_);
      ++num_read_;
    }
    changed_.notify_all();
    return true;
  }

  const Checkpoint& checkpoint_;
  Cutter cutter_;  // the thread's
  std::array<Batch, kNumBatches> batches_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  size_t num_read_ = 0;   // written by the thread alone
  size_t num_taken_ = 0;  // given back by the caller
  bool holding_ = false;
  bool stop_ = false;
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last: runs as soon as the rest is there
};

/// Writes batches, converted. Owns its scratch memory.
class BatchWriter {
 public:
  BatchWriter(ModelWriter& writer, const std::vector<SavedTensor>& saved)
      : writer_(writer), saved_(saved), scratch_(kConvertNumel * 4) {}

  /// Returns the bytes written.
  int64_t write(const Batch& batch) {
    std::span<const std::byte> data(batch.buffer);
    int64_t written = 0;
    for (const Batch::Part& part : batch.parts) {
      written += write(part.tensor, data.first(static_cast<size_t>(part.bytes)));
      data = data.subspan(static_cast<size_t>(part.bytes));
    }
    return written;
  }

  int64_t num_overflowed() const { return num_overflowed_; }
  /// Of the first tensor with an element that overflowed; there must be one.
  const std::string& first_overflowed() const { return writer_.tensors()[first_overflowed_].name; }

 private:
  int64_t write(size_t tensor, std::span<const std::byte> data) {
    const DType from = saved_[tensor].type, to = writer_.tensors()[tensor].type;
    if (from == to) {
      writer_.append(data);
      return static_cast<int64_t>(data.size());
    }
    int64_t written = 0;
    while (!data.empty()) {
      const int64_t numel = std::min(kConvertNumel, static_cast<int64_t>(data.size()) / size_bytes(from));
      const auto source = data.first(static_cast<size_t>(numel * size_bytes(from)));
      const auto target = std::span(scratch_).first(static_cast<size_t>(numel * size_bytes(to)));
      if (const int64_t count = convert(source, from, target, to); count > 0) {
        if (num_overflowed_ == 0) first_overflowed_ = tensor;
        num_overflowed_ += count;
      }
      writer_.append(target);
      written += static_cast<int64_t>(target.size());
      data = data.subspan(source.size());
    }
    return written;
  }

  ModelWriter& writer_;
  const std::vector<SavedTensor>& saved_;
  std::vector<std::byte> scratch_;
  int64_t num_overflowed_ = 0;
  size_t first_overflowed_ = 0;  // tensor
};

}  // namespace

ConsolidateResult consolidate(const ConsolidateOptions& options) {
  TESSERA_CHECK(options.dtype != DType::kFloat64, "dtype ", name_of(options.dtype));
  const Checkpoint checkpoint = Checkpoint::open(options.directory, options.tag);
  Model model = model_of(checkpoint, options.dtype);
  const Disk disk(options.disk);
  const auto writer = open_model_writer(disk, {.format = options.format,
                                               .path = options.output,
                                               .tensors = std::move(model.tensors),
                                               .max_shard_bytes = options.max_shard_bytes});
  ConsolidateResult result{.checkpoint = checkpoint.path()};
  for (const ModelTensor& tensor : writer->tensors()) {
    ++result.num_tensors;
    result.num_names += 1 + static_cast<int64_t>(tensor.aliases.size());
    result.numel += tensor.bytes() / size_bytes(tensor.type);
  }
  BatchReader reader(checkpoint, model.saved);
  BatchWriter batches(*writer, model.saved);
  while (const Batch* batch = reader.next()) {
    result.bytes += batches.write(*batch);
    if (options.progress) options.progress(result.bytes, writer->total_bytes());
  }
  writer->finish();
  result.num_overflowed = batches.num_overflowed();
  if (result.num_overflowed > 0) result.first_overflowed = batches.first_overflowed();
  return result;
}

}  // namespace tessera::checkpoint
