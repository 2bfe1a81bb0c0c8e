// [Note: which entries are parameters]
// A state dict has parameters and persistent buffers, and does not say which is which. What has an
// optimizer's state, or is in one of its groups, is a parameter; so is what an engine's model has as a frozen
// one, such as quantized weights, which are integers. Of the others:
//
//   - a batch norm's running_mean, running_var and num_batches_tracked are buffers
//   - what is no floating-point number is a buffer: torch gives no gradient to others
//   - the rest are parameters. With an optimizer that is known by names they are not trainable: it was not
//     given them. A buffer of floating-point numbers is among them, and is none the worse for it: a model
//     finds it by its name as it finds a parameter.
//
// Tied parameters are one memory with several names. torch.save keeps that; then the first name is the
// parameter's and the others are its aliases. Formats that save each name's elements (DCP, safetensors) do
// not say it. But an optimizer has a tied parameter once. So an entry that the optimizer does not have, and
// whose elements are to the bit, and not all alike, those of one it has, is taken for its alias.
#include "checkpoint/foreign/saved_state.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/optimizer_names.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/formats/numpy_value.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Kind = PickleValue::Kind;

constexpr int kMaxNesting = 16;                  // of dicts in a state dict
constexpr size_t kMaxEntries = size_t{1} << 22;  // of a file; a pickle may say one dict many times
constexpr size_t kCompareBytes = size_t{4} << 20;
constexpr int64_t kFirstCompared = 64;

SavedTensor saved_tensor(int index, const std::string& name, const TorchTensor& tensor) {
  SavedTensor out;
  out.name = name;
  out.tensor = foreign_tensor(index, tensor);
  out.is_parameter = tensor.is_parameter;
  if (tensor.numel() > 0 && !tensor.storage.empty())
    out.memory = str(index, " ", tensor.storage, " ", tensor.offset, " ", name_of(tensor.type), " ",
                     describe_shape(tensor.shape), " ", describe_shape(tensor.strides));
  return out;
}

void read_entries(std::vector<SavedTensor>& out, ForeignCheckpoint& checkpoint, int index,
                  const TorchFile& file, const PickleValue& value, const std::string& prefix,
                  const std::string& what, int depth) {
  if (depth > kMaxNesting) throw CheckpointError(what, ": dicts nested deeper than ", kMaxNesting);
  for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
    const PickleValue &key = *value.items[i], &member = *value.items[i + 1];
    if (key.kind != Kind::kString && key.kind != Kind::kInt) {
      checkpoint.not_read.push_back(str(what, ": the entry with the key ", key.describe()));
      continue;
    }
    const std::string name = key.kind == Kind::kString ? std::string(key.text) : str(key.integer);
    const std::string full = prefix.empty() ? name : str(prefix, ".", name);
    if (out.size() > kMaxEntries) throw CheckpointError(what, ": more than ", kMaxEntries, " tensors");
    if (const std::optional<TorchTensor> tensor = file.tensor(member))
      out.push_back(saved_tensor(index, full, *tensor));
    else if (member.kind == Kind::kDict && !member.items.empty())
      read_entries(out, checkpoint, index, file, member, full, what, depth + 1);
    else if (member.kind != Kind::kNone && member.kind != Kind::kDict)
      checkpoint.not_read.push_back(str(what, ": ", quoted_name(full), ": ", member.describe()));
  }
}

bool has_only_tensors(const TorchFile& file, const PickleValue& value, size_t& num_tensors, size_t& num_seen,
                      int depth) {
  if (value.kind != Kind::kDict || depth > kMaxNesting) return false;
  for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
    if (++num_seen > kMaxEntries) return false;
    const PickleValue &key = *value.items[i], &member = *value.items[i + 1];
    if (key.kind != Kind::kString) return false;
    if (key.text.ends_with("_extra_state") || member.kind == Kind::kNone) continue;
    if (TorchFile::unread_tensor(member) != nullptr || file.tensor(member))
      ++num_tensors;
    else if (!has_only_tensors(file, member, num_tensors, num_seen, depth + 1))
      return false;
  }
  return true;
}

bool ends_in(std::string_view name, std::string_view last) {
  return name == last ||
         (name.size() > last.size() && name.ends_with(last) && name[name.size() - last.size() - 1] == '.');
}

bool is_buffer(const SavedTensor& entry) {
  for (const char* name : {"running_mean", "running_var", "num_batches_tracked"})
    if (ends_in(entry.name, name)) return true;
  const bool fraction = is_floating(entry.tensor.type) || entry.tensor.type == DType::kComplex32 ||
                        entry.tensor.type == DType::kComplex64 || entry.tensor.type == DType::kComplex128;
  const bool eight_bits =
      entry.tensor.type >= DType::kFloat8E5m2 && entry.tensor.type <= DType::kFloat4E2m1fnX2;
  return !fraction && !eight_bits;
}

