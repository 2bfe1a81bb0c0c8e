#include "checkpoint/consolidate.h"

#include <algorithm>
#include <vector>

#include "checkpoint/batch_reader.h"
#include "checkpoint/convert.h"
#include "checkpoint/reader.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kConvertNumel = int64_t{1} << 16;  // elements converted at a time: fit in the cache

DType output_type(DType saved, DType dtype) { return is_floating(saved) ? dtype : saved; }

struct Model {
  std::vector<ModelTensor> tensors;  // as they will be written
  std::vector<SavedTensor> saved;    // by tensor
};

// A parameter is one range of its unit, and each rank's file has one shard of the unit.
SavedTensor saved_parameter(const Checkpoint& checkpoint, const SavedParameter& parameter) {
  const SavedLayout& layout = checkpoint.manifest().layout;
  SavedTensor saved{layout.weights_type(parameter.unit), {}};
  const int64_t shard_numel = layout.shard_numel(parameter.unit), element_bytes = size_bytes(saved.type);
  const std::string dataset = weights_dataset(layout, parameter.unit);
  for (int64_t next = parameter.offset, end = next + parameter.numel(); next < end;) {
    const auto rank = static_cast<int>(next / shard_numel);
    const int64_t stop = std::min(end, (rank + int64_t{1}) * shard_numel);
    saved.ranges.push_back({rank, &checkpoint.dataset(rank, dataset),
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
    if (dataset.bytes > 0) model.saved.back().ranges.push_back({0, &dataset, 0, dataset.bytes});
    model.tensors.push_back({record.name, dataset.shape, output_type(dataset.type, dtype), {}});
  }
  return model;
}

/// Converts batches and writes them. Owns the buffer it converts into. Not thread-safe.
class BatchWriter {
 public:
  BatchWriter(ModelWriter& writer, const std::vector<SavedTensor>& saved)
      : writer_(writer), saved_(saved), scratch_(kConvertNumel * 4) {}

  /// Returns the bytes written.
  int64_t write(const SavedBatch& batch) {
    std::span<const std::byte> data(batch.buffer);
    int64_t written = 0;
    for (const SavedBatch::Part& part : batch.parts) {
      written += write(part.tensor, data.first(static_cast<size_t>(part.bytes)));
      data = data.subspan(static_cast<size_t>(part.bytes));
    }
    return written;
  }

  int64_t num_overflowed() const { return num_overflowed_; }
  /// Name of the first tensor with an element that overflowed; there must be one.
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
  size_t first_overflowed_ = 0;  // index of the tensor
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
  while (const SavedBatch* batch = reader.next()) {
    result.bytes += batches.write(*batch);
    if (options.progress) options.progress(result.bytes, writer->total_bytes());
  }
  writer->finish();
  result.num_overflowed = batches.num_overflowed();
  if (result.num_overflowed > 0) result.first_overflowed = batches.first_overflowed();
  return result;
}

}  // namespace tessera::checkpoint
