#include "checkpoint/foreign/deepspeed_model.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/foreign/saved_state.h"
#include "checkpoint/value_tag.h"
#include "core/ascii.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Kind = PickleValue::Kind;

constexpr int64_t kMostElements = int64_t{1} << 60;

// What DeepSpeed itself writes into a model's file; the rest is the user's.
constexpr std::array<std::string_view, 27> kOwnKeys = {"module",
                                                       "buffer_names",
                                                       "optimizer",
                                                       "param_shapes",
                                                       "frozen_param_shapes",
                                                       "shared_params",
                                                       "frozen_param_fragments",
                                                       "lr_scheduler",
                                                       "data_sampler",
                                                       "random_ltd",
                                                       "sparse_tensor_module_names",
                                                       "csr_tensor_module_names",
                                                       "skipped_steps",
                                                       "global_steps",
                                                       "global_samples",
                                                       "dp_world_size",
                                                       "mp_world_size",
                                                       "ds_config",
                                                       "ds_version",
                                                       "num_experts",
                                                       "universal_checkpoint_info",
                                                       "checkpoint_parallel_dimensions",
                                                       "ds_autoep_layers",
                                                       "autoep_layers",
                                                       "folding",
                                                       "iteration",
                                                       "layers_ids"};

std::string text_of(const PickleValue& value, const std::string& source, const char* what) {
  if (value.kind != Kind::kString || !is_utf8(value.text))
    throw CheckpointError(source, ": ", what, " is ", value.describe(), "; expected a text");
  return std::string(value.text);
}

/// Two entries with the same one are the same elements.
using Place = std::tuple<std::string, int64_t, DType, std::vector<int64_t>, std::vector<int64_t>>;
Place place_of(const TorchTensor& tensor) {
  return {tensor.storage, tensor.offset, tensor.type, tensor.shape, tensor.strides};
}

}  // namespace

std::optional<int64_t> integer_of(const PickleValue* value) {
  if (value == nullptr) return std::nullopt;
  if (value->kind == Kind::kInt || value->kind == Kind::kBool) return value->integer;
  if (value->kind == Kind::kObject && value->arguments != nullptr && value->arguments->items.size() == 1)
    return integer_of(value->arguments->items[0]);
  if (value->kind == Kind::kGlobal) {  // how Python 3.11 writes ZeroStageEnum's members
    constexpr std::array<std::string_view, 4> kStages = {"disabled", "optimizer_states", "gradients",
                                                         "weights"};
    for (size_t stage = 0; stage < kStages.size(); ++stage)
      if (value->text.ends_with(str("ZeroStageEnum.", kStages[stage]))) return static_cast<int64_t>(stage);
  }
  return std::nullopt;
}

ShapesByName shapes_of(const PickleValue& dict, const std::string& source) {
  if (dict.kind != Kind::kDict)
    throw CheckpointError(source, ": is ", dict.describe(), "; expected a dict of names and shapes");
  ShapesByName shapes;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    std::string name = text_of(*dict.items[i], source, "a parameter's name");
    const PickleValue* const value = dict.items[i + 1];
    const bool is_list = value->kind == Kind::kTuple || value->kind == Kind::kList;
    std::vector<int64_t> shape;
    __int128 product = 1;
    for (const PickleValue* size : is_list ? value->items : std::vector<const PickleValue*>()) {
      shape.push_back(size->kind == Kind::kInt ? size->integer : -1);
      product *= std::max<int64_t>(shape.back(), 1);
      if (shape.back() < 0 || product > kMostElements) shape.assign(1, -1), product = 1;
      if (shape.back() < 0) break;
    }
    if (!is_list || (!shape.empty() && shape.back() < 0))
      throw CheckpointError(source, ": the shape of ", quoted_name(name), " is ", value->describe(),
                            "; expected sizes of a tensor");
    shapes.emplace_back(std::move(name), std::move(shape));
  }
  return shapes;
}

