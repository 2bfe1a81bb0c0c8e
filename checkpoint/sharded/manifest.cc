#include "checkpoint/sharded/manifest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5/hdf5_image.h"
#include "core/json/json_field.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/numel.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

std::string unit_name(int unit) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "unit_%05d", unit);
  return digits;
}

constexpr std::string_view kTensors = "/buffers/";
constexpr std::string_view kBlobs = "/blobs/";

}  // namespace

int64_t SavedParameter::numel() const { return numel_of(shape); }

SavedPlace SavedLayout::place(int parameter, int64_t first) const {
  const SavedParameter& one = parameters[static_cast<size_t>(parameter)];
  const int64_t shard = shard_numel(one.unit), element = one.offset + first;
  const auto rank = static_cast<int>(element / shard);
  const int64_t end = std::min(one.range().end, (rank + int64_t{1}) * shard);
  return {rank, element - rank * shard, end - element};
}

SavedLayout saved_layout(const zero::Layout& layout, bool with_frozen) {
  SavedLayout saved{.world_size = layout.world_size(), .units = {}, .parameters = {}};
  std::vector<int> number_of;  // by unit of the layout; -1: left out
  for (const zero::UnitSpec& unit : layout.units()) {
    const bool is_saved = unit.trainable || with_frozen;
    number_of.push_back(is_saved ? saved.num_units() : -1);
    if (is_saved) saved.units.push_back({unit.dtype, unit.trainable, unit.numel});
  }
  for (size_t i = 0; i < layout.parameters().size(); ++i) {
    const zero::ParameterSpec& spec = layout.parameters()[i];
    const zero::UnitSlice& slice = layout.slice(static_cast<int>(i));
    const int unit = number_of[static_cast<size_t>(slice.unit)];
    if (unit >= 0)
      saved.parameters.push_back({spec.name, spec.shape, spec.group, spec.aliases, unit, slice.offset});
  }
  return saved;
}

std::string weights_dataset(const SavedLayout& layout, int unit) {
  return str(layout.units[unit].trainable ? "/master/" : "/parameter/", unit_name(unit));
}

std::string state_dataset(const std::string& state_name, int unit) {
  return str("/", state_name, "/", unit_name(unit));
}

bool is_state_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  constexpr std::array<std::string_view, 4> kTaken{"master", "parameter", "buffers", "blobs"};
  return !name.empty() && name.size() <= 100 && std::all_of(name.begin(), name.end(), allowed) &&
         std::find(kTaken.begin(), kTaken.end(), name) == kTaken.end();
}

DatasetList::DatasetList(std::vector<DatasetRecord> records) {
  const auto shared = std::make_shared<Shared>();
  shared->records = std::move(records);
  for (const DatasetRecord& record : shared->records) {
    shared->by_name.emplace(record.name, &record);
    shared->end_byte = std::max(shared->end_byte, record.offset + record.bytes);
  }
  shared_ = shared;
}

const DatasetRecord* DatasetList::find(std::string_view name) const {
  const auto found = shared_->by_name.find(name);
  return found == shared_->by_name.end() ? nullptr : found->second;
}

std::string rank_file_name(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank_%05d.h5", rank);
  return name;
}

std::string tensor_dataset(const std::string& name) { return hdf5_path(kTensors, name); }
std::string blob_dataset(const std::string& name) { return hdf5_path(kBlobs, name); }
std::string blob_name(std::string_view dataset) {
  const std::string_view link = dataset.substr(std::min(dataset.size(), kBlobs.size()));
  std::string name;
  for (size_t i = 0; i < link.size(); ++i) {
    const std::string_view code = link.substr(i, 3);
    const char escaped = code == "%2F" ? '/' : code == "%25" ? '%' : code == "%2E" ? '.' : '\0';
    name += escaped != '\0' ? escaped : link[i];
    if (escaped != '\0') i += 2;
  }
  return name;
}
bool is_tensor_dataset(std::string_view dataset) { return dataset.starts_with(kTensors); }
bool is_blob_dataset(std::string_view dataset) { return dataset.starts_with(kBlobs); }

