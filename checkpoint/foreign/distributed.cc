// How a folder's names are those of a model, an optimizer and other things; the folder itself:
// [Note: folders of torch.distributed.checkpoint] in distributed_metadata.cc.
#include "checkpoint/foreign/distributed.h"

#include <algorithm>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/distributed_metadata.h"
#include "checkpoint/foreign/model_files.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/value_tag.h"
#include "core/files/disk.h"
#include "core/parse_number.h"
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
constexpr size_t kMaxListItems = 1 << 16;

/// Reads what the places have.
class Folder {
 public:
  Folder(ForeignCheckpoint& checkpoint, fs::path folder)
      : checkpoint_(checkpoint), folder_(std::move(folder)) {}

  ForeignTensor tensor(const DistributedItem& item) {
    ForeignTensor out;
    out.shape = item.shape;
    std::optional<DType> type = item.type;
    for (const DistributedChunk& chunk : item.chunks) {
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
      const auto runs = runs_of(item, chunk, *part);
      out.runs.insert(out.runs.end(), runs.begin(), runs.end());
    }
    if (!type) throw CheckpointError(folder_, ": ", quoted_name(item.name), ": its type is not known");
    out.type = *type;
    return out;
  }

  /// A value that is no tensor, or a tensor of one element, as JSON, by to_json or to_tagged_json (`tags`);
  /// else a line in not_read.
  std::optional<json> value(const DistributedItem& item, bool tags = false) {
    const std::string what = str(folder_.filename(), ": ", item.name);
    if (item.is_tensor && item.chunks.size() != 1) {
      checkpoint_.not_read.push_back(str(what, ": a tensor of ", describe_shape(item.shape)));
      return std::nullopt;
    }
    const TorchFile file = open(item.name, item.is_tensor ? item.chunks[0].place : item.place);
    std::vector<std::string> lines;
    std::optional<json> out =
        tags ? to_tagged_json(file.root(), &file, what, lines) : to_json(file.root(), &file, what, lines);
    say_not_read(checkpoint_, what, lines);
    return out;
  }

 private:
  int index(const std::string& file) {
    const auto [at, is_new] = indices_.try_emplace(file, 0);
    if (is_new) at->second = file_index(checkpoint_, folder_ / file);
    return at->second;
  }

  std::vector<Run> runs_of(const DistributedItem& item, const DistributedChunk& chunk,
                           const TorchTensor& part) {
    try {
      return runs_of_box(index(chunk.place.file), part.offset, part.type, item.shape, chunk.begin,
                         chunk.sizes, part.strides);
    } catch (const CheckpointError& caught) {
      fail(item, chunk.place, caught.what());
    }
  }

  TorchFile open(const std::string& name, const DistributedPlace& place) {
    const fs::path path = folder_ / place.file;
    if (!place.transform.empty())
      throw CheckpointError(path, ": ", quoted_name(name), " was written through ",
                            quoted_name(place.transform), "; expected plain bytes: save without _extensions");
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    if (error)
      throw CheckpointError(path, " is missing (", error.message(), "); ", kMetadata, " says that it has ",
                            quoted_name(name), ": copy all files of the folder");
    if (place.offset > static_cast<int64_t>(bytes) ||
        place.bytes > static_cast<int64_t>(bytes) - place.offset)
      throw CheckpointError(path, " has ", bytes, " bytes; expected ", place.offset + place.bytes,
                            " at least, for ", quoted_name(name), ": the file was cut off");
    checkpoint_.archives.push_back({path, place.offset, place.bytes});
    try {
      return TorchFile(path, place.offset, place.bytes);
    } catch (const CheckpointError& caught) {
      throw CheckpointError(caught.what(), " (", quoted_name(name), " at byte ", place.offset, ")");
    }
  }