DeepSpeedModel::DeepSpeedModel(const fs::path& path) : file_(path) {
  if (file_.root().kind != Kind::kDict ||
      (file_.root().find("module") == nullptr && find("ds_version") == nullptr))
    fail("is ", file_.root().describe(), " without \"module\"; expected a model's file of DeepSpeed");
  std::vector<std::string> ignored;
  config_ = json::object();
  if (const PickleValue* config = find("ds_config"))
    if (auto read = to_json(*config, nullptr, "ds_config", ignored); read && read->is_object())
      config_ = std::move(*read);
  if (const PickleValue* names = find("buffer_names"))
    for (const PickleValue* name : names->items)
      if (name->kind == Kind::kString) buffer_names_.emplace(name->text);
  const PickleValue* module = find("module");
  has_module_ = module != nullptr && module->kind == Kind::kDict;
  if (!has_module_) return;
  for (size_t i = 0; i + 1 < module->items.size(); i += 2) {
    std::optional<TorchTensor> tensor = file_.tensor(*module->items[i + 1]);
    if (!tensor) continue;
    std::string name = text_of(*module->items[i], file_.path().string(), "a name of the module's state");
    by_name_.emplace(name, module_.size());
    module_.emplace_back(std::move(name), std::move(*tensor));
  }
}

const PickleValue* DeepSpeedModel::find(std::string_view key) const {
  const PickleValue* value = file_.root().find(key);
  return value == nullptr || value->kind == Kind::kNone ? nullptr : value;
}

const TorchTensor* DeepSpeedModel::in_module(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &module_[found->second].second;
}

DType DeepSpeedModel::compute_type() const {
  const auto enabled = [&](const char* key) {
    const auto section = config_.find(key);
    return section != config_.end() && section->is_object() &&
           section->value("enabled", json()) == json(true);
  };
  if (enabled("bf16") || enabled("bfloat16")) return DType::kBFloat16;
  return enabled("fp16") ? DType::kFloat16 : DType::kFloat32;
}

std::optional<std::vector<ShapesByName>> DeepSpeedModel::param_shapes() const {
  const PickleValue* value = find("param_shapes");
  if (value == nullptr) return std::nullopt;
  const std::string source = str(file_.path(), ": param_shapes");
  std::vector<ShapesByName> groups;
  if (value->kind == Kind::kDict) {
    groups.push_back(shapes_of(*value, source));
  } else if (value->kind == Kind::kList) {
    for (const PickleValue* group : value->items) groups.push_back(shapes_of(*group, source));
  } else {
    fail("param_shapes is ", value->describe(), "; expected a list of dicts");
  }
  return groups;
}

ShapesByName DeepSpeedModel::frozen_shapes() const {
  const PickleValue* value = find("frozen_param_shapes");
  if (value == nullptr) return {};
  return shapes_of(*value, str(file_.path(), ": frozen_param_shapes"));
}

std::vector<std::pair<std::string, TorchTensor>> DeepSpeedModel::frozen_fragments() const {
  std::vector<std::pair<std::string, TorchTensor>> fragments;
  const PickleValue* value = find("frozen_param_fragments");
  if (value == nullptr) return fragments;
  if (value->kind != Kind::kDict) fail("frozen_param_fragments is ", value->describe(), "; expected a dict");
  for (size_t i = 0; i + 1 < value->items.size(); i += 2) {
    std::string name = text_of(*value->items[i], file_.path().string(), "a frozen parameter's name");
    std::optional<TorchTensor> tensor = file_.tensor(*value->items[i + 1]);
    if (!tensor)
      fail("the frozen parameter ", quoted_name(name), " is ", value->items[i + 1]->describe(),
           "; expected a tensor");
    fragments.emplace_back(std::move(name), std::move(*tensor));
  }
  return fragments;
}

std::vector<std::pair<std::string, std::string>> DeepSpeedModel::shared_names() const {
  std::vector<std::pair<std::string, std::string>> names;
  const PickleValue* value = find("shared_params");
  if (value == nullptr) return names;
  const std::string source = file_.path().string();
  if (value->kind == Kind::kDict)
    for (size_t i = 0; i + 1 < value->items.size(); i += 2)
      names.emplace_back(text_of(*value->items[i], source, "a shared parameter's name"),
                         text_of(*value->items[i + 1], source, "a shared parameter's name"));
  else if (value->kind == Kind::kList)  // pairs
    for (const PickleValue* pair : value->items)
      if (pair->items.size() == 2)
        names.emplace_back(text_of(*pair->items[0], source, "a shared parameter's name"),
                           text_of(*pair->items[1], source, "a shared parameter's name"));
  return names;
}

