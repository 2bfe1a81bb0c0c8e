// [Note: folders of torch.distributed.checkpoint]
// `.metadata` is a pickle of a Metadata (torch/distributed/checkpoint/metadata.py):
//
//   state_dict_metadata  by name: a TensorStorageMetadata (type, size, chunks: boxes of the tensor by their
//                        offsets and sizes), or a BytesStorageMetadata for a value that is no tensor
//   storage_data         by MetadataIndex(name, offset of the chunk): a _StorageInfo: file, first byte,
//   length planner_data         by name: the keys by which the value is found in the state dict that was
//   saved, of
//                        which the name is the join with periods
//
// The bytes of a chunk in a .distcp file, and of a value, are what torch.save writes: a zip archive. A chunk
// that several ranks have is saved by one of them.
//
// An optimizer's state comes in one of three forms: by name (get_optimizer_state_dict, FSDP.optim_state_dict:
// "optimizer", "state", "fc.weight", "exp_avg"), flattened (torchtitan: "optimizer",
// "state.fc.weight.exp_avg"), or by number (torch.optim's own state_dict).
//
// DCP's writer for the Hugging Face Hub has no .metadata: each safetensors file says in its header, at
// DCP_SHARDING_INFO, where its tensors begin in those of the model.
#include "checkpoint/foreign/distributed.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/formats/safetensors_reader.h"
#include "core/files/input_file.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Kind = PickleValue::Kind;
using Shape = std::vector<int64_t>;
using Key = std::vector<std::string>;  // of a value in the state dict that was saved

constexpr const char* kMetadata = ".metadata";
constexpr std::string_view kShardingInfo = "DCP_SHARDING_INFO";
constexpr int64_t kMaxMetadataBytes = int64_t{1} << 31;
constexpr size_t kMaxListItems = 1 << 16;

/// Where a chunk or a value lies.
struct Place {
  std::string file;
  int64_t offset = 0;
  int64_t bytes = 0;
  std::string transform;  // of a stream that was changed on its way into the file
};

struct Chunk {
  Shape begin;
  Shape sizes;
  Place place;
};

struct Item {
  std::string name;
  Key key;
  bool is_tensor = false;
  std::optional<DType> type;
  Shape shape;
  std::vector<Chunk> chunks;
  Place place;  // of a value that is no tensor
};

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

/// Reads `.metadata`.
class MetadataReader {
 public:
  explicit MetadataReader(const fs::path& folder)
      : source_((folder / kMetadata).string()),
        text_(read_text(folder / kMetadata)),
        pickle_(bytes(), source_) {}

  std::vector<Item> items() {
    const PickleValue& root = pickle_.root();
    if (!root.global().ends_with("checkpoint.metadata.Metadata"))
      fail("found ", root.describe(), "; expected torch.distributed.checkpoint's Metadata");
    read_planner_data(root);
    read_storage_data(root);
    std::map<std::string, Item, std::less<>> items;
    std::vector<std::string> order;
    const PickleValue& entries = dict_of(root, "state_dict_metadata");
    for (size_t i = 0; i + 1 < entries.items.size(); i += 2) {
      Item item = read_item(text_of(*entries.items[i], "a name"), *entries.items[i + 1]);
      order.push_back(item.name);
      items[item.name] = std::move(item);
    }
    std::vector<Item> out;
    for (const auto* names : {&planner_order_, &order})  // the planner has the order of the state dict
      for (const std::string& name : *names)
        if (auto node = items.extract(name)) out.push_back(std::move(node.mapped()));
    return out;
  }
  bool has_planner_data() const { return !keys_.empty(); }
  std::string version() const {
    const PickleValue* version = pickle_.root().find("version");
    return version != nullptr && version->kind == Kind::kString ? std::string(version->text) : "";
  }