/// Puts the parameters of which tied_to(i) is another one's place under that one's names.
void join(ForeignCheckpoint& checkpoint, const std::vector<size_t>& tied_to) {
  std::vector<ForeignParameter> kept;
  std::vector<size_t> moved(checkpoint.parameters.size());
  for (size_t i = 0; i < tied_to.size(); ++i) {
    if (tied_to[i] != i) continue;
    moved[i] = kept.size();
    kept.push_back(checkpoint.parameters[i]);
  }
  for (size_t i = 0; i < tied_to.size(); ++i)
    if (tied_to[i] != i) {
      std::vector<std::string>& aliases = kept[moved[tied_to[i]]].aliases;
      aliases.push_back(checkpoint.parameters[i].name);
      aliases.insert(aliases.end(), checkpoint.parameters[i].aliases.begin(),
                     checkpoint.parameters[i].aliases.end());
    }
  checkpoint.parameters = std::move(kept);
}

/// Puts parameters that the optimizer does not have under the names of those that they are tied to.
void find_ties(ForeignCheckpoint& checkpoint) {
  std::map<std::pair<DType, std::vector<int64_t>>, std::vector<size_t>> trained;
  for (size_t i = 0; i < checkpoint.parameters.size(); ++i) {
    const ForeignParameter& one = checkpoint.parameters[i];
    if (one.trainable) trained[{one.weights.type, one.weights.shape}].push_back(i);
  }
  const ForeignFiles files(checkpoint.files);
  std::vector<size_t> tied_to(checkpoint.parameters.size());
  for (size_t i = 0; i < tied_to.size(); ++i) {
    const ForeignParameter& one = checkpoint.parameters[i];
    tied_to[i] = i;
    if (one.trainable || one.weights.numel() <= 1) continue;
    const auto same = trained.find({one.weights.type, one.weights.shape});
    if (same == trained.end()) continue;
    const auto other = std::ranges::find_if(same->second, [&](size_t place) {
      return have_same_bits(files, one.weights, checkpoint.parameters[place].weights,
                            /*may_be_constant=*/false);
    });
    if (other != same->second.end()) tied_to[i] = *other;
  }
  join(checkpoint, tied_to);
}

/// Puts the parameters into the order that is given; those that it does not have come last.
void reorder(ForeignCheckpoint& checkpoint, const std::vector<std::string>& names,
             std::map<std::string, size_t>& places) {
  std::vector<size_t> order;
  std::vector<bool> taken(checkpoint.parameters.size());
  const auto take = [&](size_t place) {
    if (!taken[place]) order.push_back(place);
    taken[place] = true;
  };
  for (const std::string& name : names)
    if (const auto at = places.find(name); at != places.end()) take(at->second);
  for (size_t place = 0; place < taken.size(); ++place) take(place);
  std::vector<ForeignParameter> parameters;
  std::vector<size_t> moved(order.size());
  for (const size_t place : order) {
    moved[place] = parameters.size();
    parameters.push_back(std::move(checkpoint.parameters[place]));
  }
  checkpoint.parameters = std::move(parameters);
  for (auto& [name, place] : places) place = moved[place];
}

using Shapes = std::set<std::vector<int64_t>>;

Shapes shapes_of(const ForeignCheckpoint& checkpoint) {
  Shapes shapes;
  for (const ForeignParameter& one : checkpoint.parameters) shapes.insert(one.weights.shape);
  return shapes;
}

/// The state's shape, unless no parameter has it: an optimizer of whole parameters has states of others.
std::optional<std::vector<int64_t>> known_shape(const SavedState& state, const Shapes& shapes) {
  std::optional<std::vector<int64_t>> shape = state.shape();
  return shape && shapes.contains(*shape) ? shape : std::nullopt;
}

