#include "checkpoint/consolidate/tensor_stream.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "checkpoint/formats/convert.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kBatchBytes = int64_t{8} << 20;
constexpr int64_t kConvertNumel = int64_t{1} << 16;  // elements converted at a time: fit in the cache

/// Bytes as saved, of consecutive elements of consecutive tensors.
struct Batch {
  struct Part {
    size_t tensor;
    int64_t bytes;
  };
  struct Read {
    size_t tensor;
    int64_t first;  // element of the tensor
    Extent extent;
    int64_t to;  // byte within the buffer
  };
  std::vector<std::byte> buffer = std::vector<std::byte>(kBatchBytes);
  std::vector<Part> parts;
  std::vector<Read> reads;
};

/// Reads batches ahead of the caller, on a thread of its own. Owns the thread and the batches. At any time a
/// batch is used either by the thread or by the caller. All members are called by one thread.
class BatchReader {
 public:
  /// Starts reading. Both must outlive the reader.
  BatchReader(const ElementSource& elements, const std::vector<StreamedTensor>& tensors)
      : elements_(elements), tensors_(tensors), thread_([this] { run(); }) {}
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;
  ~BatchReader();

  /// The next batch, valid until the next call; nullptr after the last. Throws what reading threw.
  const Batch* next();

 private:
  static constexpr size_t kNumBatches = 3;

  void run();
  bool read_one();
  bool plan(Batch& batch);

  const ElementSource& elements_;
  const std::vector<StreamedTensor>& tensors_;
  size_t tensor_ = 0;  // used by the thread only, as the next
  int64_t taken_ = 0;  // elements of the tensor that earlier batches have
  std::array<Batch, kNumBatches> batches_;
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

BatchReader::~BatchReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

const Batch* BatchReader::next() {
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

/// Fills in the next batch's parts and reads; false when there is nothing left.
bool BatchReader::plan(Batch& batch) {
  batch.parts.clear();
  batch.reads.clear();
  int64_t filled = 0;
  for (; tensor_ < tensors_.size(); ++tensor_, taken_ = 0) {
    const StreamedTensor& tensor = tensors_[tensor_];
    const int64_t before = filled, element_bytes = size_bytes(tensor.saved.type),
                  numel = tensor.saved.numel();
    while (taken_ < numel) {
      // Whole elements, because they are converted.
      const int64_t room = (kBatchBytes - filled) / element_bytes;
      if (room == 0) break;
      const Extent extent = elements_.extent(tensor.id, taken_, std::min(room, numel - taken_));
      batch.reads.push_back({tensor_, taken_, extent, filled});
      filled += extent.numel * element_bytes;
      taken_ += extent.numel;
    }
    if (filled > before) batch.parts.push_back({tensor_, filled - before});
    if (taken_ < numel) break;  // the batch is full
  }
  return filled > 0;
}

bool BatchReader::read_one() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || num_read_ - num_taken_ < kNumBatches; });
    if (stop_) return false;
  }
  Batch& batch = batches_[num_read_ % kNumBatches];
  if (!plan(batch)) return false;
  // So that a block with parts of many small tensors is read and hashed once.
  std::stable_sort(batch.reads.begin(), batch.reads.end(), [](const Batch::Read& a, const Batch::Read& b) {
    return std::pair(a.extent.file, a.extent.offset) < std::pair(b.extent.file, b.extent.offset);
  });
  for (const Batch::Read& read : batch.reads) {
    const StreamedTensor& tensor = tensors_[read.tensor];
    const int64_t bytes = read.extent.numel * size_bytes(tensor.saved.type);
    elements_.read(tensor.id, read.first,
                   std::span(batch.buffer).subspan(static_cast<size_t>(read.to), static_cast<size_t>(bytes)));
  }
  {
    const std::lock_guard lock(mutex_);
    ++num_read_;
  }
  changed_.notify_all();
  return true;
}

/// Converts batches and passes them on. Owns the buffer it converts into. Not thread-safe.
class Converter {
 public:
  Converter(const std::vector<StreamedTensor>& tensors,
            const std::function<void(size_t, std::span<const std::byte>)>& write)
      : tensors_(tensors), write_(write), scratch_(kConvertNumel * 8) {}

  void write(const Batch& batch) {
    std::span<const std::byte> data(batch.buffer);
    for (const Batch::Part& part : batch.parts) {
      write(part.tensor, data.first(static_cast<size_t>(part.bytes)));
      data = data.subspan(static_cast<size_t>(part.bytes));
    }
  }

  const StreamResult& result() const { return result_; }

 private:
  void write(size_t tensor, std::span<const std::byte> data) {
    const DType from = tensors_[tensor].saved.type, to = tensors_[tensor].type;
    if (from == to) {
      pass_on(tensor, data);
      return;
    }
    while (!data.empty()) {
      const int64_t numel = std::min(kConvertNumel, static_cast<int64_t>(data.size()) / size_bytes(from));
      const auto source = data.first(static_cast<size_t>(numel * size_bytes(from)));
      const auto target = std::span(scratch_).first(static_cast<size_t>(numel * size_bytes(to)));
      if (const int64_t count = convert(source, from, target, to); count > 0) {
        if (result_.num_overflowed == 0) result_.first_overflowed = tensor;
        result_.num_overflowed += count;
      }
      pass_on(tensor, target);
      data = data.subspan(source.size());
    }
  }

  void pass_on(size_t tensor, std::span<const std::byte> data) {
    write_(tensor, data);
    result_.bytes += static_cast<int64_t>(data.size());
  }

  const std::vector<StreamedTensor>& tensors_;
  const std::function<void(size_t, std::span<const std::byte>)>& write_;
  std::vector<std::byte> scratch_;
  StreamResult result_;
};

}  // namespace

StreamedTensor streamed(const ElementSource& elements, std::string name, TensorId id,
                        std::optional<DType> type) {
  StoredTensor saved = elements.find(id).value();
  const DType written = type.value_or(saved.type);
  return {std::move(name), std::move(id), std::move(saved), written};
}

StreamResult stream_tensors(const ElementSource& elements, const std::vector<StreamedTensor>& tensors,
                            const std::function<void(size_t, std::span<const std::byte>)>& write) {
  BatchReader reader(elements, tensors);
  Converter converter(tensors, write);
  while (const Batch* batch = reader.next()) converter.write(*batch);
  return converter.result();
}

}  // namespace tessera::checkpoint
