// [Note: names without ZeRO]
// Without ZeRO the optimizer's state has no names. Of a run in fp32 it has a state of each parameter, by
// number: names are given as to any state of torch.optim ([Note: names of numbers] in optimizer_names.cc). Of
// a run in fp16 or bf16 it has the fp32 masters: of each group a flat vector (FP16_Optimizer), or a tensor of
// each parameter (FP16_UnfusedOptimizer). The module has these numbers too, rounded. So the parameter that
// lies at a place of a vector is the one whose numbers are there. Groups have parameters in the model's
// order: the first one in order whose numbers fit is taken. Where an optimizer is known that was made as the
// source's, its groups say which it is, and the numbers have to fit. Nothing is taken where parameters of
// different shapes fit, or where one that fits, too, is in another group or in none: the layer norms of an
// untrained model have equal numbers.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/deepspeed_optimizer.h"
#include "checkpoint/foreign/optimizer_names.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/foreign/saved_state.h"
#include "core/float_bits.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;
using Kind = PickleValue::Kind;

constexpr int64_t kCompared = 1024;  // elements of a parameter

template <class T>
T load(const TorchFile& file, int64_t offset) {
  T value;
  std::memcpy(&value, file.bytes().data() + offset, sizeof(T));
  return value;
}

/// Whether the fp32 master at byte `master` rounds to the element at byte `own` of the module.
bool is_rounded(const TorchFile& file, int64_t master, int64_t own, DType type) {
  const auto value = load<float>(file, master);
  switch (type) {
    case DType::kFloat16: return fp16_of_float(value) == load<uint16_t>(file, own);
    case DType::kBFloat16: return bf16_of_float(value) == load<uint16_t>(file, own);
    case DType::kFloat32: return bits_of(value) == load<uint32_t>(file, own);
    default: return false;
  }
}

/// A parameter that the module's state dict has.
struct Candidate {
  std::string name;
  const TorchTensor* tensor;
  int group = -1;  ///< that it was found in
};

class Masters {
 public:
  Masters(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, int file_number,
          const ParameterOrder& order)
      : checkpoint_(checkpoint), model_(model), file_number_(file_number), order_(order) {
    std::set<std::string> shared;
    for (const auto& [alias, name] : model.shared_names()) shared.insert(alias);
    std::set<std::pair<std::string, int64_t>> seen;
    for (const auto& [name, tensor] : model.module())
      if (!model.buffer_names().contains(name) && !shared.contains(name) && tensor.numel() > 0 &&
          tensor.is_contiguous() && seen.emplace(tensor.storage, tensor.offset).second)
        candidates_.push_back({name, &tensor});
  }

  /// False: a place's parameter cannot be told; nothing is added.
  bool name_all(const FlatOptimizer& optimizer, const std::vector<std::vector<TorchTensor>>& masters,
                bool flat) {
    std::vector<ForeignParameter> found;
    const size_t said = checkpoint_.not_read.size(), lost = checkpoint_.lost.size();
    if (name_by_groups(found, optimizer, masters, flat)) {
      for (ForeignParameter& one : found) checkpoint_.parameters.push_back(std::move(one));
      return true;
    }
    found.clear();
    checkpoint_.not_read.resize(said);
    checkpoint_.lost.resize(lost);
    for (Candidate& one : candidates_) one.group = -1;
    size_t next = 0;
    for (size_t group = 0; group < masters.size(); ++group)
      for (const TorchTensor& master : masters[group]) {
        if (master.type != DType::kFloat32 || !master.is_contiguous() || next >= optimizer.states.size())
          return say_why(str("the masters of group ", group, " are of ", name_of(master.type), " ",
                             describe_shape(master.shape)));
        if (!name_one(found, optimizer.states[next++], static_cast<int>(group), master, flat)) return false;
      }
    for (const auto& [chosen, other] : also_fitted_)
      if (candidates_[chosen].group != candidates_[other].group)
        return say_why(str(quoted_name(candidates_[chosen].name), " and ",
                           quoted_name(candidates_[other].name),
                           " have the same numbers, and are not in one group"));
    for (ForeignParameter& one : found) checkpoint_.parameters.push_back(std::move(one));
    return true;
  }