 private:
  static std::string read_text(const fs::path& path) {
    const InputFile file(path);
    return file.read_all(kMaxMetadataBytes);
  }
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(text_.data(), text_.size())); }

  template <class... What>
  [[noreturn]] void fail(const What&... what) const {
    throw CheckpointError(str(source_, ": ", what...));
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
  /// A torch.Size, or a tuple or list of sizes.
  Shape sizes_of(const PickleValue* value, const std::string& what) const {
    if (value != nullptr && value->kind == Kind::kObject && value->global() == "torch.Size" &&
        value->arguments != nullptr)
      value = value->arguments->items.empty() ? value->arguments : value->arguments->items[0];
    if (value == nullptr || (value->kind != Kind::kTuple && value->kind != Kind::kList))
      fail(what, ": found ", value == nullptr ? "nothing" : value->describe(), "; expected a torch.Size");
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
      Key key;
      if (path.kind != Kind::kTuple && path.kind != Kind::kList)
        fail("planner_data of ", quoted_name(name), ": found ", path.describe(),
             "; expected a tuple of keys");
      for (const PickleValue* part : path.items)
        key.push_back(part->kind == Kind::kInt ? str(part->integer) : text_of(*part, "a key"));
      if (key.empty()) fail("planner_data of ", quoted_name(name), ": found no key");
      planner_order_.push_back(name);
      keys_.emplace(name, std::move(key));
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
      Place place;
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

  Place place_of(const std::string& name, const Shape& begin) {
    const auto at = places_.find({name, begin});
    if (at == places_.end())
      fail("storage_data has no file for ", quoted_name(name), " at ", describe_shape(begin));
    return at->second;
  }

  Item read_item(const std::string& name, const PickleValue& value) {
    Item item;
    item.name = name;
    const auto key = keys_.find(name);
    item.key = key == keys_.end() ? guess_key(name) : key->second;
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
      Chunk chunk;
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
  std::map<std::string, Key> keys_;
  std::vector<std::string> planner_order_;
  std::map<std::pair<std::string, Shape>, Place> places_;
};

/// Reads what the places have.
class Folder {
 public:
  Folder(ForeignCheckpoint& checkpoint, fs::path folder)
      : checkpoint_(checkpoint), folder_(std::move(folder)) {}

  ForeignTensor tensor(const Item& item) {
    ForeignTensor out;
    out.shape = item.shape;
    std::optional<DType> type = item.type;
    for (const Chunk& chunk : item.chunks) {
      const TorchFile file = open(item.name, chunk.place);
      const std::optional<TorchTensor> part = file.tensor(file.root());
      if (!part) fail(item, chunk.place, str("found ", file.root().describe(), "; expected a tensor"));
      if (part->shape != chunk.sizes)
        fail(item, chunk.place,
             str("found a tensor of ", describe_shape(part->shape), "; expected ",
                 describe_shape(chunk.sizes), ", as .metadata says"));
      if (type && *type != part->type)
        fail(item, chunk.place,
             str("found a tensor of ", name_of(part->type), "; expected ", name_of(*type)));
      type = part->type;
      const auto runs = runs_of_box(index(chunk.place.file), part->offset, *type, item.shape, chunk.begin,
                                    chunk.sizes, part->strides);
      out.runs.insert(out.runs.end(), runs.begin(), runs.end());
    }
    if (!type)
      throw CheckpointError(str(folder_.string(), ": ", quoted_name(item.name), ": its type is not known"));
    out.type = *type;
    return out;
  }

  /// A value that is no tensor, or a tensor of one element, as JSON; else a line in not_read.
  std::optional<json> value(const Item& item) {
    const std::string what = str(folder_.filename().string(), ": ", item.name);
    if (item.is_tensor && item.chunks.size() != 1) {
      checkpoint_.not_read.push_back(str(what, ": a tensor of ", describe_shape(item.shape)));
      return std::nullopt;
    }
    const TorchFile file = open(item.name, item.is_tensor ? item.chunks[0].place : item.place);
    std::vector<std::string> lines;
    std::optional<json> out = to_json(file.root(), &file, what, lines);
    say_not_read(checkpoint_, what, lines);
    return out;
  }

 private:
  int index(const std::string& file) {
    const auto [at, is_new] = indices_.try_emplace(file, 0);
    if (is_new) at->second = file_index(checkpoint_, folder_ / file);
    return at->second;
  }

  TorchFile open(const std::string& name, const Place& place) const {
    const fs::path path = folder_ / place.file;
    if (!place.transform.empty())
      throw CheckpointError(str(path.string(), ": ", quoted_name(name), " was written through ",
                                quoted_name(place.transform),
                                "; expected plain bytes: save without _extensions"));
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    if (error)
      throw CheckpointError(str(path.string(), " is missing (", error.message(), "); ", kMetadata,
                                " says that it has ", quoted_name(name), ": copy all files of the folder"));
    if (place.offset > static_cast<int64_t>(bytes) ||
        place.bytes > static_cast<int64_t>(bytes) - place.offset)
      throw CheckpointError(str(path.string(), " has ", bytes, " bytes; expected ",
                                place.offset + place.bytes, " at least, for ", quoted_name(name),
                                ": the file was cut off"));
    try {
      return TorchFile(path, place.offset, place.bytes);
    } catch (const CheckpointError& caught) {
      throw CheckpointError(str(caught.what(), " (", quoted_name(name), " at byte ", place.offset, ")"));
    }
  }

  [[noreturn]] void fail(const Item& item, const Place& place, const std::string& what) const {
    throw CheckpointError(str((folder_ / place.file).string(), ": ", quoted_name(item.name), " at byte ",
                              place.offset, ": ", what));
  }

  ForeignCheckpoint& checkpoint_;
  fs::path folder_;
  std::map<std::string, int> indices_;
};

/// The keys before `word`, where it has a dict or list of values, or begins a flattened name.
std::optional<Key> keys_before(const Key& key, std::string_view word, size_t least_after) {
  for (size_t i = 0; i < key.size(); ++i) {
    const bool nested = key[i] == word && i + least_after < key.size();
    const bool flat = i + 1 == key.size() && key[i].size() > word.size() && key[i].starts_with(word) &&
                      key[i][word.size()] == '.';
    if (nested || flat) return Key(key.begin(), key.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return std::nullopt;
}

/// The keys of the optimizer that has the value: those before "param_groups", and before "state" beside that.
/// nullopt: no optimizer has it.
std::optional<Key> optimizer_of(const Key& key, const std::set<Key>& optimizers) {
  if (std::optional<Key> before = keys_before(key, "param_groups", 1)) return before;
  std::optional<Key> before = keys_before(key, "state", 2);
  if (!before) return std::nullopt;
  const bool is_named = !before->empty() && before->back().find("optim") != std::string::npos;
  return is_named || optimizers.contains(*before) ? before : std::nullopt;
}

/// Puts an optimizer's values together.
class OptimizerBuilder {
 public:
  OptimizerBuilder(ForeignCheckpoint& checkpoint, Folder& folder, std::string source)
      : checkpoint_(checkpoint), folder_(folder), source_(std::move(source)) {}

  /// `rest`: the keys after those of the optimizer.
  void add(const Item& item, const Key& rest) {
    if (rest.size() == 1)
      flat_.emplace_back(&item, rest[0]);
    else if (rest[0] == "param_groups")
      add_option(item, rest);
    else
      add_state(item, rest[1], join(std::span(rest).subspan(2), "."));
  }

  /// `names`: those of the model, with which flattened names are split.
  SavedOptimizer finish(const std::set<std::string>& names) {
    std::set<std::string> known = names;
    for (const auto& [item, text] : flat_)
      if (text.starts_with("param_groups."))
        if (const size_t last = text.rfind('.'); last > kGroups)
          known.insert(text.substr(kGroups, last - kGroups));
    for (const auto& [item, text] : flat_) {
      const bool is_option = text.starts_with("param_groups.");
      const std::string rest = text.substr(is_option ? kGroups : kState);
      size_t split = rest.rfind('.');
      for (size_t at = split; at != rest.npos && at > 0; at = rest.rfind('.', at - 1))
        if (known.contains(rest.substr(0, at))) {
          split = at;
          break;
        }
      if (split == rest.npos) {
        checkpoint_.not_read.push_back(str(source_, ": ", item->name));
        continue;
      }
      const std::string parameter = rest.substr(0, split), last = rest.substr(split + 1);
      if (!is_option)
        add_state(*item, parameter, last);
      else if (std::optional<json> value = folder_.value(*item)) {
        const size_t place = state_of(parameter);
        flat_options_[place][last] = std::move(*value);
      }
    }
    SavedOptimizer out;
    out.source = source_;
    make_groups(out);
    out.states = std::move(states_);
    return out;
  }

 private:
  static constexpr size_t kGroups = std::string_view("param_groups.").size();
  static constexpr size_t kState = std::string_view("state.").size();

  size_t state_of(const std::string& key) {
    const auto [at, is_new] = places_.try_emplace(key, states_.size());
    if (is_new) {
      states_.emplace_back();
      if (!whole_number(key)) states_.back().name = key;
    }
    return at->second;
  }

  void add_state(const Item& item, const std::string& parameter, const std::string& name) {
    SavedState* state = &states_[state_of(parameter)];
    if (name == "step") {
      if (const std::optional<json> value = folder_.value(item)) state->steps = count_of(*value);
      if (!state->steps) checkpoint_.not_read.push_back(str(source_, ": ", item.name, ": is no count"));
    } else if (item.is_tensor) {
      state->tensors[name] = folder_.tensor(item);
    } else if (const std::optional<json> value = folder_.value(item); value && !value->is_null()) {
      checkpoint_.not_read.push_back(str(source_, ": ", item.name));
    }
  }

  void add_option(const Item& item, const Key& rest) {
    const std::optional<int64_t> group = whole_number(rest[1]);
    if (!group || *group < 0 || rest.size() != 3) {
      checkpoint_.not_read.push_back(str(source_, ": ", item.name));
      return;
    }
    if (std::optional<json> value = folder_.value(item)) options_[*group][rest[2]] = std::move(*value);
  }

  std::string key_of(const json& parameter) const {
    if (parameter.is_string()) return parameter.get<std::string>();
    if (parameter.is_number_integer()) return str(parameter.get<int64_t>());
    throw CheckpointError(str(source_, ": param_groups: params: found ", parameter.dump(),
                              "; expected names or numbers of parameters"));
  }

  void make_groups(SavedOptimizer& out) {
    std::set<size_t> grouped;
    for (auto& [number, options] : options_) {
      SavedGroup group;
      const auto params = options.find("params");
      if (params == options.end() || !params->is_array())
        throw CheckpointError(str(source_, ": param_groups.", number, " has no list params"));
      const json names = options.value("param_names", json::array());
      for (size_t i = 0; i < params->size(); ++i) {
        const size_t place = state_of(key_of((*params)[i]));
        if (names.is_array() && names.size() == params->size() && names[i].is_string() &&
            states_[place].name.empty())
          states_[place].name = names[i].get<std::string>();
        if (!grouped.insert(place).second)
          throw CheckpointError(
              str(source_, ": param_groups has the parameter ", key_of((*params)[i]), " twice"));
        group.members.push_back(place);
      }
      options.erase("params");
      options.erase("param_names");
      group.options = std::move(options);
      out.groups.push_back(std::move(group));
    }
    // A flattened optimizer has the options by parameter: those with the same ones are a group.
    std::map<std::string, size_t> by_options;
    for (size_t place = 0; place < states_.size(); ++place) {
      if (grouped.contains(place)) continue;
      const auto found = flat_options_.find(place);
      if (found == flat_options_.end() && !options_.empty()) {
        checkpoint_.not_read.push_back(
            str(source_, ": the state of ", quoted_name(states_[place].name), ", which is in no group"));
        continue;
      }
      json options = found == flat_options_.end() ? json::object() : std::move(found->second);
      const auto [at, is_new] = by_options.try_emplace(options.dump(), out.groups.size());
      if (is_new) out.groups.push_back({.options = std::move(options), .members = {}});
      out.groups[at->second].members.push_back(place);
    }
  }

  ForeignCheckpoint& checkpoint_;
  Folder& folder_;
  std::string source_;
  std::vector<SavedState> states_;
  std::map<std::string, size_t> places_;  // of states, by name or number
  std::map<int64_t, json> options_;       // by group
  std::vector<std::pair<const Item*, std::string>> flat_;
  std::map<size_t, json> flat_options_;  // by parameter
};

/// The keys of the dict that has the model. nullopt: the names of tensors are the first keys themselves.
std::optional<Key> model_of(const std::vector<const Item*>& items, const std::string& folder) {
  static constexpr const char* kNames[] = {"model",  "state_dict", "model_state_dict",
                                           "module", "net",        "network"};
  std::map<Key, int> counts, first_keys;
  int flat = 0;
  for (const Item* item : items) {
    if (!item->is_tensor) continue;
    if (item->key.size() == 1) ++flat;
    bool named = false;
    for (size_t i = 0; !named && i + 1 < item->key.size(); ++i)
      if (std::find(std::begin(kNames), std::end(kNames), item->key[i]) != std::end(kNames)) {
        ++counts[Key(item->key.begin(), item->key.begin() + static_cast<std::ptrdiff_t>(i) + 1)];
        named = true;
      }
    if (!named && item->key.size() > 1) ++first_keys[{item->key[0]}];
  }
  if (counts.size() == 1) return counts.begin()->first;
  if (counts.size() > 1) {
    std::vector<std::string> names;
    for (const auto& [key, count] : counts) names.push_back(join(key, "."));
    throw CheckpointError(str(folder, ": has several models: ", join(names, ", "), "; expected one"));
  }
  if (flat == 0 && first_keys.size() == 1) return first_keys.begin()->first;
  return std::nullopt;
}

void set_at(json& root, const Key& key, json value, ForeignCheckpoint& checkpoint, const std::string& name) {
  json* at = &root;
  for (const std::string& part : key) {
    const std::optional<int64_t> number = whole_number(part);
    if (number && (at->is_array() || (at->is_null() && *number == 0))) {
      if (at->is_null()) *at = json::array();
      if (*number < 0 || static_cast<size_t>(*number) > std::min(at->size(), kMaxListItems)) {
        checkpoint.not_read.push_back(name);
        return;
      }
      if (static_cast<size_t>(*number) == at->size()) at->push_back(nullptr);
      at = &(*at)[static_cast<size_t>(*number)];
      continue;
    }
    if (!at->is_null() && !at->is_object()) {
      checkpoint.not_read.push_back(name);
      return;
    }
    at = &(*at)[part];
  }
  *at = std::move(value);
}

DistributedContents read_metadata_folder(ForeignCheckpoint& checkpoint, const fs::path& path) {
  MetadataReader metadata(path);
  const std::vector<Item> items = metadata.items();
  if (checkpoint.version.empty()) checkpoint.version = metadata.version();
  Folder folder(checkpoint, path);
  DistributedContents out;
  out.in_order = metadata.has_planner_data();
  std::map<Key, std::vector<const Item*>> optimizers;
  std::vector<const Item*> others;
  std::set<Key> found;
  for (const Item& item : items)
    if (std::optional<Key> before = keys_before(item.key, "param_groups", 1))
      found.insert(std::move(*before));
  for (const Item& item : items)
    if (const std::optional<Key> optimizer = optimizer_of(item.key, found))
      optimizers[*optimizer].push_back(&item);
    else
      others.push_back(&item);

  const std::optional<Key> model = model_of(others, path.string());
  std::vector<const Item*> extras;
  std::set<std::string> names;
  for (const Item* item : others) {
    const size_t skip = model ? model->size() : 0;
    const bool inside =
        model ? item->key.size() > skip && std::equal(model->begin(), model->end(), item->key.begin())
              : item->key.size() == 1 && item->name.find('.') != item->name.npos;
    if (!inside || !item->is_tensor) {
      extras.push_back(item);
      continue;
    }
    SavedTensor entry;
    entry.name = join(std::span(item->key).subspan(skip), ".");
    entry.tensor = folder.tensor(*item);
    names.insert(entry.name);
    out.model.push_back(std::move(entry));
  }
  for (const auto& [key, members] : optimizers) {
    OptimizerBuilder builder(checkpoint, folder,
                             str(path.filename().string(), key.empty() ? "" : ": ", join(key, ".")));
    for (const Item* item : members)
      builder.add(*item, Key(item->key.begin() + static_cast<std::ptrdiff_t>(key.size()), item->key.end()));
    SavedOptimizer one = builder.finish(names);
    if (out.optimizer)
      append(*out.optimizer, std::move(one));
    else
      out.optimizer = std::move(one);
  }
  for (const Item* item : extras)
    if (std::optional<json> value = folder.value(*item))
      set_at(out.extras, item->key, std::move(*value), checkpoint, item->name);
  return out;
}

bool is_shard_name(const std::string& name) {
  return name.starts_with("shard-") && name.find("-model-") != name.npos && name.ends_with(".safetensors");
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

/// A folder of DCP's writer for the Hugging Face Hub.
DistributedContents read_hub_folder(ForeignCheckpoint& checkpoint, const fs::path& folder) {
  struct Part {
    int file;
    SafetensorsTensor tensor;
    Shape begin;
  };
  std::map<std::string, std::vector<Part>> parts;
  for (const fs::path& path : files_in(folder)) {
    if (!is_shard_name(path.filename().string())) continue;
    const SafetensorsFile file(path);
    const auto info = file.metadata().find(std::string(kShardingInfo));
    if (info == file.metadata().end())
      throw CheckpointError(str(path.string(), ": its header has no ", kShardingInfo,
                                "; expected a file of DCP's HuggingFaceStorageWriter"));
    json places;
    try {
      places = parse_json(info->second);
    } catch (const JsonError& error) {
      throw CheckpointError(str(path.string(), ": ", kShardingInfo, ": ", error.what()));
    }
    const int index = file_index(checkpoint, path);
    for (const SafetensorsTensor& tensor : file.tensors()) {
      const json place = places.value(tensor.name, json::object());
      const json offsets = place.is_object() ? place.value("saved_offsets", json()) : json();
      Shape begin;
      for (const json& one : offsets)
        if (one.is_number_unsigned()) begin.push_back(one.get<int64_t>());
      if (!offsets.is_array() || begin.size() != tensor.shape.size())
        throw CheckpointError(str(path.string(), ": ", kShardingInfo, ": tensor ", quoted_name(tensor.name),
                                  ": found ", offsets.dump(), "; expected saved_offsets, ",
                                  tensor.shape.size(), " numbers"));
      parts[tensor.name].push_back({index, tensor, std::move(begin)});
    }
  }
  DistributedContents out;
  for (const auto& [name, pieces] : parts) {
    SavedTensor entry;
    entry.name = name;
    entry.tensor.type = pieces[0].tensor.type;
    Shape& shape = entry.tensor.shape;
    shape.assign(pieces[0].begin.size(), 0);
    for (const Part& part : pieces) {
      if (part.begin.size() != shape.size() || part.tensor.type != entry.tensor.type)
        throw CheckpointError(str(folder.string(), ": tensor ", quoted_name(name),
                                  " has parts of different types or dimensions"));
      for (size_t d = 0; d < shape.size(); ++d)
        if (__builtin_add_overflow(part.begin[d], part.tensor.shape[d], &shape[d]) == false)
          shape[d] = std::max(shape[d], part.begin[d] + part.tensor.shape[d]);
    }
    out.model.push_back(std::move(entry));
  }
  for (SavedTensor& entry : out.model)
    for (const Part& part : parts.at(entry.name)) {
      Shape strides(part.tensor.shape.size(), 1);
      for (size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * part.tensor.shape[d];
      const auto runs = runs_of_box(part.file, part.tensor.offset, part.tensor.type, entry.tensor.shape,
                                    part.begin, part.tensor.shape, strides);
      entry.tensor.runs.insert(entry.tensor.runs.end(), runs.begin(), runs.end());
    }
  return out;
}

bool has_shard_names(const fs::path& folder) {
  const auto files = files_in(folder);
  return std::any_of(files.begin(), files.end(),
                     [](const fs::path& path) { return is_shard_name(path.filename().string()); });
}

/// Ranks that wrote: files are named __RANK_NUMBER.distcp.
int ranks_of(const fs::path& folder) {
  int64_t ranks = 1;
  for (const fs::path& path : files_in(folder)) {
    const std::string name = path.filename().string();
    if (!name.starts_with("__") || path.extension() != ".distcp") continue;
    const size_t end = name.find('_', 2);
    if (const auto rank = whole_number(std::string_view(name).substr(2, end - 2)); rank && *rank < 1 << 24)
      ranks = std::max(ranks, *rank + 1);
  }
  return static_cast<int>(ranks);
}

/// torchtitan's folder of checkpoints: that of the highest step which is complete.
std::optional<fs::path> newest_step(const fs::path& folder) {
  std::optional<fs::path> newest;
  int64_t most = -1;
  for (const fs::path& path : files_in(folder)) {
    const std::string name = path.filename().string();
    if (!name.starts_with("step-")) continue;
    const std::optional<int64_t> step = whole_number(std::string_view(name).substr(5));
    if (!step || *step <= most || !is_distributed(path)) continue;
    most = *step;
    newest = path;
  }
  return newest;
}

}  // namespace

bool is_distributed(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return false;
  if (fs::exists(folder / kMetadata, error) || has_shard_names(folder)) return true;
  const auto files = files_in(folder);
  return std::any_of(files.begin(), files.end(),
                     [](const fs::path& path) { return path.extension() == ".distcp"; });
}

DistributedContents read_distributed_contents(ForeignCheckpoint& checkpoint, const fs::path& folder) {
  std::error_code error;
  checkpoint.world_size = std::max(checkpoint.world_size, ranks_of(folder));
  if (fs::exists(folder / kMetadata, error)) return read_metadata_folder(checkpoint, folder);
  if (has_shard_names(folder)) return read_hub_folder(checkpoint, folder);
  if (fs::exists(folder / "__0.metadata", error))
    throw CheckpointError(str(folder.string(),
                              ": has a .metadata of each rank (use_collectives=False); "
                              "expected one for all ranks"));
  throw CheckpointError(str((folder / kMetadata).string(),
                            " is missing; expected beside the .distcp files: it is written last, so the save "
                            "was not completed"));
}

void take_extras(ForeignCheckpoint& checkpoint, json extras) {
  const auto take = [&](std::initializer_list<const char*> names) -> std::optional<json> {
    for (const char* name : names)
      if (const auto at = extras.find(name); at != extras.end() && !at->is_null()) {
        json value = std::move(*at);
        extras.erase(at);
        return value;
      }
    return std::nullopt;
  };
  if (!checkpoint.lr_scheduler) {
    checkpoint.lr_scheduler = take({"lr_scheduler", "scheduler", "lr_schedulers", "lr_scheduler_state_dict",
                                    "scheduler_state_dict", "lr_sched"});
    if (checkpoint.lr_scheduler && checkpoint.lr_scheduler->is_array() &&
        checkpoint.lr_scheduler->size() == 1)
      checkpoint.lr_scheduler = json((*checkpoint.lr_scheduler)[0]);
    if (checkpoint.lr_scheduler && checkpoint.lr_scheduler->empty()) checkpoint.lr_scheduler.reset();
  }
  if (!checkpoint.loss_scaler) {
    std::optional<json> scaler = take({"scaler", "grad_scaler", "scaler_state_dict", "grad_scaler_state_dict",
                                       "native_amp_scaling_state", "MixedPrecision", "loss_scaler"});
    if (scaler && scaler->is_object() && scaler->contains("scale")) {
      (*scaler)["cur_scale"] = (*scaler)["scale"];
      scaler->erase("scale");
      checkpoint.loss_scaler = std::move(scaler);
    }
  }
  if (!checkpoint.global_steps) {
    const json* found = nullptr;
    for (const char* name :
         {"global_step", "global_steps", "step", "steps", "iteration", "iter", "iter_num", "num_updates"})
      if (const auto at = extras.find(name); found == nullptr && at != extras.end() && count_of(*at))
        found = &*at;
    if (const auto state = extras.find("train_state");
        found == nullptr && state != extras.end() && state->is_object())
      if (const auto step = state->find("step"); step != state->end()) found = &*step;
    if (found != nullptr) checkpoint.global_steps = count_of(*found);
  }
  for (auto& [name, value] : extras.items()) checkpoint.client_state[name] = std::move(value);
}

std::optional<ForeignCheckpoint> read_distributed(const fs::path& path) {
  fs::path folder = path;
  if (!is_distributed(folder)) {
    const std::optional<fs::path> step = newest_step(folder);
    if (!step) return std::nullopt;
    folder = *step;
  }
  ForeignCheckpoint checkpoint;
  checkpoint.format = "torch.distributed.checkpoint";
  checkpoint.stage = -1;
  checkpoint.path = folder;
  DistributedContents contents = read_distributed_contents(checkpoint, folder);
  if (contents.model.empty())
    throw CheckpointError(
        str(folder.string(), ": has no model's tensors",
            contents.optimizer ? "; it has an optimizer's state: give the folder above, or that of the model"
                               : ""));
  assemble(checkpoint, std::move(contents.model), std::move(contents.optimizer),
           {.is_entries = contents.in_order, .names = {}});
  take_extras(checkpoint, std::move(contents.extras));
  return checkpoint;
}

}  // namespace tessera::checkpoint
