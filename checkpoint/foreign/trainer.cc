// [Note: what trainers write]
// A file of torch.save: Lightning's {"state_dict", "optimizer_states": […], "lr_schedulers": […],
// "global_step", "epoch", "pytorch-lightning_version", …}, and what programs without a trainer write:
// {"model": …, "optimizer": …, "epoch": …}, under one of several usual keys.
//
// A folder:
//
//   Accelerate's save_state   the weights as of a Hugging Face model, optimizer.bin, scheduler.bin,
//   scaler.pt,
//                             random_states_RANK.pkl, custom_checkpoint_N.pkl
//   Hugging Face Trainer      checkpoint-STEP: the weights, optimizer.pt, scheduler.pt, scaler.pt,
//                             rng_state.pth, trainer_state.json
//   with FSDP                 pytorch_model_fsdp_0/ and optimizer_0/ (DCP), or pytorch_model_fsdp.bin and
//                             optimizer.bin with names in place of numbers
//   with DeepSpeed            its own folder and `latest`
//   Lightning with FSDP       DCP's files, and meta.pt with what is no tensor
#include <algorithm>
#include <string_view>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/distributed.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/foreign/model_files.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/value_tag.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/json/json_reader.h"
#include "core/parse_number.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Kind = PickleValue::Kind;

constexpr int64_t kMaxJsonBytes = int64_t{1} << 28;
constexpr const char* kTrainerState = "trainer_state.json";
constexpr const char* kFsdpFolder = "pytorch_model_fsdp_0";
constexpr const char* kFsdpFile = "pytorch_model_fsdp.bin";
constexpr const char* kLightningVersion = "pytorch-lightning_version";
constexpr const char* kModelKeys[] = {
    "state_dict",     "model_state_dict", "model",  "model_state", "net",
    "net_state_dict", "network",          "module", "weights",     "params"};

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> out;
  for (const fs::path& path : paths_in(folder)) out.push_back(path.filename().string());
  return out;
}

/// The number between `before` and `after`; nullopt for other names.
std::optional<int64_t> number_in(std::string_view name, std::string_view before, std::string_view after) {
  if (!name.starts_with(before) || !name.ends_with(after) || name.size() <= before.size() + after.size())
    return std::nullopt;
  return parse_count(name.substr(before.size(), name.size() - before.size() - after.size()));
}

/// Files of ranks 0 to N - 1: N. 0: there is none.
int ranks_of(const fs::path& folder, std::string_view before, std::string_view after) {
  int64_t ranks = 0;
  for (const std::string& name : names_in(folder))
    if (const auto rank = number_in(name, before, after); rank && *rank < 1 << 24)
      ranks = std::max(ranks, *rank + 1);
  return static_cast<int>(ranks);
}

/// Python writes NaN and Infinity into JSON, as numbers of a log. They become null.
std::string without_nan(std::string_view text) {
  std::string out;
  bool in_string = false;
  while (!text.empty()) {
    size_t taken = text[0] == '\\' && in_string ? std::min<size_t>(2, text.size()) : 1;
    if (text[0] == '"') in_string = !in_string;
    std::string_view written = text.substr(0, taken);
    for (const std::string_view word : {"-Infinity", "Infinity", "NaN"})
      if (!in_string && text.starts_with(word)) {
        taken = word.size();
        written = "null";
      }
    out += written;
    text.remove_prefix(taken);
  }
  return out;
}

json read_json(const fs::path& path) {
  try {
    return parse_json(without_nan(InputFile(path).read_all(kMaxJsonBytes)));
  } catch (const JsonError& error) {
    throw CheckpointError(path, ": is no JSON at byte ", error.offset() + 1, ": ", error.what());
  }
}