namespace {

using nlohmann::json;
using nlohmann::ordered_json;  // keeps the documented order of keys

/// Throws for values that JSON would silently change.
void check_value(const json& value, const std::string& path, int depth) {
  if (depth > kMaxJsonDepth - 2)
    throw CheckpointError("cannot save ", path, ": nested deeper than ", kMaxJsonDepth - 2, " levels");
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    throw CheckpointError("cannot save ", path, ": found ", value.get<double>(),
                          "; expected a finite number");
  if (value.is_binary() || value.is_discarded())
    throw CheckpointError("cannot save ", path, ": expected a value JSON knows");
  if (value.is_object())
    for (const auto& [key, member] : value.items()) check_value(member, str(path, ".", key), depth + 1);
  if (value.is_array())
    for (size_t i = 0; i < value.size(); ++i) check_value(value[i], str(path, "[", i, "]"), depth + 1);
}

template <class Json>
std::string dump(const Json& value, const std::string& what) {
  try {
    return value.dump();
  } catch (const json::exception&) {
    throw CheckpointError("cannot save ", what, ": it has text that is not UTF-8");
  }
}

ordered_json to_json(const DatasetRecord& dataset) {
  return {{"name", dataset.name},
          {"type", name_of(dataset.type)},
          {"shape", dataset.shape},
          {"offset", dataset.offset},
          {"bytes", dataset.bytes}};
}

ordered_json to_json(const SavedUnit& unit) {
  return {{"dtype", name_of(unit.dtype)}, {"trainable", unit.trainable}, {"numel", unit.numel}};
}

ordered_json to_json(const SavedParameter& parameter) {
  return {{"name", parameter.name},     {"shape", parameter.shape}, {"unit", parameter.unit},
          {"offset", parameter.offset}, {"group", parameter.group}, {"aliases", parameter.aliases}};
}

ordered_json to_json(const TensorRecord& tensor) {
  return {{"name", tensor.name}, {"dataset", tensor.dataset}};
}

/// A list, one element per line.
template <class Items, class ToText>
std::string lines(const Items& items, const ToText& to_text) {
  std::string text = "[";
  const char* separator = "\n";
  for (const auto& item : items) {
    text += separator;
    text += to_text(item);
    separator = ",\n";
  }
  return text + (items.empty() ? "]" : "\n]");
}

std::string datasets_text(const DatasetList& datasets) {
  return lines(datasets, [&](const DatasetRecord& one) { return dump(to_json(one), one.name); });
}

std::string record_text(const FileRecord& record, const std::string& datasets) {
  return str("{\"name\": ", dump(json(record.name), record.name), ", \"bytes\": ", record.bytes,
             ", \"blocks\": \"", hashes_to_hex(record.block_hashes), "\"", kDatasetsKey, datasets, "}");
}

/// Since version 2 a list that an earlier file has is that file's index.
std::string files_text(const std::vector<FileRecord>& files, int version) {
  std::map<const void*, size_t> listed;  // by list, the first file that has it
  size_t next = 0;
  return lines(files, [&](const FileRecord& file) {
    const auto [first, is_new] = listed.emplace(file.datasets.identity(), next++);
    return record_text(file, is_new || version == 1 ? datasets_text(file.datasets) : str(first->second));
  });
}

}  // namespace

const TensorRecord* Manifest::find_tensor(std::string_view name) const {
  for (const TensorRecord& tensor : tensors)
    if (tensor.name == name) return &tensor;
  return nullptr;
}

int64_t Manifest::total_bytes() const {
  int64_t bytes = 0;
  for (const FileRecord& file : files) bytes += file.bytes;
  return bytes;
}

std::string file_record_to_text(const FileRecord& record) {
  return record_text(record, datasets_text(record.datasets));
}

void check_state(const json& state) {
  if (!state.is_object()) throw CheckpointError("cannot save state: expected an object");
  check_value(state, "state", 1);
  dump(state, "state");
}