/// Gives names to the states by their places in the groups of `order`. False: it has other groups or shapes.
bool name_by_groups(const ForeignCheckpoint& checkpoint, SavedOptimizer& optimizer, const ModelOrder& order,
                    const std::map<std::string, size_t>& places, const Shapes& shapes) {
  std::vector<std::vector<std::string>> filled;
  for (const auto& group : order.groups)
    if (!group.empty()) filled.push_back(group);
  size_t next_group = 0;
  std::vector<std::pair<SavedState*, std::string>> found;
  for (const SavedGroup& group : optimizer.groups) {
    if (group.members.empty()) continue;
    if (next_group == filled.size() || filled[next_group].size() != group.members.size()) return false;
    const std::vector<std::string>& names = filled[next_group++];
    for (size_t i = 0; i < names.size(); ++i) {
      SavedState& state = optimizer.states[group.members[i]];
      auto place = places.find(names[i]);
      if (const auto tied = order.aliases.find(names[i]);
          place == places.end() && tied != order.aliases.end())
        for (const std::string& other : tied->second)
          if (place == places.end()) place = places.find(other);
      if (place == places.end()) return false;
      const ForeignParameter& parameter = checkpoint.parameters[place->second];
      const auto shape = known_shape(state, shapes);
      if (shape && *shape != parameter.weights.shape) return false;
      found.emplace_back(&state, parameter.name);
    }
  }
  if (next_group != filled.size()) return false;
  for (auto& [state, name] : found) state->name = std::move(name);
  return true;
}

/// Gives names to the states that have numbers. False: they cannot be told, and not_read says why.
bool name_states(ForeignCheckpoint& checkpoint, SavedOptimizer& optimizer, const ModelOrder& order,
                 const std::map<std::string, size_t>& places) {
  const bool numbered = std::any_of(optimizer.states.begin(), optimizer.states.end(),
                                    [](const SavedState& one) { return one.name.empty(); });
  if (!numbered) return true;
  const Shapes shapes = shapes_of(checkpoint);
  if (name_by_groups(checkpoint, optimizer, order, places, shapes)) return true;
  std::vector<NamedShape> model;
  if (order.names.empty()) {
    for (const ForeignParameter& one : checkpoint.parameters) model.push_back({one.name, one.weights.shape});
  } else {
    std::set<size_t> seen;
    for (const std::string& name : order.names) {
      const auto at = places.find(name);
      const bool is_buffer = std::any_of(checkpoint.buffers.begin(), checkpoint.buffers.end(),
                                         [&](const auto& buffer) { return buffer.first == name; });
      if (is_buffer) continue;
      if (at == places.end() && order.may_differ) continue;
      if (at == places.end())
        throw CheckpointError(checkpoint.path, ": the order of the model's parameters has ",
                              quoted_name(name), ", which the checkpoint does not have");
      if (seen.insert(at->second).second)
        model.push_back(
            {checkpoint.parameters[at->second].name, checkpoint.parameters[at->second].weights.shape});
    }
  }
  std::vector<GroupShapes> groups;
  for (const SavedGroup& group : optimizer.groups) {
    groups.emplace_back();
    for (const size_t member : group.members)
      groups.back().push_back(known_shape(optimizer.states[member], shapes));
  }
  const bool in_order = order.is_entries || !order.names.empty();
  const NamedGroups named = name_groups(model, groups, in_order, order.is_hugging_face);
  if (named.members.empty() && !optimizer.states.empty()) {
    checkpoint.lose(
        LostValue::Kind::kState, "",
        str(optimizer.source, ": the states of ", optimizer.states.size(),
            " parameters, which it has by number: ", named.why_not,
            in_order ? "" : ", and the file of the weights does not have the model's order",
            order.names.empty() ? "; an engine's load_checkpoint() tells which is which by its model" : ""));
    return false;
  }
  for (size_t group = 0; group < groups.size(); ++group)
    for (size_t i = 0; i < groups[group].size(); ++i)
      optimizer.states[optimizer.groups[group].members[i]].name = model[named.members[group][i]].name;
  return true;
}

/// Counts what is left out by the name of the state, for a line each.
class LeftOut {
 public:
  void add(const std::string& state, const std::string& why) {
    auto& [count, reason] = by_state_[state];
    if (++count == 1) reason = why;
  }
  void say(std::vector<std::string>& lines, std::vector<LostValue>& lost, LostValue::Kind kind,
           const std::string& source) const {
    for (const auto& [state, found] : by_state_) {
      lines.push_back(str(source, ": the state ", quoted_name(state), " of ", found.first,
                          found.first == 1 ? " parameter: " : " parameters: ", found.second));
      lost.push_back({kind, state, lines.back()});
    }
  }

 private:
  std::map<std::string, std::pair<int, std::string>> by_state_;
};