/// The value of a whole file as JSON, with lines for what JSON does not have.
std::optional<json> read_value(ForeignCheckpoint& checkpoint, const fs::path& path) {
  const TorchFile file(path);
  checkpoint.archives.push_back({.path = path});
  std::vector<std::string> lines;
  std::optional<json> value = to_tagged_json(file.root(), &file, path.filename().string(), lines);
  say_not_read(checkpoint, path.filename().string(), lines);
  return value;
}

/// Optimizers of a value: one, or a list or dict of them. Empty: it is something else.
std::vector<const PickleValue*> optimizers_in(const PickleValue& value) {
  if (is_optimizer_state(value)) return {&value};
  std::vector<const PickleValue*> out;
  const bool is_dict = value.kind == Kind::kDict;
  if (!is_dict && value.kind != Kind::kList && value.kind != Kind::kTuple) return {};
  for (size_t i = is_dict ? 1 : 0; i < value.items.size(); i += is_dict ? 2 : 1) {
    if (!is_optimizer_state(*value.items[i])) return {};
    out.push_back(value.items[i]);
  }
  return out;
}

/// What a dict has beside the model. `model`: its value, or null.
void read_members(ForeignCheckpoint& checkpoint, const TorchFile& file, const PickleValue* model,
                  std::optional<SavedOptimizer>& optimizer, json& extras) {
  const PickleValue& root = file.root();
  const std::string source = file.path().filename().string();
  for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
    const PickleValue &key = *root.items[i], &value = *root.items[i + 1];
    if (&value == model) continue;
    if (key.kind != Kind::kString || key.text == kValueTag) {
      checkpoint.not_read.push_back(str(source, ": the key ", key.describe()));
      continue;
    }
    const std::string name(key.text);
    const std::string what = str(source, ": ", name);
    if (const auto found = optimizers_in(value); !found.empty()) {
      for (const PickleValue* one : found)
        append(optimizer, read_optimizer_state(checkpoint, file, *one, what));
    } else if (is_state_dict(file, value)) {
      checkpoint.not_read.push_back(str(what, ": another state dict: ", value.describe()));
    } else {
      std::vector<std::string> lines;
      std::optional<json> read = to_tagged_json(value, &file, what, lines);
      if (read || is_scaler_key(name)) extras[name] = read ? std::move(*read) : json(kUnread);
      const size_t before = checkpoint.not_read.size();
      say_not_read(checkpoint, what, lines);
      if (const auto kind = kind_of(name)) checkpoint.lose_since(before, *kind, name);
    }
  }
}

/// Whether the dict `all` has a state dict of other names than this one.
bool has_other_part(const TorchFile& file, const PickleValue& all, const PickleValue& state_dict) {
  for (size_t i = 1; i < all.items.size(); i += 2) {
    const PickleValue& other = *all.items[i];
    if (other.items.empty() || !is_state_dict(file, other)) continue;
    for (size_t name = 0; name + 1 < other.items.size(); name += 2)
      if (state_dict.find(other.items[name]->text) == nullptr) return true;
  }
  return false;
}

/// Whether the model of `order` has the names of a state dict with `key.` before them, and not without: a
/// part of the model is called so.
bool is_part(const char* key, const PickleValue& state_dict, const ParameterOrder& order) {
  const auto has = [&](const std::string& name) {
    const auto is_in = [&](const std::vector<std::string>& names) {
      return std::ranges::find(names, name) != names.end();
    };
    return is_in(order.names) || is_in(order.frozen) || is_in(order.buffers) || order.aliases.contains(name);
  };
  for (size_t i = 0; i + 1 < state_dict.items.size(); i += 2) {
    const std::string name(state_dict.items[i]->text);
    if (has(name)) return false;
    if (has(str(key, ".", name))) return true;
  }
  return false;
}