 private:
  /// By the groups of the order that was given. False: there are none, or other numbers are at the places.
  bool name_by_groups(std::vector<ForeignParameter>& found, const FlatOptimizer& optimizer,
                      const std::vector<std::vector<TorchTensor>>& masters, bool flat) {
    std::vector<std::string> names;
    for (const Candidate& one : candidates_) names.push_back(one.name);
    names = without_wrappers(names);
    const auto candidate_of = [&](const std::string& name) -> Candidate* {
      std::vector<std::string> wanted = {name};
      if (const auto tied = order_.aliases.find(name); tied != order_.aliases.end())
        wanted.insert(wanted.end(), tied->second.begin(), tied->second.end());
      for (const std::string& one : wanted)
        if (const auto at = std::ranges::find(names, one); at != names.end())
          return &candidates_[static_cast<size_t>(at - names.begin())];
      return nullptr;
    };
    if (order_.groups.size() != masters.size()) return false;
    size_t state = 0;
    for (size_t group = 0; group < masters.size(); ++group) {
      auto name = order_.groups[group].begin();
      for (const TorchTensor& master : masters[group]) {
        if (master.type != DType::kFloat32 || !master.is_contiguous() || state >= optimizer.states.size())
          return false;
        for (int64_t offset = 0; offset < master.numel(); ++name) {
          Candidate* const one = name == order_.groups[group].end() ? nullptr : candidate_of(*name);
          if (one == nullptr || !(flat || one->tensor->shape == master.shape) || !fits(*one, master, offset))
            return false;
          one->group = static_cast<int>(group);
          found.push_back(
              parameter_of(*one, optimizer.states[state], static_cast<int>(group), master, offset, flat));
          offset += one->tensor->numel();
        }
        ++state;
      }
      if (name != order_.groups[group].end()) return false;
    }
    return true;
  }

  bool say_why(const std::string& why) {
    checkpoint_.lose(LostValue::Kind::kState, "",
                     str("the fp32 masters and the optimizer's state, which have no names: ", why,
                         "; the weights are those that the model computed in"));
    return false;
  }

  bool fits(const Candidate& one, const TorchTensor& master, int64_t offset) const {
    const int64_t numel = one.tensor->numel(), width = size_bytes(one.tensor->type);
    if (one.group >= 0 || numel > master.numel() - offset) return false;
    const int64_t step = std::max<int64_t>(numel / kCompared, 1);
    for (int64_t i = 0; i < numel; i += step)
      if (!is_rounded(model_.file(), master.offset + (offset + i) * 4, one.tensor->offset + i * width,
                      one.tensor->type))
        return false;
    return true;
  }

  bool name_one(std::vector<ForeignParameter>& found, const FlatState& state, int group,
                const TorchTensor& master, bool flat) {
    for (int64_t offset = 0; offset < master.numel();) {
      std::vector<size_t> fitting;
      for (size_t i = 0; i < candidates_.size(); ++i)
        if ((flat || candidates_[i].tensor->shape == master.shape) && fits(candidates_[i], master, offset))
          fitting.push_back(i);
      if (fitting.empty())
        return say_why(str("no parameter has the numbers at element ", offset, " of group ", group));
      Candidate& chosen = candidates_[fitting[0]];
      for (const size_t other : std::span(fitting).subspan(1)) {
        if (chosen.tensor->shape != candidates_[other].tensor->shape)
          return say_why(str("the numbers of both ", quoted_name(chosen.name), " and ",
                             quoted_name(candidates_[other].name), " are at element ", offset, " of group ",
                             group));
        also_fitted_.emplace_back(fitting[0], other);
      }
      chosen.group = group;
      found.push_back(parameter_of(chosen, state, group, master, offset, flat));
      offset += chosen.tensor->numel();
    }
    return true;
  }

  ForeignParameter parameter_of(const Candidate& one, const FlatState& state, int group,
                                const TorchTensor& master, int64_t offset, bool flat) {
    const int64_t numel = one.tensor->numel();
    const auto slice = [&](const TorchTensor& tensor) {
      return ForeignTensor{
          .type = tensor.type,
          .shape = one.tensor->shape,
          .runs = {flat_run(file_number_, tensor.offset + offset * size_bytes(tensor.type), 0, numel)}};
    };
    ForeignParameter parameter;
    parameter.name = one.name;
    parameter.group = group;
    parameter.steps = state.steps.value_or(0);
    parameter.weights = slice(master);
    for (const auto& [name, tensor] : state.tensors)
      if (flat ? tensor.shape.size() == 1 && tensor.numel() == master.numel() : tensor.shape == master.shape)
        parameter.states.emplace(name, slice(tensor));
      else
        checkpoint_.lose(LostValue::Kind::kState, name,
                         str("the optimizer's state ", quoted_name(name), " of ", quoted_name(one.name),
                             ": a tensor of ", describe_shape(tensor.shape)));
    return parameter;
  }