std::string Manifest::to_text() const {
  check_state(state);
  std::string text = str("{\n\"format\": \"", kFormatName, "\",\n\"version\": ", version,
                         ",\n\"tag\": ", dump(json(tag), "the tag"), ",\n\"world_size\": ", layout.world_size,
                         ",\n\"stage\": ", stage, ",\n\"block_bytes\": ", kBlockBytes,
                         ",\n\"state_names\": ", dump(json(state_names), "state names"));
  const auto add = [&](const char* key, const std::string& value) {
    text += str(",\n\"", key, "\": ", value);
  };
  add("units", lines(layout.units, [](const SavedUnit& unit) { return to_json(unit).dump(); }));
  add("parameters", lines(layout.parameters, [](const SavedParameter& one) {
        return dump(to_json(one), "a parameter's name");
      }));
  add("files", files_text(files, version));
  add("tensors",
      lines(tensors, [](const TensorRecord& one) { return dump(to_json(one), "a buffer's name"); }));
  add("state", dump(state, "state"));
  return seal_manifest(text + ",\n");
}

std::string seal_manifest(std::string text) {
  text += kDigestKey;
  const std::string digest = text_digest(text);
  return text + digest + std::string(kDigestEnd);
}

namespace {

using Names = std::set<std::string, std::less<>>;

constexpr int64_t kMaxWorldSize = 100'000;  // five digits in rank_00000.h5
constexpr int64_t kMaxStage = 3;
constexpr int64_t kMaxBytes = int64_t{1} << 60;
constexpr int64_t kParameterAlignmentBytes = 64;

nlohmann::json parse_text(std::string_view text, const std::string& source) {
  try {
    return parse_json(text);
  } catch (const JsonError& error) {
    switch (error.kind()) {
      case JsonError::Kind::kTooDeep: throw CheckpointError(source, ": ", error.what());
      case JsonError::Kind::kKeyTwice:
        throw CheckpointError(source, ": ", nlohmann::json(error.path()).dump(),
                              " is given twice in one object; expected it once");
      case JsonError::Kind::kSyntax:
      case JsonError::Kind::kEmpty: break;
    }
    throw CheckpointError(source, ": is no JSON text: error at byte ", error.offset() + 1, ": ",
                          error.what());
  }
}

std::vector<int64_t> parse_shape(const JsonField& field) {
  if (field.list_size() > kMaxDims) field.fail(str("at most ", kMaxDims, " sizes"));
  std::vector<int64_t> shape;
  int64_t product = 1;
  field.for_each([&](const JsonField& size) {
    shape.push_back(size.integer(0, kMaxBytes));
    if (__builtin_mul_overflow(product, shape.back(), &product) || product > kMaxBytes / 8)
      field.complain("the product of the sizes is too large for a tensor");
  });
  return shape;
}

std::vector<std::string> parse_names(const JsonField& field) {
  std::vector<std::string> names;
  field.for_each([&](const JsonField& name) { names.push_back(name.text()); });
  return names;
}

void insert_unique(Names& names, const std::string& name, const JsonField& field) {
  if (!names.insert(name).second)
    field.complain(str("found ", name, " a second time; expected each name once"));
}

SavedUnit parse_unit(const JsonField& field, int world_size) {
  field.expect_keys({"dtype", "trainable", "numel"});
  const auto dtype = dtype_named(field["dtype"].text());
  const bool trainable = field["trainable"].boolean();
  if (!dtype || (trainable ? !is_floating(*dtype) : !is_kept_frozen(*dtype)))
    field["dtype"].fail(trainable ? "fp32, bf16, fp16 or fp64" : "a type of tensors, such as fp32 or int8");
  const int64_t numel = field["numel"].integer(0, kMaxBytes / 8);
  if (numel % world_size != 0) field["numel"].fail(str("a multiple of world_size, ", world_size));
  return {.dtype = *dtype, .trainable = trainable, .numel = numel};
}

SavedParameter parse_parameter(const JsonField& field, const std::vector<SavedUnit>& units) {
  field.expect_keys({"name", "shape", "unit", "offset", "group", "aliases"});
  SavedParameter parameter{
      .name = field["name"].text(),
      .shape = parse_shape(field["shape"]),
      .group = static_cast<int>(field["group"].integer(0, 1'000'000)),
      .aliases = parse_names(field["aliases"]),
      .unit = static_cast<int>(field["unit"].integer(0, static_cast<int64_t>(units.size()) - 1)),
      .offset = field["offset"].integer(0, kMaxBytes / 8)};
  const SavedUnit& unit = units[parameter.unit];
  if (parameter.offset * size_bytes(unit.dtype) % kParameterAlignmentBytes != 0)
    field["offset"].fail(str("a multiple of ", kParameterAlignmentBytes, " bytes"));
  if (parameter.offset + parameter.numel() > unit.numel)
    field.complain(str(parameter.name, " ends at element ", parameter.offset + parameter.numel(), " of unit ",
                       parameter.unit, ", which has ", unit.numel));
  return parameter;
}

void check_parameters(const SavedLayout& layout, const JsonField& field) {
  Names names;
  std::vector<std::map<int64_t, const SavedParameter*>> by_unit(layout.units.size());
  for (const SavedParameter& parameter : layout.parameters) {
    insert_unique(names, parameter.name, field);
    for (const std::string& alias : parameter.aliases) insert_unique(names, alias, field);
    if (parameter.numel() == 0) continue;
    const auto [other, fresh] = by_unit[parameter.unit].emplace(parameter.offset, &parameter);
    if (!fresh) field.complain(str(parameter.name, " and ", other->second->name, " lie at the same place"));
  }
  for (const auto& unit : by_unit)
    for (auto next = unit.begin(), previous = unit.end(); next != unit.end(); previous = next++)
      if (previous != unit.end() && previous->second->range().end > next->second->offset)
        field.complain(str(previous->second->name, " and ", next->second->name, " overlap"));
}

DatasetRecord parse_dataset(const JsonField& field, int64_t file_bytes) {
  field.expect_keys({"name", "type", "shape", "offset", "bytes"});
  const auto type = dtype_named(field["type"].text());
  if (!type) field["type"].fail("an element type such as fp32, bf16 or int64");
  DatasetRecord dataset{.name = field["name"].text(),
                        .type = *type,
                        .shape = parse_shape(field["shape"]),
                        .offset = 0,
                        .bytes = 0};
  const int64_t bytes = numel_of(dataset.shape) * size_bytes(*type);
  dataset.bytes = field["bytes"].integer(0, kMaxBytes);
  if (dataset.bytes != bytes) field["bytes"].fail(str(bytes, ", as type and shape have it"));
  dataset.offset = field["offset"].integer(0, kMaxBytes);
  if (dataset.offset + dataset.bytes > file_bytes)
    field.complain(
        str(dataset.name, " ends at byte ", dataset.offset + dataset.bytes, " of a file of ", file_bytes));
  return dataset;
}

DatasetList parse_datasets(const JsonField& field, int64_t file_bytes) {
  std::vector<DatasetRecord> records;
  Names names;
  std::map<int64_t, const DatasetRecord*> by_offset;
  records.reserve(field.list_size());  // so that pointers stay valid
  field.for_each([&](const JsonField& one) {
    const DatasetRecord& dataset = records.emplace_back(parse_dataset(one, file_bytes));
    insert_unique(names, dataset.name, one);
    if (dataset.bytes == 0) return;
    const auto [next, fresh] = by_offset.emplace(dataset.offset, &dataset);
    const auto after = std::next(next);
    const bool runs_into_next = after != by_offset.end() && dataset.offset + dataset.bytes > after->first;
    const bool lies_in_previous =
        next != by_offset.begin() && std::prev(next)->first + std::prev(next)->second->bytes > dataset.offset;
    if (!fresh || runs_into_next || lies_in_previous)
      one.complain(str(dataset.name, " overlaps with another dataset"));
  });
  return DatasetList(std::move(records));
}

/// Returns the record of a file without its datasets.
FileRecord parse_file(const JsonField& field) {
  field.expect_keys({"name", "bytes", "blocks", "datasets"});
  FileRecord file{.name = field["name"].text(255),
                  .bytes = field["bytes"].integer(0, kMaxBytes),
                  .block_hashes = {},
                  .datasets = {}};
  const auto hashes = hashes_from_hex(field["blocks"].text(kMaxManifestBytes, /*may_be_empty=*/true));
  if (!hashes || static_cast<int64_t>(hashes->size()) != num_blocks(file.bytes))
    field["blocks"].complain(
        str("expected 16 lower-case hexadecimal digits for each of ", num_blocks(file.bytes), " blocks"));
  file.block_hashes = *hashes;
  return file;
}

/// The list itself, or the index of an earlier file that has the same.
DatasetList datasets_of(const JsonField& field, const FileRecord& file, const Manifest& manifest) {
  if (manifest.version == 1 || !field.value().is_number()) return parse_datasets(field, file.bytes);
  const int64_t num_before = static_cast<int64_t>(manifest.files.size());
  if (num_before == 0) field.fail("a list");
  const DatasetList& listed = manifest.files[field.integer(0, num_before - 1)].datasets;
  if (listed.end_byte() > file.bytes)
    field.complain(str("the datasets end at byte ", listed.end_byte(), " of a file of ", file.bytes));
  return listed;
}

/// Checks that the file of a rank has a dataset for each unit, of the right type and shape, and otherwise
/// only buffers and blobs.
void check_rank_file(const Manifest& manifest, int rank, const JsonField& field) {
  const FileRecord& file = manifest.files[rank];
  std::unordered_map<std::string_view, const DatasetRecord*> left;
  for (const DatasetRecord& dataset : file.datasets) left.emplace(dataset.name, &dataset);
  const SavedLayout& layout = manifest.layout;
  const auto expect = [&](const std::string& name, DType type, int64_t numel) {
    const auto found = left.find(name);
    if (found == left.end()) field.complain(str("dataset ", name, " is missing"));
    if (found->second->type != type || found->second->shape != std::vector{numel})
      field.complain(str("dataset ", name, ": found ", name_of(found->second->type), " ",
                         describe_shape(found->second->shape), "; expected ", name_of(type), " [", numel,
                         "]"));
    left.erase(found);
  };
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    expect(weights_dataset(layout, unit), layout.weights_type(unit), layout.shard_numel(unit));
    if (!layout.units[unit].trainable) continue;
    for (const std::string& state : manifest.state_names)
      expect(state_dataset(state, unit), DType::kFloat32, layout.shard_numel(unit));
  }
  for (const auto& [name, dataset] : left)
    if (!is_blob_dataset(name) && !(rank == 0 && is_tensor_dataset(name)))
      field.complain(str("dataset ", name, " belongs to no unit of the manifest"));
}