/// The state dict among a dict's members. A dict of nothing but tensors and of dicts of them is one itself
/// where it has none of these keys, or the model has parts of that name; where the model is not known, there
/// are other parts.
const PickleValue* model_in(const TorchFile& file, const ParameterOrder& order) {
  for (const char* key : kModelKeys)
    if (const PickleValue* value = file.root().find(key); value != nullptr && is_state_dict(file, *value))
      return is_state_dict(file, file.root()) &&
                     (order.names.empty() ? has_other_part(file, file.root(), *value)
                                          : is_part(key, *value, order))
                 ? nullptr
                 : value;
  return nullptr;
}

}  // namespace

std::optional<ForeignCheckpoint> read_trainer_file(const fs::path& path, const ParameterOrder& given) {
  if (!TorchFile::recognizes(path)) return std::nullopt;
  const TorchFile file(path);
  const PickleValue& root = file.root();
  if (root.kind != Kind::kDict || root.find("ds_version") != nullptr) return std::nullopt;
  const PickleValue* model = model_in(file, given);
  if (model == nullptr && is_state_dict(file, root)) return std::nullopt;
  const PickleValue* lightning = root.find(kLightningVersion);
  if (model == nullptr) {
    if (lightning != nullptr) throw CheckpointError(path, ": Lightning's checkpoint has no state_dict");
    for (const char* key : kModelKeys)
      if (const PickleValue* value = root.find(key); value != nullptr && value->kind == Kind::kObject)
        throw CheckpointError(path, ": ", key, " is ", value->describe(),
                              "; expected its state_dict(): a module itself is code");
    return std::nullopt;
  }
  ForeignCheckpoint checkpoint;
  checkpoint.format = lightning != nullptr ? "Lightning" : "torch.save";
  if (lightning != nullptr && lightning->kind == Kind::kString) checkpoint.version = lightning->text;
  checkpoint.path = path;
  std::vector<SavedTensor> entries = read_state_dict(checkpoint, file, *model, path.filename().string());
  std::optional<SavedOptimizer> optimizer;
  json extras = json::object();
  read_members(checkpoint, file, model, optimizer, extras);
  assemble(checkpoint, std::move(entries), std::move(optimizer), {given, /*is_entries=*/true});
  take_extras(checkpoint, std::move(extras));
  return checkpoint;
}

namespace {

/// Lightning's folder: DCP's files and meta.pt.
ForeignCheckpoint read_lightning_folder(const fs::path& path, const ParameterOrder& given) {
  ForeignCheckpoint checkpoint;
  checkpoint.format = "Lightning";
  checkpoint.path = path;
  const TorchFile meta(path / "meta.pt");
  if (meta.root().kind != Kind::kDict)
    throw CheckpointError(path / "meta.pt", ": found ", meta.root().describe(), "; expected a dict");
  if (const PickleValue* version = meta.root().find(kLightningVersion);
      version != nullptr && version->kind == Kind::kString)
    checkpoint.version = version->text;
  DistributedContents contents = read_distributed_contents(checkpoint, path);
  std::optional<SavedOptimizer> more;
  read_members(checkpoint, meta, nullptr, more, contents.extras);
  if (!contents.optimizer) contents.optimizer = std::move(more);
  assemble(checkpoint, std::move(contents.model), std::move(contents.optimizer), {given, contents.in_order});
  take_extras(checkpoint, std::move(contents.extras));
  return checkpoint;
}

/// Reads a folder of Accelerate or of the Hugging Face Trainer.
class TrainerFolder {
 public:
  TrainerFolder(fs::path path, const ParameterOrder& given) : path_(std::move(path)), order_{given} {}

  /// Whether it trained with Tessera, whose checkpoint is there.
  bool has_tessera() const {
    for (const std::string& name : names_in(path_))
      if (name.starts_with("global_step") && has(name + "/manifest.json")) return true;
    return false;
  }

  /// Whether the names of the files are those of such a folder. Tessera's checkpoint is no foreign one.
  bool is_one() const {
    if (has_tessera()) return false;
    const bool weights = !weights_in(path_).empty() || has(kFsdpFile) || has(kFsdpFolder);
    return has(kTrainerState) || has(kFsdpFile) || has(kFsdpFolder) ||
           ranks_of(path_, "random_states_", ".pkl") > 0 ||
           ((has("optimizer.bin") || has("optimizer.pt")) && weights) || is_local();
  }

