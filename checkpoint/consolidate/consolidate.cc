#include "checkpoint/consolidate/consolidate.h"

#include <span>
#include <utility>
#include <vector>

#include "checkpoint/consolidate/tensor_stream.h"
#include "checkpoint/formats/convert.h"
#include "checkpoint/read/reader.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

DType output_type(DType saved, DType dtype) { return is_floating(saved) ? dtype : saved; }

struct Model {
  std::vector<ModelTensor> tensors;      // as they will be written
  std::vector<StreamedTensor> streamed;  // by tensor
  std::vector<std::string> rounded;      // of fp64, written in fp32
};

Model model_of(const Checkpoint& checkpoint, DType dtype) {
  const Manifest& manifest = checkpoint.manifest();
  Model model;
  const auto add = [&](const std::string& name, const TensorId& id, const std::vector<std::string>& aliases) {
    StreamedTensor tensor = streamed(checkpoint.elements(), id);
    tensor.type = output_type(tensor.saved.type, dtype);
    if (tensor.saved.type == DType::kFloat64 && tensor.type == DType::kFloat32) model.rounded.push_back(name);
    model.tensors.push_back({name, tensor.saved.shape, tensor.type, aliases});
    model.streamed.push_back(std::move(tensor));
  };
  const std::vector<SavedParameter>& parameters = manifest.layout.parameters;
  for (size_t i = 0; i < parameters.size(); ++i)
    add(parameters[i].name, TensorId::weights(static_cast<int>(i)), parameters[i].aliases);
  for (size_t i = 0; i < manifest.tensors.size(); ++i) add(manifest.tensors[i].name, TensorId::buffer(i), {});
  return model;
}

}  // namespace

ConsolidateResult consolidate(const ConsolidateOptions& options) {
  TESSERA_CHECK(options.dtype != DType::kFloat64, "dtype ", name_of(options.dtype));
  const Checkpoint checkpoint = Checkpoint::open(options.directory, options.tag);
  if (checkpoint.foreign() != nullptr) check_archives(*checkpoint.foreign());
  Model model = model_of(checkpoint, options.dtype);
  const Disk disk(options.disk);
  const auto writer = open_model_writer(disk, {.format = options.format,
                                               .path = options.output,
                                               .tensors = std::move(model.tensors),
                                               .max_shard_bytes = options.max_shard_bytes});
  ConsolidateResult result{.checkpoint = checkpoint.path()};
  if (const ForeignCheckpoint* const foreign = checkpoint.foreign()) result.not_read = foreign->not_read;
  if (!model.rounded.empty()) result.not_read.push_back(rounded_to_fp32(model.rounded));
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
  int64_t written = 0;
  const StreamResult streamed =
      stream_tensors(checkpoint.elements(), model.streamed, [&](size_t, std::span<const std::byte> data) {
        writer->append(data);
        written += static_cast<int64_t>(data.size());
        if (options.progress) options.progress(written, writer->total_bytes());
      });
  writer->finish();
  result.bytes = streamed.bytes;
  result.num_overflowed = streamed.num_overflowed;
  if (result.num_overflowed > 0) result.first_overflowed = writer->tensors()[streamed.first_overflowed].name;
  return result;
}

}  // namespace tessera::checkpoint