void parse_files(const JsonField& field, Manifest& manifest) {
  const size_t num_files = static_cast<size_t>(manifest.layout.world_size) + 1;
  if (field.list_size() != num_files) field.fail(str(num_files, ": one a rank, and ", kModelFileName));
  std::set<const void*> checked;  // lists of other files than rank 0's
  field.for_each([&](const JsonField& one) {
    const int rank = static_cast<int>(manifest.files.size());
    FileRecord file = parse_file(one);
    file.datasets = datasets_of(one["datasets"], file, manifest);
    manifest.files.push_back(std::move(file));
    const bool is_model = rank == manifest.layout.world_size;
    const std::string name = is_model ? std::string(kModelFileName) : rank_file_name(rank);
    if (manifest.files.back().name != name) one["name"].fail(name);
    const DatasetList& datasets = manifest.files.back().datasets;
    if (is_model) {
      if (!datasets.empty()) one["datasets"].fail("none");
    } else if (rank == 0 || checked.insert(datasets.identity()).second) {
      check_rank_file(manifest, rank, one);
    }
  });
}

void parse_tensors(const JsonField& field, Manifest& manifest) {
  Names names, datasets;
  for (const DatasetRecord& dataset : manifest.rank_file(0).datasets)
    if (is_tensor_dataset(dataset.name)) datasets.insert(dataset.name);
  field.for_each([&](const JsonField& one) {
    one.expect_keys({"name", "dataset"});
    manifest.tensors.push_back({.name = one["name"].text(), .dataset = one["dataset"].text()});
    insert_unique(names, manifest.tensors.back().name, one);
    if (datasets.erase(manifest.tensors.back().dataset) == 0)
      one["dataset"].fail(str("a dataset of ", rank_file_name(0), " that belongs to no other tensor"));
  });
  if (!datasets.empty()) field.complain(str("dataset ", *datasets.begin(), " belongs to no tensor"));
}