/// Nothing but the sizes of bitsandbytes' states says that they are the parameter's: under FSDP1 a rank saves
/// those of its own part, and older versions had a scale for each 2,048 elements. Returns what is wrong, or
/// "".
std::string problem_of_bitsandbytes(const SavedState& state, const ForeignTensor& weights) {
  if (!state.of_bitsandbytes) return "";
  if (const auto shape = state.shape(); shape && *shape != weights.shape)
    return str("bitsandbytes' states have the shape ", describe_shape(*shape), "; expected ",
               describe_shape(weights.shape));
  constexpr int64_t kBlock = 256;
  const int64_t blocks = (weights.numel() + kBlock - 1) / kBlock;
  for (const char* name : {"absmax1", "absmax2"}) {
    const auto scales = state.tensors.find(name);
    if (scales == state.tensors.end()) continue;
    const int64_t found = scales->second.numel();
    if (found < blocks || found % std::max<int64_t>(blocks, 1) != 0)
      return str("the state ", quoted_name(name), " has ", found, " scales; expected ", blocks,
                 ", one for each 256 elements");
  }
  return "";
}

void give_states(ForeignCheckpoint& checkpoint, SavedOptimizer& optimizer,
                 const std::map<std::string, size_t>& places) {
  for (ForeignParameter& one : checkpoint.parameters) one.trainable = false;
  for (SavedGroup& group : optimizer.groups) checkpoint.groups.push_back(std::move(group.options));
  std::vector<int> group_of(optimizer.states.size(), 0);
  for (size_t g = 0; g < optimizer.groups.size(); ++g)
    for (const size_t member : optimizer.groups[g].members) group_of[member] = static_cast<int>(g);
  LeftOut left_out;
  std::set<size_t> seen;
  for (size_t i = 0; i < optimizer.states.size(); ++i) {
    SavedState& state = optimizer.states[i];
    const auto at = places.find(state.name);
    if (at == places.end()) {
      checkpoint.not_read.push_back(str(optimizer.source, ": the state of ", quoted_name(state.name),
                                        ", which is no parameter of the model that was saved"));
      continue;
    }
    ForeignParameter& parameter = checkpoint.parameters[at->second];
    if (!seen.insert(at->second).second)
      throw CheckpointError(checkpoint.path, ": ", optimizer.source, ": parameter ", quoted_name(state.name),
                            " has two states; expected one");
    parameter.trainable = true;
    parameter.group = group_of[i];
    parameter.steps = state.steps.value_or(0);
    parameter.unread_state =
        state.unread.empty() ? problem_of_bitsandbytes(state, parameter.weights) : state.unread;
    for (auto& [name, tensor] : state.tensors) {
      const bool by_element = tensor.shape == parameter.weights.shape && is_floating(tensor.type);
      if (tensor.shape != parameter.weights.shape)
        left_out.add(name,
                     str("has the shape ", describe_shape(tensor.shape), ", ", quoted_name(parameter.name),
                         " has ", describe_shape(parameter.weights.shape)));
      else if (!by_element)
        left_out.add(name, str("is of the type ", name_of(tensor.type)));
      (by_element ? parameter.states : parameter.other_states).emplace(name, std::move(tensor));
    }
    for (const auto& [name, value] : state.values.items())
      if (name != "step" && !value.is_null()) left_out.add(name, value.dump());
    if (state.step_tensor) parameter.other_states.emplace("step", std::move(*state.step_tensor));
    parameter.other_values = std::move(state.values);
  }
  left_out.say(checkpoint.other_states, checkpoint.lost, LostValue::Kind::kOtherState, optimizer.source);
}

bool has_no_dimension(const PickleValue& value) {
  const std::optional<NumpyArray> array = numpy_array(value);
  return array && array->shape.empty();
}

void read_members(SavedState& out, const TorchFile& file, const PickleValue& value, int index,
                  const std::string& what, LeftOut& left_out, bool is_nested = false) {
  if (value.kind != Kind::kDict)
    throw CheckpointError(what, ": found ", value.describe(), "; expected a dict of states");
  const auto unread = [&](const std::string& name, const PickleValue& member) {
    const char* const tensor = TorchFile::unread_tensor(member);
    const std::string found = tensor != nullptr ? tensor : member.describe();
    left_out.add(name, found);
    if (out.unread.empty()) out.unread = str("the state ", quoted_name(name), " is ", found);
  };
  for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
    const PickleValue &key = *value.items[i], &member = *value.items[i + 1];
    const std::string name = key.kind == Kind::kString ? std::string(key.text) : key.describe();
    const char* const is_unread = TorchFile::unread_tensor(member);
    const std::optional<TorchTensor> tensor = is_unread != nullptr ? std::nullopt : file.tensor(member);
    if (out.tensors.contains(name) || out.values.contains(name))
      throw CheckpointError(what, ": the state ", quoted_name(name), " is there twice; expected it once");
    if (name == kStatesOfBitsandbytes && !is_nested) {
      out.of_bitsandbytes = true;
      read_members(out, file, member, index, str(what, ".", name), left_out, /*is_nested=*/true);
    } else if (name == "step") {
      std::vector<std::string> ignored;
      const std::optional<json> number = to_json(member, &file, what, ignored);
      out.steps = number ? count_of(*number) : std::nullopt;
      if (!out.steps) unread(name, member);
      if (tensor)
        out.step_tensor = foreign_tensor(index, *tensor);
      else if (number)
        out.values[name] = *number;
    } else if (tensor) {
      out.tensors[name] = foreign_tensor(index, *tensor);
    } else if (member.kind == Kind::kInt || member.kind == Kind::kFloat || member.kind == Kind::kBool ||
               has_no_dimension(member)) {
      std::vector<std::string> ignored;
      if (const std::optional<json> number = to_json(member, &file, what, ignored))
        out.values[name] = *number;
      else
        unread(name, member);
    } else if (member.kind == Kind::kNone) {
      out.values[name] = nullptr;
    } else {
      unread(name, member);
    }
  }
}