void check_parallelism(const DeepSpeedModel& model, bool universal) {
  for (const char* key : {"ds_autoep_layers", "autoep_layers"})
    if (model.find(key) != nullptr)
      model.fail("has ", key,
                 ": a mixture of experts (DeepSpeed AutoEP) is not read; expected a model without expert "
                 "parallelism");
  if (const PickleValue* experts = model.find("num_experts"); experts != nullptr && !experts->items.empty())
    model.fail(
        "has num_experts: a mixture of experts (DeepSpeed MoE) is not read; expected a model without expert "
        "parallelism");
  const auto ranks = integer_of(model.find("mp_world_size")).value_or(1);
  if (ranks > 1 && !universal)
    model.fail("mp_world_size is ", ranks,
               ": tensor parallelism is not read; expected data parallelism alone, or what DeepSpeed's "
               "ds_to_universal.py makes of it");
  if (!model.has_module() && !universal)
    model.fail(
        "has no state dict of the module: pipeline parallelism is not read; expected data parallelism alone, "
        "or what DeepSpeed's ds_to_universal.py makes of it");
}

void read_counters(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model) {
  const TorchFile& file = model.file();
  const auto count = [&](const char* key) -> std::optional<int64_t> {
    const PickleValue* value = model.find(key);
    if (value == nullptr) return std::nullopt;
    if (const std::optional<int64_t> read = count_in(file, value)) return read;
    const std::string line = str(key, ": found ", value->describe(), "; expected a count");
    if (std::string_view(key) == "global_samples")
      checkpoint.not_read.push_back(line);  // nothing but reports has it
    else
      checkpoint.lose(LostValue::Kind::kCount, key, line);
    return std::nullopt;
  };
  checkpoint.global_steps = count("global_steps");
  checkpoint.skipped_steps = count("skipped_steps");
  checkpoint.global_samples = count("global_samples");
  if (const PickleValue* version = model.find("ds_version");
      version != nullptr && version->kind == Kind::kString)
    checkpoint.version = version->text;
  const size_t before = checkpoint.not_read.size();
  if (const PickleValue* scheduler = model.find("lr_scheduler"))
    checkpoint.lr_scheduler = to_tagged_json(*scheduler, &file, "lr_scheduler", checkpoint.not_read);
  checkpoint.lose_since(before, LostValue::Kind::kSchedule, "lr_scheduler");
  for (const char* key : {"data_sampler", "random_ltd"})
    if (const PickleValue* value = model.find(key))
      checkpoint.not_read.push_back(str(key, ": ", value->describe()));
  const PickleValue& root = file.root();
  std::vector<std::string> left_out;
  for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
    const PickleValue& key = *root.items[i];
    const std::string name = key.kind == Kind::kString && is_utf8(key.text) ? std::string(key.text) : "";
    if (name.empty() || name == kValueTag) {
      left_out.push_back(str("client_state: the key ", key.describe()));
      continue;
    }
    if (std::find(kOwnKeys.begin(), kOwnKeys.end(), name) != kOwnKeys.end()) continue;
    if (auto value = to_tagged_json(*root.items[i + 1], &file, str("client_state.", name), left_out))
      checkpoint.client_state[name] = std::move(*value);
  }
  say_not_read(checkpoint, "client_state", left_out);
}