  [[noreturn]] void fail(const DistributedItem& item, const DistributedPlace& place,
                         const std::string& what) const {
    throw CheckpointError(folder_ / place.file, ": ", quoted_name(item.name), " at byte ", place.offset, ": ",
                          what);
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
  for (size_t begin = 0; begin < key.size(); ++begin) {  // a dict of all may be called "state", too
    const std::optional<Key> rest =
        keys_before(Key(key.begin() + static_cast<std::ptrdiff_t>(begin), key.end()), "state", 2);
    if (!rest) break;
    Key before(key.begin(), key.begin() + static_cast<std::ptrdiff_t>(begin + rest->size()));
    const bool is_named = !before.empty() && before.back().find("optim") != std::string::npos;
    if (is_named || optimizers.contains(before)) return before;
    begin += rest->size();
  }
  return std::nullopt;
}

/// Puts an optimizer's values together.
class OptimizerBuilder {
 public:
  static constexpr std::string_view kState = "state.";  ///< of flattened names

  OptimizerBuilder(ForeignCheckpoint& checkpoint, Folder& folder, std::string source)
      : checkpoint_(checkpoint), folder_(folder), source_(std::move(source)) {}

  /// `rest`: the keys after those of the optimizer.
  void add(const DistributedItem& item, const Key& rest) {
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
      if (text.starts_with(kGroups))
        if (const size_t last = text.rfind('.'); last > kGroups.size())
          known.insert(text.substr(kGroups.size(), last - kGroups.size()));
    for (const auto& [item, text] : flat_) {
      const bool is_option = text.starts_with(kGroups);
      const std::string rest = text.substr((is_option ? kGroups : kState).size());
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
      else if (std::optional<json> value = option(*item, last))
        flat_options_[state_of(parameter)][last] = std::move(*value);
    }
    SavedOptimizer out;
    out.source = source_;
    make_groups(out);
    out.states = std::move(states_);
    return out;
  }

 private:
  static constexpr std::string_view kGroups = "param_groups.";

  size_t state_of(const std::string& key) {
    const auto [at, is_new] = places_.try_emplace(key, states_.size());
    if (is_new) {
      states_.emplace_back();
      if (!parse_number<int64_t>(key)) states_.back().name = key;
    }
    return at->second;
  }

  void add_state(const DistributedItem& item, const std::string& parameter, std::string name) {
    SavedState* state = &states_[state_of(parameter)];
    if (name.starts_with(str(kStatesOfBitsandbytes, "."))) {
      state->of_bitsandbytes = true;
      name.erase(0, kStatesOfBitsandbytes.size() + 1);
    }
    if (state->tensors.contains(name) || state->values.contains(name))
      throw CheckpointError(checkpoint_.path, ": ", source_, ": the state ", quoted_name(name), " of ",
                            quoted_name(parameter), " is there twice; expected it once");
    if (name == "step") {
      if (const std::optional<json> value = folder_.value(item)) state->steps = count_of(*value);
      if (item.is_tensor)
        state->step_tensor = folder_.tensor(item);
      else if (state->steps)
        state->values[name] = *state->steps;
      if (!state->steps) note_unread(*state, name, item);
    } else if (name.find('.') != name.npos) {  // of a list or dict
      note_unread(*state, name.substr(0, name.find('.')), item);
    } else if (item.is_tensor) {
      state->tensors[name] = folder_.tensor(item);
    } else if (const std::optional<json> value = folder_.value(item); value && value->is_primitive()) {
      state->values[name] = *value;
    } else {
      note_unread(*state, name, item);
    }
  }

  void note_unread(SavedState& state, const std::string& name, const DistributedItem& item) {
    if (state.unread.empty()) state.unread = str("the state ", quoted_name(name), " is no tensor or number");
    checkpoint_.lose(LostValue::Kind::kState, name, str(source_, ": ", item.name));
  }

  std::optional<json> option(const DistributedItem& item, const std::string& name) {
    const size_t before = checkpoint_.not_read.size();
    std::optional<json> value = folder_.value(item);
    checkpoint_.lose_since(before, LostValue::Kind::kOption, name);
    return value;
  }

