#include "checkpoint/consolidate/consolidate.h"

#include <algorithm>
#include <vector>

#include "checkpoint/formats/convert.h"
#include "checkpoint/read/batch_reader.h"
#include "checkpoint/read/reader.h"
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

SavedTensor saved_parameter(const SavedLayout& layout, const SavedParameter& parameter) {
  const DType type = layout.weights_type(parameter.unit);
  return {.type = type,
          .dataset = weights_dataset(layout, parameter.unit),
          .begin = parameter.range().begin * size_bytes(type),
          .end = parameter.range().end * size_bytes(type),
          .shard_bytes = layout.shard_numel(parameter.unit) * size_bytes(type)};
}

Model model_of(const Checkpoint& checkpoint, DType dtype) {
  const Manifest& manifest = checkpoint.manifest();
  Model model;
  for (const SavedParameter& parameter : manifest.layout.parameters) {
    model.saved.push_back(saved_parameter(manifest.layout, parameter));
    model.tensors.push_back(
        {parameter.name, parameter.shape, output_type(model.saved.back().type, dtype), parameter.aliases});
  }
  for (const TensorRecord& record : manifest.tensors) {
    const DatasetRecord& dataset = checkpoint.dataset(0, record.dataset);
    model.saved.push_back({dataset.type, record.dataset, 0, dataset.bytes, dataset.bytes});
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
  const auto& state = checkpoint.manifest().state;  // the engine's
  if (const auto module = state.find("module"); module != state.end() && module->is_object())
    if (const auto names = module->find("extra_state"); names != module->end() && names->is_array())
      for (const auto& name : *names)
        if (name.is_string()) result.left_out.push_back(name);
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