  ForeignCheckpoint read() {
    order_.is_hugging_face = has(kTrainerState);
    const char* name = order_.is_hugging_face ? "Hugging Face Trainer" : "Accelerate";
    if (is_local())
      throw CheckpointError(path_,
                            ": has a file of weights of each rank (LOCAL_STATE_DICT, or "
                            "use_dcp=False); expected FULL_STATE_DICT, or SHARDED_STATE_DICT with DCP");
    if (!read_deepspeed_files()) read_files();
    checkpoint_.format = checkpoint_.format.empty() ? name : str(name, " (", checkpoint_.format, ")");
    checkpoint_.path = path_;
    read_rest();
    return std::move(checkpoint_);
  }

 private:
  bool has(const std::string& name) const { return is_there(path_ / name); }
  bool is_local() const {
    return has("pytorch_model_fsdp_rank0.bin") || has("pytorch_model_fsdp_0_rank0.bin");
  }

  bool read_deepspeed_files() {
    if (!has("latest")) return false;
    const std::optional<IdentifiedCheckpoint> found = identify_deepspeed(path_, "");
    if (!found) return false;
    checkpoint_ = found->read(order_);
    return true;
  }

  void read_files() {
    std::vector<SavedTensor> entries;
    json extras = json::object();
    if (has(kFsdpFolder)) {
      if (!is_distributed(path_ / kFsdpFolder))
        throw CheckpointError(path_ / kFsdpFolder, " has neither .metadata nor .distcp files");
      checkpoint_.format = "torch.distributed.checkpoint";
      DistributedContents contents = read_distributed_contents(checkpoint_, path_ / kFsdpFolder);
      entries = std::move(contents.model);
      order_.is_entries = contents.in_order;
      extras = std::move(contents.extras);
    } else {
      const fs::path weights = has(kFsdpFile) ? path_ / kFsdpFile : weights_in(path_);
      if (weights.empty())
        throw CheckpointError(path_,
                              " has no file of weights; expected model.safetensors, "
                              "pytorch_model.bin or an index of them");
      ModelFiles model = read_model_files(checkpoint_, weights);
      entries = std::move(model.entries);
      order_.is_entries = model.in_order;
    }
    std::optional<SavedOptimizer> optimizer = read_optimizer();
    assemble(checkpoint_, std::move(entries), std::move(optimizer), order_);
    take_extras(checkpoint_, std::move(extras));
  }

  std::optional<SavedOptimizer> read_optimizer() {
    const fs::path folder = path_ / "optimizer_0";
    if (is_distributed(folder)) {
      DistributedContents contents = read_distributed_contents(checkpoint_, folder);
      if (!contents.optimizer) throw CheckpointError(folder, ": has no optimizer's state");
      return std::move(contents.optimizer);
    }
    for (const char* name : {"optimizer.pt", "optimizer.bin"})
      if (has(name)) {
        const TorchFile file(path_ / name);
        return read_optimizer_state(checkpoint_, file, file.root(), name);
      }
    checkpoint_.not_read.push_back(str(path_, ": has no optimizer's state: the weights only"));
    return std::nullopt;
  }

