#include "checkpoint/formats/safetensors_index.h"

#include <optional>

#include "checkpoint/checkpoint_error.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using FileByTensor = std::map<std::string, std::string>;

FileByTensor read_weight_map(JsonReader& in) {
  if (in.next() != JsonKind::kObject)
    throw CheckpointError("\"weight_map\" is ", in.found(), ", expected an object");
  FileByTensor files;
  in.enter_object();
  for (std::string name; in.next_key(name);) {
    if (in.next() != JsonKind::kString)
      throw CheckpointError("tensor ", quoted_name(name), " is in ", in.found(),
                            ", expected the name of a file");
    const std::string file = in.string();
    const bool is_name = !file.empty() && file != "." && file != ".." &&
                         file.find_first_of(std::string_view("/\\\0", 3)) == file.npos;
    if (!is_name)
      throw CheckpointError("tensor ", quoted_name(name), " is in ", quoted_name(file),
                            ", expected a file in the index's own folder");
    if (!files.emplace(name, file).second)
      throw CheckpointError("has a tensor twice, in ", quoted_name(file), " the second time");
  }
  return files;
}

/// Throws without the name of the file.
FileByTensor read_index(std::string_view text) {
  JsonReader in(text);
  if (in.next() != JsonKind::kObject) throw CheckpointError("is ", in.found(), ", expected an object");
  std::optional<FileByTensor> files;
  in.enter_object();
  for (std::string key; in.next_key(key);) {
    if (key != "weight_map") {
      in.skip();
      continue;
    }
    if (files) throw CheckpointError("has \"weight_map\" twice");
    files = read_weight_map(in);
  }
  in.finish();
  if (!files) throw CheckpointError("has no \"weight_map\"; expected {\"weight_map\": {NAME: FILE}}");
  return std::move(*files);
}

}  // namespace

FileByTensor parse_safetensors_index(std::string_view text, const std::string& file) {
  try {
    return read_index(text);
  } catch (const JsonError& error) {
    throw CheckpointError(file, ": is no JSON at byte ", error.offset() + 1);
  } catch (const CheckpointError& error) {
    throw CheckpointError(file, ": ", error.what());
  }
}

}  // namespace tessera::checkpoint