/// Throws unless the text ends with the digest of the text before it.
void check_digest(std::string_view text, const std::string& source) {
  constexpr size_t kDigits = 32;
  const size_t tail = kDigestKey.size() + kDigits + kDigestEnd.size();
  if (text.size() < tail || !text.ends_with(kDigestEnd) ||
      text.substr(text.size() - tail, kDigestKey.size()) != kDigestKey)
    throw CheckpointError(source, ": is damaged: it does not end with its digest");
  const std::string_view found = text.substr(text.size() - kDigestEnd.size() - kDigits, kDigits);
  const std::string expected = text_digest(text.substr(0, text.size() - kDigestEnd.size() - kDigits));
  if (found != expected)
    throw CheckpointError(source, ": is damaged: its bytes have digest ", expected, ", it says ", found);
}

}  // namespace

FileRecord FileRecordReader::parse(const std::string& text, const std::string& source) {
  const size_t datasets = text.find(kDatasetsKey);
  const bool is_known =
      datasets != std::string::npos && std::string_view(text).substr(datasets) == datasets_text_;
  const nlohmann::json document =
      parse_text(is_known ? str(text.substr(0, datasets), kDatasetsKey, "[]}") : text, source);
  const JsonField field = JsonField::of<CheckpointError>(document, source);
  FileRecord file = parse_file(field);
  if (!is_known || datasets_.end_byte() > file.bytes) {
    datasets_ = parse_datasets(field["datasets"], file.bytes);
    datasets_text_ = datasets == std::string::npos ? "" : text.substr(datasets);
  }
  file.datasets = datasets_;
  return file;
}