  void add_option(const DistributedItem& item, const Key& rest) {
    const std::optional<int64_t> group = parse_count(rest[1]);
    if (!group || rest.size() != 3) {
      checkpoint_.lose(LostValue::Kind::kOption, rest[rest.size() > 2 ? 2 : 1],
                       str(source_, ": ", item.name));
      return;
    }
    if (std::optional<json> value = option(item, rest[2])) options_[*group][rest[2]] = std::move(*value);
  }

  std::string key_of(const json& parameter) const {
    if (parameter.is_string()) return parameter.get<std::string>();
    if (parameter.is_number_integer()) return str(parameter.get<int64_t>());
    throw CheckpointError(source_, ": param_groups: params: found ", parameter.dump(),
                          "; expected names or numbers of parameters");
  }

  void make_groups(SavedOptimizer& out) {
    std::set<size_t> grouped;
    for (auto& [number, options] : options_) {
      SavedGroup group;
      const auto params = options.find("params");
      if (params == options.end() || !params->is_array())
        throw CheckpointError(source_, ": param_groups.", number, " has no list params");
      const json names = options.value("param_names", json::array());
      for (size_t i = 0; i < params->size(); ++i) {
        const size_t place = state_of(key_of((*params)[i]));
        if (names.is_array() && names.size() == params->size() && names[i].is_string() &&
            states_[place].name.empty())
          states_[place].name = names[i].get<std::string>();
        if (!grouped.insert(place).second)
          throw CheckpointError(source_, ": param_groups has the parameter ", key_of((*params)[i]), " twice");
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
        checkpoint_.lose(
            LostValue::Kind::kState, "",
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
  std::vector<std::pair<const DistributedItem*, std::string>> flat_;
  std::map<size_t, json> flat_options_;  // by parameter
};

/// The keys of the dict that has the model. nullopt: the names of tensors are the first keys themselves.
std::optional<Key> model_of(const std::vector<const DistributedItem*>& items, const std::string& folder) {
  static constexpr const char* kNames[] = {"model",  "state_dict", "model_state_dict",
                                           "module", "net",        "network"};
  std::map<Key, int> counts, first_keys;
  int flat = 0;
  for (const DistributedItem* item : items) {
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
    throw CheckpointError(folder, ": has several models: ", join(names, ", "), "; expected one");
  }
  if (flat == 0 && first_keys.size() == 1) return first_keys.begin()->first;
  return std::nullopt;
}

/// Puts a value where the item was in the state dict: lists and dicts of `root`.
void set_at(json& root, const DistributedItem& item, json value, ForeignCheckpoint& checkpoint) {
  json* at = &root;
  for (size_t i = 0; i < item.key.size(); ++i) {
    const std::string& part = item.key[i];
    const bool is_index = i < item.is_index.size() && item.is_index[i];
    const int64_t number = is_index ? parse_count(part).value_or(-1) : 0;
    if (at->is_null()) *at = is_index ? json::array() : json::object();
    if (is_index != at->is_array() || (!is_index && !at->is_object()) || part == kValueTag || number < 0 ||
        (is_index && static_cast<size_t>(number) > std::min(at->size(), kMaxListItems))) {
      checkpoint.not_read.push_back(item.name);
      return;
    }
    if (is_index && static_cast<size_t>(number) == at->size()) at->push_back(nullptr);
    at = is_index ? &(*at)[static_cast<size_t>(number)] : &(*at)[part];
  }
  *at = std::move(value);
}

/// The names of the parameters of which optimizers have states: of flattened ones, `state.NAME.exp_avg`, and
/// of others, whose keys are after `state`.
std::set<std::string> trained_names(const std::map<Key, std::vector<const DistributedItem*>>& optimizers) {
  std::set<std::string> trained;
  for (const auto& [key, members] : optimizers)
    for (const DistributedItem* item : members) {
      const std::string& last = item->key.back();
      const size_t begin = OptimizerBuilder::kState.size(), end = last.rfind('.');
      if (item->key.size() > key.size() + 2 && item->key[key.size()] == "state")
        trained.insert(item->key[key.size() + 1]);
      else if (last.starts_with(OptimizerBuilder::kState) && end > begin && end != last.npos)
        trained.insert(last.substr(begin, end - begin));
    }
  return trained;
}

DistributedContents read_metadata_folder(ForeignCheckpoint& checkpoint, const fs::path& path) {
  const DistributedMetadata metadata = read_distributed_metadata(path / kMetadata);
  const std::vector<DistributedItem>& items = metadata.items;
  if (checkpoint.version.empty()) checkpoint.version = metadata.version;
  Folder folder(checkpoint, path);
  DistributedContents out;
  out.in_order = metadata.in_order;
  std::map<Key, std::vector<const DistributedItem*>> optimizers;
  std::vector<const DistributedItem*> others;
  std::set<Key> found;
  for (const DistributedItem& item : items)
    if (std::optional<Key> before = keys_before(item.key, "param_groups", 1))
      found.insert(std::move(*before));
  for (const DistributedItem& item : items)
    if (const std::optional<Key> optimizer = optimizer_of(item.key, found))
      optimizers[*optimizer].push_back(&item);
    else
      others.push_back(&item);

  const std::optional<Key> model = model_of(others, path.string());
  if (model && !model->empty()) out.beside_model.assign(model->begin(), model->end() - 1);
  // Entries of the model at the top have a period in their names, or are the optimizer's parameters; where
  // all are tensors, all are the model's but counts; else those that have dimensions.
  const std::set<std::string> trained = trained_names(optimizers);
  const bool is_state_dict =
      std::ranges::all_of(others, [](const auto* item) { return item->is_tensor && item->key.size() == 1; });
  const bool has_periods = std::ranges::any_of(others, [](const auto* item) {
    return item->is_tensor && item->key.size() == 1 && item->name.find('.') != item->name.npos;
  });
  const auto is_of_model = [&](const DistributedItem* item) {
    if (item->name.find('.') != item->name.npos || trained.contains(item->name)) return true;
    if (is_state_dict)
      return !(kind_of(item->name) == LostValue::Kind::kCount && item->type && !is_floating(*item->type));
    return has_periods && !item->shape.empty();
  };
  std::vector<const DistributedItem*> extras;
  std::set<std::string> names;
  for (const DistributedItem* item : others) {
    const size_t skip = model ? model->size() : 0;
    const bool inside =
        model ? item->key.size() > skip && std::equal(model->begin(), model->end(), item->key.begin())
              : item->key.size() == 1 && item->is_tensor && is_of_model(item);
    if (!inside || !item->is_tensor) {
      extras.push_back(item);
      if (!model && has_periods && item->is_tensor && item->key.size() == 1 &&
          kind_of(item->name) != LostValue::Kind::kCount)
        checkpoint.not_read.push_back(
            str(path.filename(), ": ", item->name,
                ": a number beside the model's tensors, taken for one of the client "
                "state: if it is a parameter, save {\"model\": …}"));
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
                             str(path.filename(), key.empty() ? "" : ": ", join(key, ".")));
    for (const DistributedItem* item : members)
      builder.add(*item, Key(item->key.begin() + static_cast<std::ptrdiff_t>(key.size()), item->key.end()));
    append(out.optimizer, builder.finish(names));
  }
  for (const DistributedItem* item : extras) {
    const size_t before = checkpoint.not_read.size();
    const bool is_beside = item->key.size() > out.beside_model.size() &&
                           std::equal(out.beside_model.begin(), out.beside_model.end(), item->key.begin());
    const std::string& name = item->key[is_beside ? out.beside_model.size() : 0];
    std::optional<json> value = folder.value(*item, /*tags=*/true);
    if (value || is_scaler_key(name))
      set_at(out.extras, *item, value ? std::move(*value) : json(kUnread), checkpoint);
    if (const auto kind = kind_of(name)) checkpoint.lose_since(before, *kind, name);
  }
  return out;
}

/// Whether the folder has the shards of DCP's writer for the Hugging Face Hub, which has no .metadata
/// ("shard-00003-model-00001-of-00001.safetensors"), and not the model that was made of them.
bool has_hub_shards(const fs::path& folder) {
  return weights_in(folder).empty() && std::ranges::any_of(paths_in(folder), [](const fs::path& path) {
           const std::string name = path.filename().string();
           return name.starts_with("shard-") && name.find("-model-") != name.npos &&
                  name.ends_with(".safetensors");
         });
}

/// Ranks that wrote: files are named __RANK_NUMBER.distcp.
int ranks_of(const fs::path& folder) {
  int64_t ranks = 1;
  for (const fs::path& path : paths_in(folder)) {
    const std::string name = path.filename().string();
    if (!name.starts_with("__") || path.extension() != ".distcp") continue;
    const size_t end = name.find('_', 2);
    if (const auto rank = parse_number<int64_t>(std::string_view(name).substr(2, end - 2));
        rank && *rank < 1 << 24)
      ranks = std::max(ranks, *rank + 1);
  }
  return static_cast<int>(ranks);
}

/// torchtitan's folder of checkpoints: that of the highest step which is complete.
std::optional<fs::path> newest_step(const fs::path& folder) {
  std::optional<fs::path> newest;
  int64_t most = -1;
  for (const fs::path& path : paths_in(folder)) {
    const std::string name = path.filename().string();
    if (!name.starts_with("step-")) continue;
    const std::optional<int64_t> step = parse_number<int64_t>(std::string_view(name).substr(5));
    if (!step || *step <= most || !is_distributed(path)) continue;
    most = *step;
    newest = path;
  }
  return newest;
}

ForeignCheckpoint read_distributed(const fs::path& folder, const ParameterOrder& given) {
  ForeignCheckpoint checkpoint;
  checkpoint.format = "torch.distributed.checkpoint";
  checkpoint.path = folder;
  DistributedContents contents = read_distributed_contents(checkpoint, folder);
  if (contents.model.empty())
    throw CheckpointError(folder, ": has no model's tensors",
                          contents.optimizer
                              ? "; it has an optimizer's state: give the folder above, or that of the model"
                              : "");
  assemble(checkpoint, std::move(contents.model), std::move(contents.optimizer), {given, contents.in_order});
  take_extras(checkpoint, std::move(contents.extras), contents.beside_model);
  return checkpoint;
}

}  // namespace

bool is_distributed(const fs::path& folder) {
  if (!is_folder(folder)) return false;
  if (is_there(folder / kMetadata) || has_hub_shards(folder)) return true;
  const auto files = paths_in(folder);
  return std::any_of(files.begin(), files.end(),
                     [](const fs::path& path) { return path.extension() == ".distcp"; });
}

DistributedContents read_distributed_contents(ForeignCheckpoint& checkpoint, const fs::path& folder) {
  checkpoint.world_size = std::max(checkpoint.world_size, ranks_of(folder));
  if (is_there(folder / kMetadata)) return read_metadata_folder(checkpoint, folder);
  if (has_hub_shards(folder))
    throw CheckpointError(folder,
                          ": has shards of DCP's HuggingFaceStorageWriter, which are not read; expected "
                          "the model that torch's consolidate_safetensors_files() makes of them, or what "
                          "DCP's FileSystemWriter writes");
  if (is_there(folder / "__0.metadata"))
    throw CheckpointError(folder,
                          ": has a .metadata of each rank (use_collectives=False); "
                          "expected one for all ranks");
  throw CheckpointError(folder / kMetadata,
                        " is missing; expected beside the .distcp files: it is written last, so the save "
                        "was not completed");
}

static std::optional<int64_t> count_in(const json& dict, const char* name) {
  const auto at = dict.find(name);
  return at == dict.end() ? std::nullopt : count_of(*at);
}

/// Whether a dict is a loss scaler's state, as far as it was read, and not that of another thing of the name.
static bool is_scaler(const json& value) {
  static constexpr const char* kOwn[] = {"scale",          "_growth_tracker", "growth_factor",
                                         "backoff_factor", "growth_interval", "cur_scale",
                                         "cur_iter"};
  return !value.is_object() || value.empty() ||
         std::ranges::any_of(kOwn, [&](const char* key) { return value.contains(key); });
}

/// Moves what has a place in the checkpoint out of a dict.
static void take_known(ForeignCheckpoint& checkpoint, json& extras) {
  const auto take = [&](std::span<const char* const> names, const auto& fits) -> std::optional<json> {
    for (const char* name : names)
      if (const auto at = extras.find(name); at != extras.end() && !at->is_null() && fits(*at)) {
        json value = std::move(*at);
        extras.erase(at);
        return value;
      }
    return std::nullopt;
  };
  if (!checkpoint.lr_scheduler) {
    checkpoint.lr_scheduler = take(kSchedulerKeys, [](const json&) { return true; });
    if (checkpoint.lr_scheduler && checkpoint.lr_scheduler->is_array() &&
        checkpoint.lr_scheduler->size() == 1)
      checkpoint.lr_scheduler = json((*checkpoint.lr_scheduler)[0]);
    if (checkpoint.lr_scheduler && checkpoint.lr_scheduler->empty()) checkpoint.lr_scheduler.reset();
  }
  if (!checkpoint.loss_scaler) {
    if (std::optional<json> scaler = take(kScalerKeys, is_scaler))
      take_loss_scaler(checkpoint, std::move(*scaler), "the loss scaler");
  }
  if (const auto samples = count_in(extras, "global_samples")) checkpoint.global_samples = samples;
}

/// Takes the count of updates from a dict and those in it: each has it by the first of the names, and of
/// several dicts the largest counts: others are of an epoch, or of the best model so far. A dict of counts
/// has an epoch, or is torchtitan's train_state: one of options has others.
static void take_count(ForeignCheckpoint& checkpoint, std::span<const char* const> names, const json& dict,
                       bool is_counting = true, int depth = 0) {
  std::optional<int64_t> found;
  for (const char* name : names)
    if (!found) found = count_in(dict, name);
  if (is_counting && found && *found > checkpoint.global_steps.value_or(-1)) {
    checkpoint.global_steps = found;
    checkpoint.may_count_in_epoch = count_in(dict, "epoch").value_or(0) > 0;
  }
  constexpr int kMaxDepth = 4;
  for (const auto& [name, value] : dict.items())
    if (value.is_object() && depth < kMaxDepth)
      take_count(checkpoint, names, value, name == "train_state" || count_in(value, "epoch"), depth + 1);
}

void take_extras(ForeignCheckpoint& checkpoint, json extras, const std::vector<std::string>& beside_model) {
  json* inner = beside_model.empty() ? nullptr : &extras;
  for (const std::string& key : beside_model)
    inner = inner != nullptr && inner->is_object() && inner->contains(key) ? &(*inner)[key] : nullptr;
  const bool has_inner = inner != nullptr && inner->is_object();
  if (has_inner) take_known(checkpoint, *inner);
  take_known(checkpoint, extras);
  using Names = std::span<const char* const>;
  for (const Names names : {Names(kCounts), Names(kCountsOfSome)}) {
    if (checkpoint.global_steps) break;
    if (has_inner) take_count(checkpoint, names, *inner);
    take_count(checkpoint, names, extras);
    if (names.data() == kCounts) checkpoint.may_count_in_epoch = false;
  }
  for (auto& [name, value] : extras.items()) checkpoint.client_state[name] = std::move(value);
}

std::optional<IdentifiedCheckpoint> identify_distributed(const fs::path& path) {
  const std::optional<fs::path> folder = is_distributed(path) ? path : newest_step(path);
  if (!folder) return std::nullopt;
  return IdentifiedCheckpoint{*folder, std::bind_front(read_distributed, *folder)};
}

}  // namespace tessera::checkpoint
