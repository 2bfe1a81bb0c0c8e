// [Note: folders of torch.distributed.checkpoint]
// `.metadata` is a pickle of a Metadata (torch/distributed/checkpoint/metadata.py):
//
//   state_dict_metadata  by name: a TensorStorageMetadata (type, size, chunks: boxes of the tensor, each
//                        with its offsets and sizes), or a BytesStorageMetadata: a value that is no tensor
//   storage_data         by MetadataIndex (name, offset of the chunk): a _StorageInfo (file, byte, length)
//   planner_data         by name: the keys by which the value is found in the state dict that was saved;
//                        the name is the join of them with periods
//
// The bytes of a chunk in a .distcp file, and of a value, are what torch.save writes: a zip archive. A chunk
// that several ranks have is saved by one of them.
//
// An optimizer's state comes in one of three forms: by name (get_optimizer_state_dict, FSDP.optim_state_dict:
// "optimizer", "state", "fc.weight", "exp_avg"), flattened (torchtitan: "optimizer",
// "state.fc.weight.exp_avg"), or by number (torch.optim's own state_dict).
#include "checkpoint/foreign/distributed_metadata.h"

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/pickle.h"
#include "checkpoint/formats/torch_file.h"
#include "core/files/input_file.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;
using Shape = std::vector<int64_t>;
using Key = std::vector<std::string>;

constexpr int64_t kMaxMetadataBytes = int64_t{1} << 31;
constexpr size_t kMaxKeys = 64;                 // of a value in dicts in dicts
constexpr size_t kMaxDimensions = 64;           // libtorch's limit
constexpr size_t kMaxChunks = size_t{1} << 26;  // of all tensors; a pickle may say one list many times

/// Reads `.metadata`.
class MetadataReader {
 public:
  explicit MetadataReader(const fs::path& path)
      : source_(path.string()), text_(read_text(path)), pickle_(bytes(), source_) {}

  std::vector<DistributedItem> items() {
    const PickleValue& root = pickle_.root();
    if (!root.global().ends_with("checkpoint.metadata.Metadata"))
      fail("found ", root.describe(), "; expected torch.distributed.checkpoint's Metadata");
    read_planner_data(root);
    read_storage_data(root);
    std::map<std::string, DistributedItem, std::less<>> items;
    std::vector<std::string> order;
    const PickleValue& entries = dict_of(root, "state_dict_metadata");
    for (size_t i = 0; i + 1 < entries.items.size(); i += 2) {
      DistributedItem item = read_item(text_of(*entries.items[i], "a name"), *entries.items[i + 1]);
      order.push_back(item.name);
      items[item.name] = std::move(item);
    }
    std::vector<DistributedItem> out;
    for (const auto* names : {&planner_order_, &order})  // the planner has the order of the state dict
      for (const std::string& name : *names)
        if (auto node = items.extract(name)) out.push_back(std::move(node.mapped()));
    return out;
  }
  bool has_planner_data() const { return !paths_.empty(); }
  std::string version() const {
    const PickleValue* version = pickle_.root().find("version");
    return version != nullptr && version->kind == Kind::kString ? std::string(version->text) : "";
  }

 private:
  struct Path {  // as of DistributedItem
    Key key;
    std::vector<bool> is_index;
  };

