#include "checkpoint/consolidate/tensor_stream.h"

#include <algorithm>

#include "checkpoint/formats/convert.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kConvertNumel = int64_t{1} << 16;  // elements converted at a time: fit in the cache

StoredTensor saved_range(const SavedLayout& layout, const SavedParameter& parameter, std::string dataset,
                         DType type) {
  return {.type = type,
          .dataset = std::move(dataset),
          .begin = parameter.range().begin * size_bytes(type),
          .end = parameter.range().end * size_bytes(type),
          .shard_bytes = layout.shard_numel(parameter.unit) * size_bytes(type)};
}

/// Converts batches and passes them on. Owns the buffer it converts into. Not thread-safe.
class Converter {
 public:
  Converter(const std::vector<StreamedTensor>& tensors,
            const std::function<void(size_t, std::span<const std::byte>)>& write)
      : tensors_(tensors), write_(write), scratch_(kConvertNumel * 8) {}

  void write(const SavedBatch& batch) {
    std::span<const std::byte> data(batch.buffer);
    for (const SavedBatch::Part& part : batch.parts) {
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

StoredTensor saved_weights(const SavedLayout& layout, const SavedParameter& parameter) {
  return saved_range(layout, parameter, weights_dataset(layout, parameter.unit),
                     layout.weights_type(parameter.unit));
}

StoredTensor saved_state(const SavedLayout& layout, const SavedParameter& parameter,
                         const std::string& state) {
  return saved_range(layout, parameter, state_dataset(state, parameter.unit), DType::kFloat32);
}

StoredTensor saved_buffer(const Checkpoint& checkpoint, const TensorRecord& record) {
  const DatasetRecord& dataset = checkpoint.dataset(0, record.dataset);
  return {dataset.type, record.dataset, 0, dataset.bytes, dataset.bytes};
}

StreamResult stream_tensors(const Checkpoint& checkpoint, const std::vector<StreamedTensor>& tensors,
                            const std::function<void(size_t, std::span<const std::byte>)>& write) {
  std::vector<StoredTensor> saved;
  for (const StreamedTensor& tensor : tensors) saved.push_back(tensor.saved);
  BatchReader reader(checkpoint, saved);
  Converter converter(tensors, write);
  while (const SavedBatch* batch = reader.next()) converter.write(*batch);
  return converter.result();
}

}  // namespace tessera::checkpoint
