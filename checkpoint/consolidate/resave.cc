// A checkpoint of Tessera, written by one rank from one of any source. A unit's data pass through one buffer
// (SourceBytes::read), buffers of the model and the rank's own bytes are in memory.
#include <algorithm>
#include <filesystem>
#include <list>
#include <string>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/writers.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/sharded/save.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

zero::Layout layout_of(const SavedLayout& saved) {
  std::vector<zero::ParameterSpec> specs;
  for (const SavedParameter& parameter : saved.parameters) {
    const SavedUnit& unit = saved.units[static_cast<size_t>(parameter.unit)];
    specs.push_back(
        {parameter.name, parameter.shape, unit.dtype, unit.trainable, parameter.group, parameter.aliases});
  }
  return {std::move(specs), {.world_size = 1}};
}

/// Reads units of the new layout from the checkpoint of the old one. Both have the same parameters.
class UnitReader {
 public:
  UnitReader(const ElementSource& elements, const zero::Layout& layout,
             std::function<void(int64_t bytes)> progress)
      : elements_(elements), layout_(layout), progress_(std::move(progress)) {}

  /// `state` empty: the weights.
  SourceBytes source(int unit, const std::string& state) const {
    const zero::UnitSpec& spec = layout_.units()[static_cast<size_t>(unit)];
    const int64_t element = spec.trainable ? size_bytes(DType::kFloat32) : size_bytes(spec.dtype);
    SourceBytes bytes;
    bytes.size = spec.numel * element;
    bytes.read = [this, unit, state, element](int64_t begin, std::span<std::byte> destination) {
      read(unit, state, element, begin, destination);
    };
    return bytes;
  }

 private:
  void read(int unit, const std::string& state, int64_t element, int64_t begin,
            std::span<std::byte> destination) const {
    std::fill(destination.begin(), destination.end(), std::byte{0});  // between parameters
    const int64_t end = begin + std::ssize(destination);
    const std::vector<int>& parameters = layout_.units()[static_cast<size_t>(unit)].parameters;
    const auto first = std::partition_point(parameters.begin(), parameters.end(), [&](int parameter) {
      return layout_.slice(parameter).range().end * element <= begin;
    });
    for (auto next = first; next != parameters.end(); ++next) {
      const zero::Range range = layout_.slice(*next).range();
      if (range.begin * element >= end) break;
      const int64_t from = std::max(begin, range.begin * element), to = std::min(end, range.end * element);
      if (from < to)
        elements_.read(
            state.empty() ? TensorId::weights(*next) : TensorId::state(*next, state),
            from / element - range.begin,
            destination.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(to - from)));
    }
    if (progress_) progress_(std::ssize(destination));
  }

  const ElementSource& elements_;
  const zero::Layout& layout_;
  std::function<void(int64_t)> progress_;
};

}  // namespace

void write_tessera(const Conversion& conversion) {
  const Checkpoint& checkpoint = conversion.checkpoint;
  const Manifest& manifest = checkpoint.manifest();
  const fs::path& directory = conversion.options.output;
  std::error_code error;
  if (fs::equivalent(directory / manifest.tag, checkpoint.path(), error))
    throw CheckpointError(directory, " has the checkpoint itself; expected another folder");
  if (manifest.world_size() > 1 &&
      manifest.rank_file(0).datasets.find(blob_dataset("optimizer_state")) != nullptr)
    throw CheckpointError(checkpoint.path(), ": its optimizer keeps states of its own, on ",
                          manifest.world_size(),
                          " ranks, which one rank cannot have; expected a checkpoint of one rank");
  const zero::Layout layout = layout_of(manifest.layout);

  int64_t total = 0;
  for (const zero::UnitSpec& unit : layout.units())
    total += unit.numel * (unit.trainable ? size_bytes(DType::kFloat32) *
                                                (1 + static_cast<int64_t>(manifest.state_names.size()))
                                          : size_bytes(unit.dtype));
  const UnitReader reader(checkpoint.elements(), layout, [&](int64_t bytes) {
    conversion.result.bytes += bytes;
    if (conversion.options.progress) conversion.options.progress(conversion.result.bytes, total);
  });
  SaveRequest request;
  request.directory = directory;
  request.tag = manifest.tag;
  request.stage = manifest.stage;
  request.layout = &layout;
  request.state_names = manifest.state_names;
  request.state = manifest.state;
  request.disk = conversion.options.disk;
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    UnitData data{.weights = reader.source(unit, ""), .states = {}};
    if (layout.units()[static_cast<size_t>(unit)].trainable)
      for (const std::string& state : manifest.state_names) data.states.push_back(reader.source(unit, state));
    request.units.push_back(std::move(data));
  }
  std::list<std::vector<std::byte>> bytes;  // of buffers and blobs
  const ElementSource& elements = checkpoint.elements();
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const StoredTensor stored = elements.find(TensorId::buffer(i)).value();
    request.tensors.push_back({manifest.tensors[i].name, stored.type, stored.shape,
                               bytes.emplace_back(elements.read_all(TensorId::buffer(i)))});
  }
  for (const DatasetRecord& dataset : manifest.rank_file(0).datasets)
    if (is_blob_dataset(dataset.name)) {
      const std::string name = blob_name(dataset.name);
      request.blobs.push_back({name, bytes.emplace_back(elements.read_all(TensorId::blob(0, name)))});
    }
  if (manifest.world_size() > 1)
    conversion.result.notes.push_back("random numbers and the extra state of modules are rank 0's");
  const SaveResult saved =
      save(request, [](const std::string& mine) { return std::vector<std::string>{mine}; });
  if (!saved.warning.empty()) conversion.result.notes.push_back(saved.warning);
  conversion.result.output = saved.path;
}

}  // namespace tessera::checkpoint