  static std::string read_text(const fs::path& path) {
    const InputFile file(path);
    return file.read_all(kMaxMetadataBytes);
  }
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(text_.data(), text_.size())); }

  template <class... What>
  [[noreturn]] void fail(const What&... what) const {
    throw CheckpointError(source_, ": ", what...);
  }

  const PickleValue& dict_of(const PickleValue& value, const char* key) const {
    const PickleValue* member = value.find(key);
    if (member == nullptr || member->kind != Kind::kDict)
      fail(key, ": found ", member == nullptr ? "nothing" : member->describe(), "; expected a dict");
    return *member;
  }
  std::string text_of(const PickleValue& value, const char* what) const {
    if (value.kind != Kind::kString) fail("found ", value.describe(), "; expected ", what);
    return std::string(value.text);
  }
  int64_t number_of(const PickleValue* value, const std::string& what) const {
    if (value == nullptr || value->kind != Kind::kInt || value->integer < 0)
      fail(what, ": found ", value == nullptr ? "nothing" : value->describe(),
           "; expected an integer from 0 on");
    return value->integer;
  }
  /// A torch.Size, which is read as a tuple, or a tuple or list of sizes.
  Shape sizes_of(const PickleValue* value, const std::string& what) const {
    if (value == nullptr || (value->kind != Kind::kTuple && value->kind != Kind::kList))
      fail(what, ": found ", value == nullptr ? "nothing" : value->describe(), "; expected a torch.Size");
    if (value->items.size() > kMaxDimensions)
      fail(what, ": found ", value->items.size(), " sizes; expected at most ", kMaxDimensions);
    Shape sizes;
    for (const PickleValue* size : value->items) sizes.push_back(number_of(size, what));
    return sizes;
  }

  void read_planner_data(const PickleValue& root) {
    const PickleValue* data = root.find("planner_data");
    if (data == nullptr || data->kind != Kind::kDict) return;
    for (size_t i = 0; i + 1 < data->items.size(); i += 2) {
      const std::string name = text_of(*data->items[i], "a name");
      const PickleValue& path = *data->items[i + 1];
      Path place;
      if (path.kind != Kind::kTuple && path.kind != Kind::kList)
        fail("planner_data of ", quoted_name(name), ": found ", path.describe(),
             "; expected a tuple of keys");
      for (const PickleValue* part : std::span(path.items).first(std::min(path.items.size(), kMaxKeys + 1))) {
        place.key.push_back(part->kind == Kind::kInt ? str(part->integer) : text_of(*part, "a key"));
        place.is_index.push_back(part->kind == Kind::kInt);  // torch makes texts of dicts' keys
      }
      if (place.key.empty() || place.key.size() > kMaxKeys)
        fail("planner_data of ", quoted_name(name), ": found ", place.key.size(), " keys; expected 1 to ",
             kMaxKeys);
      planner_order_.push_back(name);
      paths_.emplace(name, std::move(place));
    }
  }

  void read_storage_data(const PickleValue& root) {
    const PickleValue& data = dict_of(root, "storage_data");
    for (size_t i = 0; i + 1 < data.items.size(); i += 2) {
      const PickleValue &index = *data.items[i], &info = *data.items[i + 1];
      const PickleValue* name = index.find("fqn");
      if (name == nullptr) fail("storage_data: found ", index.describe(), "; expected a MetadataIndex");
      const std::string text = text_of(*name, "a name");
      const PickleValue* offset = index.find("offset");
      std::optional<Shape> begin;
      if (offset != nullptr && offset->kind != Kind::kNone)
        begin = sizes_of(offset, str("storage_data of ", quoted_name(text)));
      DistributedPlace place;
      const PickleValue* path = info.find("relative_path");
      if (path == nullptr)
        fail("storage_data of ", quoted_name(text), ": found ", info.describe(), "; expected a _StorageInfo");
      place.file = text_of(*path, "the name of a file");
      place.offset = number_of(info.find("offset"), str("storage_data of ", quoted_name(text), ": offset"));
      place.bytes = number_of(info.find("length"), str("storage_data of ", quoted_name(text), ": length"));
      const PickleValue* transforms = info.find("transform_descriptors");
      if (transforms != nullptr && !transforms->items.empty())
        place.transform = transforms->items[0]->kind == Kind::kString
                              ? std::string(transforms->items[0]->text)
                              : transforms->items[0]->describe();
      const fs::path relative(place.file);
      if (place.file.empty() || relative.is_absolute() ||
          std::find(relative.begin(), relative.end(), fs::path("..")) != relative.end())
        fail("storage_data of ", quoted_name(text), ": found the file ", quoted_name(place.file),
             "; expected one within the folder");
      if (!places_.emplace(std::pair(text, begin.value_or(Shape{})), std::move(place)).second)
        fail("storage_data has a part of ", quoted_name(text), " twice; expected each once");
    }
  }

  DistributedPlace place_of(const std::string& name, const Shape& begin) {
    const auto at = places_.find({name, begin});
    if (at == places_.end())
      fail("storage_data has no file for ", quoted_name(name), " at ", describe_shape(begin));
    return at->second;
  }

  DistributedItem read_item(const std::string& name, const PickleValue& value) {
    DistributedItem item;
    item.name = name;
    const auto path = paths_.find(name);
    item.key = path == paths_.end() ? guess_key(name) : path->second.key;
    if (path != paths_.end()) item.is_index = path->second.is_index;
    if (value.global().ends_with(".BytesStorageMetadata")) {
      item.place = place_of(name, {});
      return item;
    }
    const std::string what = str("state_dict_metadata of ", quoted_name(name));
    if (!value.global().ends_with(".TensorStorageMetadata"))
      fail(what, ": found ", value.describe(), "; expected a tensor's or bytes' metadata");
    item.is_tensor = true;
    item.shape = sizes_of(value.find("size"), what);
    const PickleValue* properties = value.find("properties");
    if (properties != nullptr && properties->state != nullptr && !properties->state->items.empty()) {
      const PickleValue* type =
          properties->state->kind == Kind::kTuple ? properties->state->items[0] : properties->find("dtype");
      if (type != nullptr && type->kind == Kind::kGlobal) item.type = torch_dtype(type->text);
    }
    const PickleValue* chunks = value.find("chunks");
    if (chunks == nullptr || chunks->kind != Kind::kList) fail(what, ": has no list of chunks");
    for (const PickleValue* one : chunks->items) {
      DistributedChunk chunk;
      chunk.begin = sizes_of(one->find("offsets"), what);
      chunk.sizes = sizes_of(one->find("sizes"), what);
      bool fits = chunk.begin.size() == item.shape.size() && chunk.sizes.size() == item.shape.size();
      bool is_empty = false;
      for (size_t d = 0; fits && d < item.shape.size(); ++d) {
        is_empty |= chunk.sizes[d] == 0;
        fits = chunk.sizes[d] == 0 ||
               (chunk.begin[d] <= item.shape[d] && chunk.sizes[d] <= item.shape[d] - chunk.begin[d]);
      }
      if (!fits)
        fail(what, ": a chunk from ", describe_shape(chunk.begin), " on of ", describe_shape(chunk.sizes),
             "; expected one within ", describe_shape(item.shape));
      if (is_empty) continue;
      if (++num_chunks_ > kMaxChunks) fail("more than ", kMaxChunks, " chunks");
      chunk.place = place_of(name, chunk.begin);
      item.chunks.push_back(std::move(chunk));
    }
    return item;
  }

  /// Of a name without planner_data: the usual first keys are those of a dict.
  static Key guess_key(const std::string& name) {
    for (const std::string_view first : {"model.", "optimizer.", "optim."})
      if (name.starts_with(first) && name.size() > first.size())
        return {std::string(first.substr(0, first.size() - 1)), name.substr(first.size())};
    return {name};
  }

  std::string source_;
  std::string text_;
  Pickle pickle_;
  std::map<std::string, Path> paths_;  // by name
  std::vector<std::string> planner_order_;
  std::map<std::pair<std::string, Shape>, DistributedPlace> places_;
  size_t num_chunks_ = 0;
};

}  // namespace

DistributedMetadata read_distributed_metadata(const fs::path& path) {
  MetadataReader reader(path);
  return {.items = reader.items(), .in_order = reader.has_planner_data(), .version = reader.version()};
}

}  // namespace tessera::checkpoint