  void read_rest() {
    json extras = json::object();
    const size_t before = checkpoint_.not_read.size();
    for (const char* name : {"scheduler.pt", "scheduler.bin"})
      if (has(name))
        if (std::optional<json> value = read_value(checkpoint_, path_ / name))
          extras["lr_scheduler"] = std::move(*value);
    checkpoint_.lose_since(before, LostValue::Kind::kSchedule, "lr_scheduler");
    if (has("scaler.pt")) extras["scaler"] = read_value(checkpoint_, path_ / "scaler.pt").value_or(kUnread);
    const int ranks =
        std::max(ranks_of(path_, "random_states_", ".pkl"), ranks_of(path_, "rng_state_", ".pth"));
    checkpoint_.world_size = std::max(checkpoint_.world_size, ranks);
    if (has(kTrainerState)) {
      json state = read_json(path_ / kTrainerState);
      const auto steps = state.find("global_step");
      if (steps == state.end() || !count_of(*steps))
        throw CheckpointError(path_ / kTrainerState, ": has no count global_step");
      checkpoint_.global_steps = count_of(*steps);
      extras["trainer_state"] = std::move(state);
    }
    for (const std::string& name : names_in(path_)) {
      const bool is_custom = number_in(name, "custom_checkpoint_", ".pkl").has_value();
      if (is_custom) {
        if (std::optional<json> value = read_value(checkpoint_, path_ / name))
          extras[name.substr(0, name.size() - 4)] = std::move(*value);
      }
      const bool second = number_in(name, "model_", ".safetensors") ||
                          number_in(name, "pytorch_model_", ".bin") ||
                          number_in(name, "optimizer_", ".bin") || number_in(name, "scheduler_", ".bin") ||
                          (name != kFsdpFolder && number_in(name, "pytorch_model_fsdp_", "")) ||
                          (name != "optimizer_0" && number_in(name, "optimizer_", ""));
      if (second) checkpoint_.not_read.push_back(str(name, ": of another model of the program"));
      if (name.starts_with("random_states_") || name.starts_with("rng_state"))
        checkpoint_.not_read.push_back(str(name, ": states of generators of random numbers"));
      if (name == "training_args.bin" || name.starts_with("sampler") || name.starts_with("dl_state_dict"))
        checkpoint_.not_read.push_back(str(name, ": an object of the trainer's program"));
    }
    take_extras(checkpoint_, std::move(extras));
  }

  fs::path path_;
  ModelOrder order_;
  ForeignCheckpoint checkpoint_;
};

/// The folder checkpoint-N, or checkpoint_N, of the highest N.
fs::path newest_in(const fs::path& folder) {
  fs::path newest;
  int64_t most = -1;
  for (const std::string& name : names_in(folder))
    for (const char* before : {"checkpoint-", "checkpoint_"}) {
      const std::optional<int64_t> number = number_in(name, before, "");
      if (!number || *number <= most || !is_folder(folder / name)) continue;
      most = *number;
      newest = folder / name;
    }
  return newest;
}

}  // namespace

std::optional<IdentifiedCheckpoint> identify_trainer(const fs::path& path) {
  if (!is_folder(path)) return std::nullopt;
  if (is_there(path / "meta.pt") && is_distributed(path))
    return IdentifiedCheckpoint{path, std::bind_front(read_lightning_folder, path)};
  const auto reads = [](const fs::path& folder) {
    return IdentifiedCheckpoint{
        folder, [=](const ParameterOrder& order) { return TrainerFolder(folder, order).read(); }};
  };
  const bool is_one = TrainerFolder(path, {}).is_one();
  const bool is_complete = is_one && (is_there(path / "optimizer.pt") || is_there(path / "optimizer.bin") ||
                                      is_there(path / kFsdpFolder) || is_there(path / "latest"));
  // The Trainer leaves the final model, without an optimizer's state, in the folder of the checkpoints.
  if (!is_complete) {
    fs::path newest = newest_in(path);
    if (newest.empty()) newest = newest_in(path / "checkpoints");
    if (!newest.empty()) {
      const TrainerFolder inner(newest, {});
      if (inner.is_one()) return reads(newest);
      if ((is_one || !weights_in(newest).empty()) && !inner.has_tessera())
        throw CheckpointError(newest, " is the newest checkpoint, and has no ", kTrainerState,
                              " and no random_states_0.pkl: the save was not completed; give an older one");
    }
  }
  if (!is_one) return std::nullopt;
  return reads(path);
}

}  // namespace tessera::checkpoint