/// "state.3" of the number 3, "fc.weight" of the name.
std::string key_of(const PickleValue& key, const std::string& what) {
  if (key.kind == Kind::kInt) return str("#", key.integer);
  if (key.kind == Kind::kString) return std::string(key.text);
  throw CheckpointError(what, ": found ", key.describe(), "; expected a parameter's number or name");
}

}  // namespace

std::string optimizer_class(const StateNames& states, const json& options) {
  const auto has = [&](const char* option) { return options.contains(option); };
  if (states.contains("exp_avg") && states.contains("exp_avg_sq") && has("betas") && has("amsgrad")) {
    if (!has("decoupled_weight_decay")) return "";
    return options["decoupled_weight_decay"] == json(true) ? "AdamW" : "Adam";
  }
  if (states.contains("mu_product")) return "NAdam";
  if (has("ns_steps") && has("ns_coefficients")) return "Muon";
  if (has("beta2_decay") && has("d")) return "Adafactor";
  if (has("etas") && has("step_sizes")) return "Rprop";
  if (has("lambd") && has("t0")) return "ASGD";
  if (states.contains("exp_avg") && states.contains("exp_avg_sq") && has("decoupled_weight_decay") &&
      has("betas"))
    return "RAdam";
  if (states.contains("exp_inf")) return "Adamax";
  if (states.contains("square_avg") && states.contains("acc_delta")) return "Adadelta";
  if (states.contains("square_avg") && has("alpha")) return "RMSprop";
  if (states.contains("sum") && has("lr_decay")) return "Adagrad";
  if (has("dampening") && has("nesterov")) return "SGD";
  if (states.size() == 1 && states.contains("exp_avg") && has("betas") && !has("eps")) return "Lion";
  return "";
}

std::optional<std::vector<int64_t>> SavedState::shape() const {
  if (of_bitsandbytes)
    for (const char* last : {"state2", "state1"})
      if (const auto found = tensors.find(last); found != tensors.end()) return found->second.shape;
  std::optional<std::vector<int64_t>> first;
  for (const auto& [state, tensor] : tensors) {
    if (tensor.shape.empty()) continue;
    if (first && tensor.shape != *first) return std::nullopt;
    first = tensor.shape;
  }
  return first || tensors.empty() ? first : std::vector<int64_t>();
}

void append(std::optional<SavedOptimizer>& to, SavedOptimizer more) {
  if (!to) {
    to = std::move(more);
    return;
  }
  const size_t before = to->states.size();
  for (SavedState& state : more.states) to->states.push_back(std::move(state));
  for (SavedGroup& group : more.groups) {
    for (size_t& member : group.members) member += before;
    to->groups.push_back(std::move(group));
  }
}

void say_not_read(ForeignCheckpoint& checkpoint, const std::string& what,
                  const std::vector<std::string>& lines) {
  constexpr size_t kMost = 8;
  for (size_t i = 0; i < std::min(lines.size(), kMost); ++i) checkpoint.not_read.push_back(lines[i]);
  if (lines.size() > kMost)
    checkpoint.not_read.push_back(str(what, ": ", lines.size() - kMost, " more of these"));
}