  ForeignCheckpoint& checkpoint_;
  const DeepSpeedModel& model_;
  int file_number_;
  const ParameterOrder& order_;
  std::vector<Candidate> candidates_;
  std::vector<std::pair<size_t, size_t>> also_fitted_;  // a candidate that was taken, another that fitted
};

std::vector<std::vector<TorchTensor>> masters_in(const DeepSpeedModel& model, const PickleValue& groups) {
  const auto read = [&](const PickleValue& value) {
    std::optional<TorchTensor> tensor = model.file().tensor(value);
    if (!tensor) model.fail(str("the fp32 masters have ", value.describe(), "; expected tensors"));
    return *tensor;
  };
  std::vector<std::vector<TorchTensor>> masters;
  for (const PickleValue* group : groups.items) {
    masters.emplace_back();
    if (group->kind == Kind::kList)
      for (const PickleValue* one : group->items) masters.back().push_back(read(*one));
    else
      masters.back().push_back(read(*group));
  }
  return masters;
}

/// Of a run in fp32: names as torch.optim's numbers have them.
void read_plain(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, const PickleValue& optimizer,
                const ParameterOrder& given) {
  const std::string file_name = model.file().path().filename().string();
  SavedOptimizer saved =
      read_optimizer_state(checkpoint, model.file(), optimizer, str(file_name, ", optimizer"));
  std::vector<SavedTensor> entries;
  for (SavedTensor& one :
       read_state_dict(checkpoint, model.file(), *model.find("module"), str(file_name, ", module")))
    if (!model.buffer_names().contains(one.name)) {
      one.is_parameter = true;
      entries.push_back(std::move(one));
    }
  std::vector<std::string> names;
  for (const SavedTensor& one : entries) names.push_back(one.name);
  const std::vector<std::string> clean = without_wrappers(names);
  ModelOrder order(given);
  order.is_entries = true;
  assemble(checkpoint, std::move(entries), std::move(saved), order);
  // complete_parameters() compares the names with the file's.
  std::map<std::string, std::string> original;
  for (size_t i = 0; i < names.size(); ++i) original.emplace(clean[i], names[i]);
  for (ForeignParameter& one : checkpoint.parameters) {
    one.name = original.at(one.name);
    for (std::string& alias : one.aliases) alias = original.at(alias);
  }
}

}  // namespace

void read_unsharded(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, const ParameterOrder& order) {
  checkpoint.stage = 0;
  const PickleValue* optimizer = model.find("optimizer");
  if (optimizer == nullptr) {
    checkpoint.not_read.push_back("the optimizer's state: the checkpoint has none");
    return;
  }
  const PickleValue* masters = optimizer->find("fp32_groups_flat");
  const bool flat = masters != nullptr;
  if (!flat) masters = optimizer->find("fp32_groups");
  if (masters == nullptr && is_optimizer_state(*optimizer))
    return read_plain(checkpoint, model, *optimizer, order);
  const PickleValue* state = optimizer->find("optimizer_state_dict");
  if (masters == nullptr || masters->kind != Kind::kList || state == nullptr) {
    checkpoint.lose(LostValue::Kind::kState, "",
                    str("the optimizer's state: ", optimizer->describe(), ", without fp32 masters"));
    return;
  }
  if (optimizer->find("cur_scale") != nullptr) read_loss_scaler(checkpoint, model.file(), optimizer);
  std::vector<LostValue> lost;
  FlatOptimizer read = read_flat_optimizer(model.file(), *state, lost);
  say_lost(checkpoint, lost);
  const int file = file_index(checkpoint, model.file().path());
  Masters(checkpoint, model, file, order).name_all(read, masters_in(model, *masters), flat);
  checkpoint.groups = std::move(read.groups);
}

}  // namespace tessera::checkpoint
