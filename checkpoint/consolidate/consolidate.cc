// A sharded checkpoint as one full model that other programs read (DeepSpeed: zero_to_fp32.py): all
// parameters (trainable and frozen, under each of their names) and persistent buffers.
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/consolidate/writers.h"
#include "checkpoint/formats/convert.h"
#include "checkpoint/formats/model_writer.h"
#include "core/check.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

ModelFormat format_of(ConvertTarget target) {
  switch (target) {
    case ConvertTarget::kTorch: return ModelFormat::kTorch;
    case ConvertTarget::kHdf5: return ModelFormat::kHdf5;
    default: return ModelFormat::kSafetensors;
  }
}

}  // namespace

void write_weights(const Conversion& conversion) {
  const ConvertOptions& options = conversion.options;
  const Manifest& manifest = conversion.checkpoint.manifest();
  const DType dtype = options.dtype.value_or(DType::kFloat32);
  TESSERA_CHECK(dtype != DType::kFloat64, "dtype ", name_of(dtype));
  ConvertResult& result = conversion.result;
  std::vector<ModelTensor> tensors;      // as they will be written
  std::vector<StreamedTensor> streamed;  // by tensor
  std::vector<std::string> rounded;      // of fp64, written in fp32
  const auto add = [&](const std::string& name, const TensorId& id, const std::vector<std::string>& aliases) {
    StreamedTensor tensor = checkpoint::streamed(conversion.checkpoint.elements(), id);
    if (is_floating(tensor.saved.type)) tensor.type = dtype;
    if (tensor.saved.type == DType::kFloat64 && tensor.type == DType::kFloat32) rounded.push_back(name);
    tensors.push_back({name, tensor.saved.shape, tensor.type, aliases});
    streamed.push_back(std::move(tensor));
    result.num_names += 1 + std::ssize(aliases);
  };
  const std::vector<SavedParameter>& parameters = manifest.layout.parameters;
  for (size_t i = 0; i < parameters.size(); ++i)
    add(parameters[i].name, TensorId::weights(static_cast<int>(i)), parameters[i].aliases);
  for (size_t i = 0; i < manifest.tensors.size(); ++i) add(manifest.tensors[i].name, TensorId::buffer(i), {});
  if (!rounded.empty()) result.notes.push_back(str("left out: ", rounded_to_fp32(rounded)));
  const auto writer = open_model_writer(conversion.disk, {.format = format_of(options.target),
                                                          .path = options.output,
                                                          .tensors = std::move(tensors),
                                                          .max_shard_bytes = options.max_shard_bytes});
  stream_into(
      conversion, streamed, [&](size_t, std::span<const std::byte> data) { writer->append(data); },
      [&](size_t tensor) { return writer->tensors()[tensor].name; });
  writer->finish();
}

}  // namespace tessera::checkpoint