bool have_same_bits(const ForeignFiles& files, const ForeignTensor& a, const ForeignTensor& b,
                    bool may_be_constant) {
  const auto width = static_cast<size_t>(size_bytes(a.type));
  const int64_t numel = a.numel();
  std::vector<std::byte> left, right, first;
  bool is_constant = true;
  // Others differ in the first elements, of which few are read.
  for (int64_t begin = 0, step = kFirstCompared; begin < numel; begin += step) {
    if (begin > 0) step = static_cast<int64_t>(kCompareBytes / width);
    const auto bytes = static_cast<size_t>(std::min(step, numel - begin)) * width;
    left.resize(bytes);
    right.resize(bytes);
    files.read(a, begin, left);
    files.read(b, begin, right);
    if (left != right) return false;
    if (first.empty()) first.assign(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(width));
    for (size_t at = 0; is_constant && at < bytes; at += width)
      is_constant = std::equal(first.begin(), first.end(), left.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return may_be_constant || !is_constant;
}

bool is_scaler_key(std::string_view key) {
  return std::ranges::find(kScalerKeys, key) != std::end(kScalerKeys);
}

std::optional<LostValue::Kind> kind_of(std::string_view key) {
  const auto is_in = [&](const auto& keys) { return std::ranges::find(keys, key) != std::end(keys); };
  if (is_in(kSchedulerKeys)) return LostValue::Kind::kSchedule;
  if (is_in(kCounts) || is_in(kCountsOfSome)) return LostValue::Kind::kCount;
  return std::nullopt;
}

void take_loss_scaler(ForeignCheckpoint& checkpoint, json scaler, const std::string& source) {
  if (scaler.is_null() || (scaler.is_object() && scaler.empty())) return;  // a GradScaler that is off
  const auto lose = [&](const char* key, const char* expected) {
    const json found = scaler.is_object() ? scaler.value(key, json()) : scaler;
    checkpoint.lose(LostValue::Kind::kScale, key,
                    str(source, ": ", key, ": found ",
                        found.is_null() ? "none that can be read" : found.dump(), "; expected ", expected));
  };
  const bool is_torchs = scaler.is_object() && !scaler.contains("cur_scale") &&
                         (scaler.contains("scale") || scaler.contains("_growth_tracker"));
  const char* const key = is_torchs ? "scale" : "cur_scale";
  const json scale = scaler.is_object() ? scaler.value(key, json()) : json();
  if (!scale.is_number() || !(scale.get<double>() > 0)) return lose(key, "a number above 0");
  const bool is_dynamic = is_torchs || scaler.value("dynamic", json()) == json(true);
  if (!is_dynamic && scale.get<double>() == 1.0) return;
  if (is_torchs) {
    const std::optional<int64_t> steps = count_of(scaler.value("_growth_tracker", json()));
    if (!steps) return lose("_growth_tracker", "a count of steps since the scale has changed");
    scaler["cur_scale"] = scale;
    scaler.erase("scale");
    scaler["cur_iter"] = *steps + 1;  // Tessera's scaler does not count the first step after a change
  } else if (is_dynamic) {
    for (const char* count : {"cur_iter", "last_overflow_iter"})
      if (!scaler.value(count, json()).is_number_integer()) return lose(count, "a whole number");
  }
  checkpoint.loss_scaler = std::move(scaler);
}

int file_index(ForeignCheckpoint& checkpoint, const fs::path& path) {
  const auto at = std::find(checkpoint.files.begin(), checkpoint.files.end(), path);
  const auto index = static_cast<int>(at - checkpoint.files.begin());
  if (at == checkpoint.files.end()) checkpoint.files.push_back(path);
  return index;
}

ForeignTensor foreign_tensor(int file, const TorchTensor& tensor) {
  return {.type = tensor.type,
          .shape = tensor.shape,
          .runs = runs_of_strided(file, tensor.offset, tensor.type, tensor.shape, tensor.strides)};
}

std::vector<SavedTensor> read_state_dict(ForeignCheckpoint& checkpoint, const TorchFile& file,
                                         const PickleValue& value, const std::string& what) {
  std::vector<SavedTensor> out;
  read_entries(out, checkpoint, file_index(checkpoint, file.path()), file, value, "", what, 0);
  return out;
}

bool is_state_dict(const TorchFile& file, const PickleValue& value) {
  size_t num_tensors = 0, num_seen = 0;
  return has_only_tensors(file, value, num_tensors, num_seen, 0) && num_tensors > 0;
}

bool is_optimizer_state(const PickleValue& value) {
  if (value.kind != Kind::kDict) return false;
  const PickleValue *state = value.find("state"), *groups = value.find("param_groups");
  return state != nullptr && groups != nullptr && state->kind == Kind::kDict &&
         (groups->kind == Kind::kList || groups->kind == Kind::kTuple);
}

json group_options(const PickleValue& group, const TorchFile& file, const std::string& what,
                   std::vector<LostValue>& lost) {
  json options = json::object();
  for (size_t i = 0; i + 1 < group.items.size(); i += 2) {
    const PickleValue& key = *group.items[i];
    if (key.kind != Kind::kString || key.text == "params" || key.text == "param_names") continue;
    const std::string name(key.text);
    std::vector<std::string> lines;
    if (auto value = to_json(*group.items[i + 1], &file, what + name, lines))
      options[name] = std::move(*value);
    for (const std::string& line : lines) lost.push_back({LostValue::Kind::kOption, name, line});
  }
  return options;
}

SavedOptimizer read_optimizer_state(ForeignCheckpoint& checkpoint, const TorchFile& file,
                                    const PickleValue& value, const std::string& what) {
  if (!is_optimizer_state(value))
    throw CheckpointError(what, ": found ", value.describe(),
                          "; expected an optimizer's {\"state\": {…}, \"param_groups\": […]}");
  SavedOptimizer out;
  out.source = what;
  const int index = file_index(checkpoint, file.path());
  std::map<std::string, size_t> places;
  for (const PickleValue* group : value.find("param_groups")->items) {
    const PickleValue* params = group->find("params");
    if (group->kind != Kind::kDict || params == nullptr || params->kind != Kind::kList)
      throw CheckpointError(what, ": param_groups: found ", group->describe(),
                            "; expected dicts with a list \"params\"");
    const PickleValue* names = group->find("param_names");
    SavedGroup saved;
    for (size_t i = 0; i < params->items.size(); ++i) {
      const PickleValue& key = *params->items[i];
      if (!places.emplace(key_of(key, what), out.states.size()).second)
        throw CheckpointError(what, ": param_groups: the parameter ", key_of(key, what), " is there twice");
      saved.members.push_back(out.states.size());
      out.states.emplace_back();
      if (key.kind == Kind::kString) out.states.back().name = key.text;
      if (names != nullptr && names->items.size() == params->items.size() &&
          names->items[i]->kind == Kind::kString)
        out.states.back().name = names->items[i]->text;
    }
    std::vector<LostValue> lost;
    saved.options = group_options(*group, file, str(what, ": param_groups[", out.groups.size(), "]."), lost);
    for (const LostValue& one : lost) checkpoint.lose(one.kind, one.name, one.line);
    out.groups.push_back(std::move(saved));
  }
  LeftOut left_out;
  size_t num_tensors = 0;
  const PickleValue& state = *value.find("state");
  for (size_t i = 0; i + 1 < state.items.size(); i += 2) {
    const std::string key = key_of(*state.items[i], what);
    const auto place = places.find(key);
    if (place == places.end()) {
      checkpoint.lose(LostValue::Kind::kState, "",
                      str(what, ": the state of ", quoted_name(key), ", which is in no group"));
      continue;
    }
    SavedState read;
    read_members(read, file, *state.items[i + 1], index, str(what, ": state of ", key), left_out);
    num_tensors += read.tensors.size();
    if (num_tensors > kMaxEntries) throw CheckpointError(what, ": more than ", kMaxEntries, " tensors");
    SavedState& one = out.states[place->second];
    read.name = std::move(one.name);
    one = std::move(read);
  }
  left_out.say(checkpoint.not_read, checkpoint.lost, LostValue::Kind::kState, what);
  return out;
}

std::vector<std::string> without_wrappers(const std::vector<std::string>& names) {
  std::vector<std::string> out = names;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::string& name : out)
      for (const std::string_view wrapper :
           {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."})
        for (size_t at = name.find(wrapper); at != name.npos; at = name.find(wrapper, at)) {
          if (at > 0 && name[at - 1] != '.') {
            at += wrapper.size();
            continue;
          }
          name.erase(at, wrapper.size());
        }
    for (const std::string_view wrapper : {"module.", "_forward_module."}) {
      const bool all = !out.empty() && std::all_of(out.begin(), out.end(), [&](const std::string& name) {
        return name.starts_with(wrapper) && name.size() > wrapper.size();
      });
      if (!all) continue;
      for (std::string& name : out) name.erase(0, wrapper.size());
      changed = true;
    }
  }
  return std::set<std::string>(out.begin(), out.end()).size() == out.size() ? out : names;
}

std::vector<std::string*> names_in(ForeignCheckpoint& checkpoint) {
  std::vector<std::string*> names;
  for (ForeignParameter& one : checkpoint.parameters) {
    names.push_back(&one.name);
    for (std::string& alias : one.aliases) names.push_back(&alias);
  }
  for (auto& [name, tensor] : checkpoint.buffers) names.push_back(&name);
  return names;
}

void assemble(ForeignCheckpoint& checkpoint, std::vector<SavedTensor> model,
              std::optional<SavedOptimizer> optimizer, const ModelOrder& order) {
  std::vector<std::string> entries;
  for (const SavedTensor& entry : model) entries.push_back(entry.name);
  const std::vector<std::string> names = order.keeps_names ? entries : without_wrappers(entries);
  for (size_t i = 0; i < model.size(); ++i) model[i].name = names[i];
  std::set<std::string> known_parameters;  // by name: they are parameters, whatever they look like
  for (const std::string& name : order.frozen) {
    known_parameters.insert(name);
    if (const auto tied = order.aliases.find(name); tied != order.aliases.end())
      known_parameters.insert(tied->second.begin(), tied->second.end());
  }
  if (optimizer) {
    std::vector<std::string> known;
    for (const SavedState& state : optimizer->states)
      if (!state.name.empty()) known.push_back(state.name);
    // Names of the model lose what the model's lose. Its parts may have one prefix without being wrapped:
    // "module".
    std::map<std::string, std::string> clean_of;
    for (size_t i = 0; i < entries.size(); ++i) clean_of.emplace(entries[i], names[i]);
    const bool are_entries =
        std::ranges::all_of(known, [&](const std::string& name) { return clean_of.contains(name); });
    std::vector<std::string> clean = without_wrappers(known);
    if (are_entries)
      std::ranges::transform(known, clean.begin(),
                             [&](const std::string& name) { return clean_of.at(name); });
    size_t next = 0;
    for (SavedState& state : optimizer->states)
      if (!state.name.empty()) state.name = clean[next++];
    known_parameters.insert(clean.begin(), clean.end());
  }
  std::map<std::string, size_t> by_memory, places;
  for (SavedTensor& entry : model) {
    const bool buffer = !entry.is_parameter && !known_parameters.contains(entry.name) && is_buffer(entry);
    if (buffer) {
      checkpoint.buffers.emplace_back(entry.name, std::move(entry.tensor));
      continue;
    }
    if (!entry.memory.empty()) {
      const auto [first, is_new] = by_memory.try_emplace(entry.memory, checkpoint.parameters.size());
      if (!is_new) {
        checkpoint.parameters[first->second].aliases.push_back(entry.name);
        places.emplace(entry.name, first->second);
        continue;
      }
    }
    places.emplace(entry.name, checkpoint.parameters.size());
    ForeignParameter parameter;
    parameter.name = entry.name;
    parameter.dtype = entry.tensor.type;
    parameter.weights = std::move(entry.tensor);
    checkpoint.parameters.push_back(std::move(parameter));
  }
  if (!order.names.empty()) reorder(checkpoint, order.names, places);
  if (!optimizer) return;
  StateNames states;
  for (const SavedState& one : optimizer->states)
    for (const auto& [name, tensor] : one.tensors) states.insert(name);
  checkpoint.optimizer =
      optimizer_class(states, optimizer->groups.empty() ? json::object() : optimizer->groups[0].options);
  if (name_states(checkpoint, *optimizer, order, places)) {
    give_states(checkpoint, *optimizer, places);
    find_ties(checkpoint);
  } else if (optimizer->groups.size() == 1) {
    checkpoint.groups.push_back(std::move(optimizer->groups[0].options));
  } else {
    checkpoint.lose(LostValue::Kind::kOption, "",
                    str("param groups: ", optimizer->groups.size(),
                        ", whose parameters cannot be told: their rates and other values"));
  }
}

void join_tied(ForeignCheckpoint& checkpoint,
               const std::map<std::string, std::vector<std::string>>& aliases) {
  if (aliases.empty()) return;  // consolidate and convert have no model: nothing is opened for them
  std::map<std::string, size_t, std::less<>> places;
  std::vector<size_t> tied_to(checkpoint.parameters.size());
  for (size_t i = 0; i < tied_to.size(); ++i) {
    places[checkpoint.parameters[i].name] = i;
    tied_to[i] = i;
  }
  const ForeignFiles files(checkpoint.files);
  for (const auto& [name, others] : aliases) {
    std::vector<size_t> found;
    if (const auto at = places.find(name); at != places.end()) found.push_back(at->second);
    for (const std::string& other : others)
      if (const auto at = places.find(other); at != places.end()) found.push_back(at->second);
    for (size_t i = 1; i < found.size(); ++i) {
      const ForeignParameter &first = checkpoint.parameters[found[0]], &one = checkpoint.parameters[found[i]];
      if (one.states.empty() && one.other_states.empty() && one.weights.type == first.weights.type &&
          one.weights.shape == first.weights.shape &&
          have_same_bits(files, one.weights, first.weights, /*may_be_constant=*/true))
        tied_to[found[i]] = found[0];
    }
  }
  join(checkpoint, tied_to);
}

}  // namespace tessera::checkpoint
