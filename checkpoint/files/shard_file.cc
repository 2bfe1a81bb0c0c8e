#include "checkpoint/files/shard_file.h"

#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5/hdf5_image.h"
#include "core/error.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kMaxNameBytes = 1024;  // escaped and with its group below the manifest's limit

/// The contents of a file, in the order of its datasets.
struct Contents {
  std::vector<Hdf5Dataset> datasets;
  std::vector<SourceBytes> data;

  void add(Hdf5Dataset dataset, SourceBytes bytes) {
    datasets.push_back(std::move(dataset));
    data.push_back(std::move(bytes));
  }
};

void check_name(const std::string& name, std::string_view kind, std::set<std::string>& names) {
  if (name.empty() || name.size() > kMaxNameBytes || name.find('\0') != std::string::npos || !is_utf8(name))
    throw CheckpointError("cannot save ", kind, " \"", is_utf8(name) ? name.substr(0, 100) : "?",
                          "\": expected a name of 1 to ", kMaxNameBytes, " bytes of UTF-8 without NUL");
  if (!names.insert(name).second)
    throw CheckpointError("cannot save ", kind, " ", name, ": the name is used twice");
}

void check_bytes(const SourceBytes& data, int64_t expected, const std::string& what) {
  if (data.size != expected)
    throw CheckpointError("cannot save ", what, ": found ", data.size, " bytes; expected ", expected);
}

void check_units(const ShardContent& content) {
  const SavedLayout& layout = *content.layout;
  if (static_cast<int>(content.units.size()) != layout.num_units())
    throw CheckpointError("cannot save rank ", content.rank, ": found data of ", content.units.size(),
                          " units; expected ", layout.num_units());
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    const UnitData& data = content.units[unit];
    const int64_t numel = layout.shard_numel(unit);
    check_bytes(data.weights, numel * size_bytes(layout.weights_type(unit)), weights_dataset(layout, unit));
    const size_t num_states = layout.units[unit].trainable ? content.state_names.size() : 0;
    if (data.states.size() != num_states)
      throw CheckpointError("cannot save unit ", unit, ": found ", data.states.size(),
                            " optimizer states; expected ", num_states);
    for (size_t i = 0; i < num_states; ++i)
      check_bytes(data.states[i], numel * size_bytes(DType::kFloat32),
                  state_dataset(content.state_names[i], unit));
  }
}

Contents contents_of(const ShardContent& content) {
  const SavedLayout& layout = *content.layout;
  Contents contents;
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    const int64_t numel = layout.shard_numel(unit);
    const std::vector<Hdf5Attribute> attributes{{"unit", int64_t{unit}},
                                                {"unit_numel", layout.units[unit].numel},
                                                {"first_element", content.rank * numel}};
    contents.add({weights_dataset(layout, unit), layout.weights_type(unit), {numel}, attributes},
                 content.units[unit].weights);
    for (size_t i = 0; i < content.units[unit].states.size(); ++i)
      contents.add({state_dataset(content.state_names[i], unit), DType::kFloat32, {numel}, attributes},
                   content.units[unit].states[i]);
  }
  for (const WholeTensor& tensor : content.tensors)
    contents.add({tensor_dataset(tensor.name), tensor.type, tensor.shape, {}}, tensor.data);
  for (const Blob& blob : content.blobs)
    contents.add({blob_dataset(blob.name), DType::kUInt8, {static_cast<int64_t>(blob.data.size())}, {}},
                 blob.data);
  return contents;
}

Hdf5Image lay_out(const ShardContent& content, const Contents& contents) {
  Hdf5Builder builder(rank_file_name(content.rank), Hdf5Readers::kSince1_8);
  for (const Hdf5Attribute& attribute :
       std::vector<Hdf5Attribute>{{"format", "tessera-checkpoint"},
                                  {"format_version", int64_t{kFormatVersion}},
                                  {"tag", content.tag},
                                  {"rank", int64_t{content.rank}},
                                  {"world_size", int64_t{content.layout->world_size}}})
    builder.set_attribute("/", attribute);
  for (const Hdf5Dataset& dataset : contents.datasets) builder.add(dataset);
  return builder.finish();
}

}  // namespace

void check_content(const ShardContent& content) {
  std::set<std::string> state_names, names, blob_names;
  for (const std::string& state : content.state_names)
    if (!is_state_name(state) || !state_names.insert(state).second)
      throw CheckpointError("cannot save optimizer state ", state,
                            ": expected a name of letters, digits and _, used once and by nothing else");
  for (const SavedParameter& parameter : content.layout->parameters) {
    check_name(parameter.name, "parameter", names);
    for (const std::string& alias : parameter.aliases) check_name(alias, "parameter", names);
    if (parameter.shape.size() > kMaxDims)
      throw CheckpointError("cannot save parameter ", parameter.name, ": it has ", parameter.shape.size(),
                            " dimensions; HDF5 holds ", kMaxDims);
  }
  check_units(content);
  for (const WholeTensor& tensor : content.tensors) {
    check_name(tensor.name, "buffer", names);
    if (tensor.shape.size() > kMaxDims)
      throw CheckpointError("cannot save buffer ", tensor.name, ": it has ", tensor.shape.size(),
                            " dimensions; HDF5 holds ", kMaxDims);
    check_bytes(tensor.data, numel_of(tensor.shape) * size_bytes(tensor.type), "buffer " + tensor.name);
  }
  for (const Blob& blob : content.blobs) check_name(blob.name, "blob", blob_names);
}

FileRecord write_shard_file(const Disk& disk, const std::filesystem::path& path,
                            const ShardContent& content) {
  check_content(content);
  const Contents contents = contents_of(content);
  const Hdf5Image image = lay_out(content, contents);
  FileRecord record = write_image_file(disk, path, image, contents.data);
  std::vector<DatasetRecord> datasets;
  for (size_t i = 0; i < contents.datasets.size(); ++i) {
    const Hdf5Dataset& dataset = contents.datasets[i];
    datasets.push_back({.name = dataset.path,
                        .type = dataset.type,
                        .shape = dataset.shape,
                        .offset = image.offsets[i],
                        .bytes = contents.data[i].size});
  }
  record.datasets = DatasetList(std::move(datasets));
  return record;
}

}  // namespace tessera::checkpoint
