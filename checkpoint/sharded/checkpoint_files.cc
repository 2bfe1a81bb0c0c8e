#include "checkpoint/sharded/checkpoint_files.h"

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5/hdf5_image.h"
#include "core/check.h"
#include "core/numel.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using Segment = std::pair<int64_t, SourceBytes>;  // offset, bytes

/// Keeps a segment's bytes in memory.
class Acquired {
 public:
  explicit Acquired(const SourceBytes& source) : bytes(source.acquire()), source_(source) {}
  ~Acquired() noexcept(false) { source_.release(); }
  Acquired(const Acquired&) = delete;
  const std::span<const std::byte> bytes;

 private:
  const SourceBytes& source_;
};

/// Metadata and data from the file's first byte to its last.
std::vector<Segment> segments_of(const Hdf5Image& image, std::span<const SourceBytes> data) {
  std::vector<Segment> segments;
  for (const Hdf5Image::Piece& piece : image.metadata)
    segments.emplace_back(piece.offset, std::as_bytes(std::span(piece.bytes)));
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i].size > 0) segments.emplace_back(image.offsets[i], data[i]);
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return a.first < b.first; });
  int64_t end = 0;
  for (const auto& [offset, bytes] : segments) {
    TESSERA_CHECK(offset == end, "the segments of an HDF5 file leave a hole at byte ", end);
    end += bytes.size;
  }
  TESSERA_CHECK(end == image.file_bytes);
  return segments;
}

/// `data[i]` is written at image.offsets[i]. Each block is hashed and then written while it is in the
/// processor's cache, without a copy. Returns name, bytes and hashes; the caller adds the datasets. Throws
/// DiskError, and what `data` throws.
FileRecord write_image_file(const Disk& disk, const std::filesystem::path& path, const Hdf5Image& image,
                            std::span<const SourceBytes> data) {
  // The device writes while we hash, so the sync at the end takes a third less time.
  constexpr int64_t kStartSyncBytes = 8 * kBlockBytes;
  constexpr int64_t kReadBytes = 8 * kBlockBytes;
  TESSERA_CHECK(data.size() == image.offsets.size());
  OutputFile file = disk.create(path);
  file.reserve(image.file_bytes);
  BlockHasher hasher;
  int64_t started = 0;
  const auto put = [&](int64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto room = static_cast<size_t>(kBlockBytes - offset % kBlockBytes);
      const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), room));
      hasher.update(piece);
      file.write_at(offset, piece);
      offset += static_cast<int64_t>(piece.size());
      bytes = bytes.subspan(piece.size());
      if (offset - started < kStartSyncBytes) continue;
      file.start_sync(started, offset - started);
      started = offset;
    }
  };
  std::vector<std::byte> buffer;  // of sources that are read
  for (const auto& [begin, source] : segments_of(image, data)) {
    if (!source.read) {
      const Acquired acquired(source);
      put(begin, acquired.bytes);
      continue;
    }
    buffer.resize(static_cast<size_t>(kReadBytes));
    for (int64_t done = 0; done < source.size;) {
      const auto piece =
          std::span(buffer).first(static_cast<size_t>(std::min(kReadBytes, source.size - done)));
      source.read(done, piece);
      put(begin + done, piece);
      done += std::ssize(piece);
    }
  }
  file.close();
  return {.name = path.filename().string(),
          .bytes = image.file_bytes,
          .block_hashes = hasher.finish(),
          .datasets = {}};
}

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

namespace {

/// The elements of the parameter of this index, shard by shard.
std::vector<Hdf5Source> sources_of(const SavedLayout& layout, int index) {
  std::vector<Hdf5Source> sources;
  const SavedParameter& parameter = layout.parameters[static_cast<size_t>(index)];
  for (int64_t first = 0, numel = parameter.numel(); first < numel; first += sources.back().numel) {
    const SavedPlace at = layout.place(index, first);
    sources.push_back({.file = rank_file_name(at.rank),
                       .dataset = weights_dataset(layout, parameter.unit),
                       .dataset_numel = layout.shard_numel(parameter.unit),
                       .dataset_begin = at.begin,
                       .begin = first,
                       .numel = at.numel});
  }
  return sources;
}

/// Pieces of all parameters.
int64_t num_sources(const SavedLayout& layout) {
  int64_t sum = 0;
  for (int i = 0; i < static_cast<int>(layout.parameters.size()); ++i)
    if (const int64_t numel = layout.parameters[static_cast<size_t>(i)].numel(); numel > 0)
      sum += layout.place(i, numel - 1).rank - layout.place(i, 0).rank + 1;
  return sum;
}

void add_parameters(Hdf5Builder& builder, const SavedLayout& layout) {
  for (int i = 0; i < static_cast<int>(layout.parameters.size()); ++i) {
    const SavedParameter& parameter = layout.parameters[static_cast<size_t>(i)];
    const Hdf5Dataset dataset{.path = hdf5_path("/", parameter.name),
                              .type = layout.weights_type(parameter.unit),
                              .shape = parameter.shape,
                              .attributes = {}};
    // HDF5 makes no virtual dataset of no elements.
    if (parameter.numel() == 0)
      builder.add(dataset);
    else
      builder.add_virtual(dataset, sources_of(layout, i));
    for (const std::string& alias : parameter.aliases) builder.add_link(dataset.path, hdf5_path("/", alias));
  }
}

/// A parameter has a piece for each rank that its unit's shards put it on. A file of more pieces than these
/// has no parameters: HDF5 takes 2 s for 50,000 of them and 40 s for 800,000, at every save.
constexpr int64_t kMaxModelFilePieces = 20'000;
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
    builder.add_external_link(rank_file_name(0), tensor_dataset(name), hdf5_path("/", name));
  const Hdf5Image image = builder.finish();
  const std::vector<SourceBytes> no_data(image.offsets.size());
  return write_image_file(disk, path, image, no_data);
}

}  // namespace tessera::checkpoint