void read_loss_scaler(ForeignCheckpoint& checkpoint, const TorchFile& file, const PickleValue* scaler) {
  if (scaler == nullptr || scaler->kind == Kind::kNone) return;
  const PickleValue* state = scaler->kind == Kind::kObject ? scaler->state : scaler;
  if (state != nullptr && state->kind == Kind::kTuple && !state->items.empty()) state = state->items[0];
  json read = scaler->describe();
  if (state != nullptr && state->kind == Kind::kDict) {
    read = json::object();
    for (const char* key :
         {"dynamic_loss_scale", "dynamic", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"})
      if (const PickleValue* value = state->find(key))
        if (auto one = to_json(*value, &file, str("loss_scaler.", key), checkpoint.not_read))
          read[std::string_view(key) == "dynamic_loss_scale" ? "dynamic" : key] = std::move(*one);
    if (read.empty()) read = scaler->describe();
  }
  take_loss_scaler(checkpoint, std::move(read), file.path().filename().string() + ": loss_scaler");
}

namespace {

/// Fills in what the optimizer's files do not say.
class Completion {
 public:
  Completion(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, int model_file)
      : checkpoint_(checkpoint), model_(model), model_file_(model_file) {
    for (size_t i = 0; i < checkpoint.parameters.size(); ++i) {
      places_[checkpoint.parameters[i].name] = i;
      for (const std::string& alias : checkpoint.parameters[i].aliases) places_[alias] = i;
    }
  }

  void run(const std::vector<fs::path>& ranks) {
    add_frozen(ranks);
    add_shared();
    add_rest();
    set_types();
    sort();
    add_buffers();
    clean_names();
  }

 private:
  void add(const std::string& name, ForeignTensor weights) {
    ForeignParameter parameter;
    parameter.name = name;
    parameter.trainable = false;
    parameter.weights = std::move(weights);
    places_[name] = checkpoint_.parameters.size();
    checkpoint_.parameters.push_back(std::move(parameter));
  }

  void add_frozen(const std::vector<fs::path>& ranks) {
    const ShapesByName shapes = model_.frozen_shapes();
    if (shapes.empty()) return;
    if (ranks.empty()) return add_whole_frozen(shapes);
    std::map<std::string, ForeignTensor> tensors;
    std::map<std::string, int64_t> next;
    for (const auto& [name, shape] : shapes) tensors[name].shape = shape;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const std::optional<DeepSpeedModel> other =
          rank == 0 ? std::nullopt : std::optional<DeepSpeedModel>(ranks[rank]);
      const DeepSpeedModel& model = other ? *other : model_;
      const int file = file_index(checkpoint_, ranks[rank]);
      for (const auto& [name, fragment] : model.frozen_fragments()) {
        const auto at = tensors.find(name);
        if (at == tensors.end())
          model.fail("has a part of the frozen parameter ", quoted_name(name),
                     ", which rank 0 does not have");
        add_part(model, name, at->second, next[name], fragment, file, static_cast<int64_t>(ranks.size()));
      }
    }
    for (const auto& [name, shape] : shapes) {
      if (next[name] < numel_of(shape))
        model_.fail("the ranks have ", next[name], " elements of the frozen parameter ", quoted_name(name),
                    "; expected ", numel_of(shape));
      if (!places_.contains(name)) add(name, std::move(tensors[name]));
    }
  }

  /// A rank has ceil(numel / ranks) elements, the last ranks fewer or none, with padding.
  void add_part(const DeepSpeedModel& model, const std::string& name, ForeignTensor& tensor, int64_t& next,
                const TorchTensor& fragment, int file, int64_t ranks) const {
    const int64_t numel = numel_of(tensor.shape), part = (numel + ranks - 1) / ranks;
    const int64_t wanted = std::min(part, numel - next);
    if (!fragment.is_contiguous() || fragment.numel() < wanted || (next > 0 && fragment.type != tensor.type))
      model.fail("the part of the frozen parameter ", quoted_name(name), " is a tensor of ",
                 name_of(fragment.type), " ", describe_shape(fragment.shape), "; expected ", part,
                 " elements, as the shape ", describe_shape(tensor.shape), " says");
    tensor.type = fragment.type;
    if (wanted > 0) tensor.runs.push_back({file, fragment.offset, next, wanted});
    next += wanted;
  }

  void add_whole_frozen(const ShapesByName& shapes) {
    std::map<std::string, TorchTensor> fragments;
    for (auto& [name, tensor] : model_.frozen_fragments()) fragments.emplace(name, tensor);
    for (const auto& [name, shape] : shapes) {
      const auto found = fragments.find(name);
      const TorchTensor* tensor = found != fragments.end() ? &found->second : model_.in_module(name);
      if (tensor == nullptr || tensor->shape != shape)
        model_.fail(
            "the frozen parameter ", quoted_name(name), " of the shape ", describe_shape(shape),
            tensor == nullptr ? " is not there" : str(" is a tensor of ", describe_shape(tensor->shape)),
            "; expected it in frozen_param_fragments");
      if (!places_.contains(name)) add(name, foreign_tensor(model_file_, *tensor));
    }
  }

  void add_alias(const std::string& alias, size_t place) {
    if (!places_.emplace(alias, place).second) return;
    checkpoint_.parameters[place].aliases.push_back(alias);
  }

  void add_shared() {
    for (const auto& [alias, name] : model_.shared_names()) {
      const auto at = places_.find(name);
      if (at != places_.end())
        add_alias(alias, at->second);
      else if (const auto other = places_.find(alias); other != places_.end())
        add_alias(name, other->second);
      else
        shared_.emplace(alias, name);
    }
  }

  /// What the module has that is no buffer and has no place yet: names of tied parameters, and parameters
  /// that are not trained, of runs without the lists of them.
  void add_rest() {
    std::map<Place, size_t> by_place;
    for (const auto& [name, tensor] : model_.module())
      if (const auto at = places_.find(name); at != places_.end())
        by_place.emplace(place_of(tensor), at->second);
    std::vector<std::string> without;
    for (const auto& [name, tensor] : model_.module()) {
      if (places_.contains(name) || model_.buffer_names().contains(name)) continue;
      if (const auto shared = shared_.find(name); shared != shared_.end())
        if (const auto at = places_.find(shared->second); at != places_.end()) {
          add_alias(name, at->second);
          continue;
        }
      // Parameters that are partitioned have no elements here, but tied ones the same storage.
      if (const auto tied = by_place.find(place_of(tensor));
          tied != by_place.end() && !tensor.storage.empty()) {
        add_alias(name, tied->second);
        continue;
      }
      if (tensor.numel() == 0 && is_partitioned()) {
        without.push_back(str("parameter ", quoted_name(name), ": the files have no elements of it"));
        continue;
      }
      by_place.emplace(place_of(tensor), checkpoint_.parameters.size());
      add(name, foreign_tensor(model_file_, tensor));
    }
    say_not_read(checkpoint_, "parameters", without);
  }

  bool is_partitioned() const { return checkpoint_.stage == 3; }

  void set_types() {
    const DType compute = model_.compute_type();
    for (ForeignParameter& one : checkpoint_.parameters) {
      if (!one.trainable) {
        one.dtype = one.weights.type;
        continue;
      }
      const TorchTensor* tensor = model_.in_module(one.name);
      for (size_t i = 0; tensor == nullptr && i < one.aliases.size(); ++i)
        tensor = model_.in_module(one.aliases[i]);
      one.dtype = tensor != nullptr ? tensor->type : compute;
      if (tensor != nullptr && !is_partitioned() && tensor->shape != one.weights.shape)
        model_.fail("parameter ", quoted_name(one.name), " has the shape ", describe_shape(tensor->shape),
                    " in the module; expected ", describe_shape(one.weights.shape), ", as param_shapes says");
    }
  }

  void sort() {
    std::map<std::string_view, size_t> order;
    for (const auto& [name, tensor] : model_.module()) order.emplace(name, order.size());
    std::ranges::stable_sort(checkpoint_.parameters, {}, [&](const ForeignParameter& one) {
      const auto at = order.find(one.name);
      return at == order.end() ? order.size() : at->second;
    });
  }

  void add_buffers() {
    std::vector<std::string> missing;
    for (const auto& [name, tensor] : model_.module())
      if (model_.buffer_names().contains(name) && !places_.contains(name))
        checkpoint_.buffers.emplace_back(name, foreign_tensor(model_file_, tensor));
    for (const std::string& name : model_.buffer_names())
      if (model_.has_module() && model_.in_module(name) == nullptr)
        missing.push_back(str("buffer ", quoted_name(name), ": the module's state dict does not have it"));
    say_not_read(checkpoint_, "buffers", missing);
  }

  void clean_names() {
    const std::vector<std::string*> all = names_in(checkpoint_);
    std::vector<std::string> names;
    names.reserve(all.size());
    for (const std::string* name : all) names.push_back(*name);
    names = without_wrappers(names);
    for (size_t i = 0; i < all.size(); ++i) *all[i] = std::move(names[i]);
  }

  ForeignCheckpoint& checkpoint_;
  const DeepSpeedModel& model_;
  int model_file_;
  std::map<std::string, size_t, std::less<>> places_;  // of parameters, by name and alias
  std::map<std::string, std::string> shared_;          // aliases of what has no place yet
};

}  // namespace

void complete_parameters(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, int model_file,
                         const std::vector<fs::path>& ranks) {
  Completion(checkpoint, model, model_file).run(ranks);
}

std::string optimizer_class(const ForeignCheckpoint& checkpoint, const json& config) {
  if (const auto section = config.find("optimizer"); section != config.end() && section->is_object()) {
    const json type = section->value("type", json());
    const json params = section->value("params", json::object());
    if (type.is_string()) {
      const auto name = type.get<std::string>();
      // DeepSpeed's "Adam" decouples the weight decay unless it is told not to.
      if (ascii_lower(name) == "adamw") return "AdamW";
      if (ascii_lower(name) == "adam")
        return params.is_object() && params.value("adam_w_mode", json()) == json(false) ? "Adam" : "AdamW";
      for (const char* known : {"SGD", "Lion", "Adagrad", "Lamb", "Muon"})
        if (ascii_lower(name) == ascii_lower(known)) return known;
      return name;
    }
  }
  StateNames states;
  for (const ForeignParameter& one : checkpoint.parameters)
    for (const auto& [name, tensor] : one.states) states.insert(name);
  return optimizer_class(states, checkpoint.groups.empty() ? json::object() : checkpoint.groups[0]);
}

}  // namespace tessera::checkpoint
