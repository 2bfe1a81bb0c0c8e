#include "checkpoint/manifest/manifest.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/manifest/manifest_text.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;  // keeps the documented order of keys

/// Throws for values that JSON would silently change.
void check_state(const json& value, const std::string& path, int depth) {
  if (depth > kMaxJsonDepth - 2)
    throw CheckpointError(str("cannot save ", path, ": nested deeper than ", kMaxJsonDepth - 2, " levels"));
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    throw CheckpointError(
        str("cannot save ", path, ": found ", value.get<double>(), "; expected a finite number"));
  if (value.is_binary() || value.is_discarded())
    throw CheckpointError(str("cannot save ", path, ": expected a value JSON knows"));
  if (value.is_object())
    for (const auto& [key, member] : value.items()) check_state(member, str(path, ".", key), depth + 1);
  if (value.is_array())
    for (size_t i = 0; i < value.size(); ++i) check_state(value[i], str(path, "[", i, "]"), depth + 1);
}

template <class Json>
std::string dump(const Json& value, const std::string& what) {
  try {
    return value.dump();
  } catch (const json::exception&) {
    throw CheckpointError(str("cannot save ", what, ": it has text that is not UTF-8"));
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

std::string Manifest::to_text() const {
  if (!state.is_object()) throw CheckpointError("cannot save state: expected an object");
  check_state(state, "state", 1);
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

}  // namespace tessera::checkpoint
