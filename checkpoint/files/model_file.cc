#include "checkpoint/files/model_file.h"

#include <algorithm>

#include "checkpoint/files/image_file.h"
#include "checkpoint/files/shard_file.h"
#include "checkpoint/hdf5/hdf5_image.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

std::string model_dataset(const std::string& name) { return str("/", hdf5_name(name)); }

/// The parameter's elements, shard by shard.
std::vector<Hdf5Source> sources_of(const SavedLayout& layout, const SavedParameter& parameter) {
  std::vector<Hdf5Source> sources;
  const int64_t shard_numel = layout.shard_numel(parameter.unit);
  for (int64_t next = parameter.offset, end = next + parameter.numel(); next < end;) {
    const int64_t rank = next / shard_numel;
    const int64_t shard_end = std::min(end, (rank + 1) * shard_numel);
    sources.push_back({.file = rank_file_name(static_cast<int>(rank)),
                       .dataset = weights_dataset(layout, parameter.unit),
                       .dataset_numel = shard_numel,
                       .dataset_begin = next - rank * shard_numel,
                       .begin = next - parameter.offset,
                       .numel = shard_end - next});
    next = shard_end;
  }
  return sources;
}

/// Pieces of all parameters.
int64_t num_sources(const SavedLayout& layout) {
  int64_t sum = 0;
  for (const SavedParameter& parameter : layout.parameters) {
    if (parameter.numel() == 0) continue;
    const int64_t shard_numel = layout.shard_numel(parameter.unit);
    sum += (parameter.range().end - 1) / shard_numel - parameter.offset / shard_numel + 1;
  }
  return sum;
}

void add_parameters(Hdf5Builder& builder, const SavedLayout& layout) {
  for (const SavedParameter& parameter : layout.parameters) {
    const Hdf5Dataset dataset{.path = model_dataset(parameter.name),
                              .type = layout.weights_type(parameter.unit),
                              .shape = parameter.shape,
                              .attributes = {}};
    // HDF5 makes no virtual dataset of no elements.
    if (parameter.numel() == 0)
      builder.add(dataset);
    else
      builder.add_virtual(dataset, sources_of(layout, parameter));
    for (const std::string& alias : parameter.aliases) builder.add_link(dataset.path, model_dataset(alias));
  }
}

constexpr std::string_view kLeftOut = "parameters: they lie in too many pieces; use tessera consolidate";

}  // namespace

FileRecord write_model_file(const Disk& disk, const std::filesystem::path& path, const SavedLayout& layout,
                            const std::vector<std::string>& buffers) {
  Hdf5Builder builder(std::string(kModelFileName), Hdf5Readers::kSince1_10);
  builder.set_attribute("/", {"format", "tessera-checkpoint"});
  builder.set_attribute("/", {"format_version", int64_t{kFormatVersion}});
  if (num_sources(layout) <= kMaxModelFilePieces)
    add_parameters(builder, layout);
  else
    builder.set_attribute("/", {"left_out", std::string(kLeftOut)});
  for (const std::string& name : buffers)
    builder.add_external_link(rank_file_name(0), tensor_dataset(name), model_dataset(name));
  const Hdf5Image image = builder.finish();
  const std::vector<SourceBytes> no_data(image.offsets.size());
  return write_image_file(disk, path, image, no_data);
}

}  // namespace tessera::checkpoint