Manifest Manifest::parse(std::string_view text, const std::string& source) {
  check_digest(text, source);
  const nlohmann::json document = parse_text(text, source);
  const JsonField field = JsonField::of<CheckpointError>(document, source);
  if (field["format"].text() != kFormatName) field["format"].fail(str("\"", kFormatName, "\""));
  const int64_t version = field["version"].integer(1);
  if (version > kFormatVersion)
    throw CheckpointError(source, ": has format version ", version,
                          ", written by a newer Tessera; this one reads up to version ", kFormatVersion);
  field.expect_keys({"format", "version", "tag", "world_size", "stage", "block_bytes", "state_names", "units",
                     "parameters", "files", "tensors", "state", "digest"});
  Manifest manifest;
  manifest.version = static_cast<int>(version);
  manifest.tag = field["tag"].text(200);
  manifest.stage = static_cast<int>(field["stage"].integer(0, kMaxStage));
  field["block_bytes"].integer(kBlockBytes, kBlockBytes);
  const JsonField state_names = field["state_names"];
  manifest.state_names = parse_names(state_names);
  Names names;
  for (const std::string& name : manifest.state_names) {
    if (!is_state_name(name))
      state_names.complain(str("found ", name, "; expected letters, digits and _, and no name in use"));
    insert_unique(names, name, state_names);
  }
  SavedLayout& layout = manifest.layout;
  layout.world_size = static_cast<int>(field["world_size"].integer(1, kMaxWorldSize));
  field["units"].for_each(
      [&](const JsonField& one) { layout.units.push_back(parse_unit(one, layout.world_size)); });
  const JsonField parameters = field["parameters"];
  parameters.for_each(
      [&](const JsonField& one) { layout.parameters.push_back(parse_parameter(one, layout.units)); });
  check_parameters(layout, parameters);
  parse_files(field["files"], manifest);
  parse_tensors(field["tensors"], manifest);
  if (!field["state"].value().is_object()) field["state"].fail("an object");
  manifest.state = field["state"].value();
  return manifest;
}

std::string content_digest(const Manifest& manifest) {
  std::string text = json_text(manifest.state);
  for (int rank = 0; rank < manifest.world_size(); ++rank)
    text += file_record_to_text(manifest.rank_file(rank));
  return text_digest(text);
}

}  // namespace tessera::checkpoint
