// identify_deepspeed(): what DeepSpeed's engine.save_checkpoint() has written. [Note: DeepSpeed's files] in
// deepspeed_files.cc.
//
// [Note: names without ZeRO]
// Without ZeRO the optimizer's state has no names. Of a run in fp32 it has a state of each parameter, by
// number: names are given as to any state of torch.optim ([Note: names of numbers] in optimizer_names.cc). Of
// a run in fp16 or bf16 it has the fp32 masters, and the state of these, of each group one after the other
// (FP16_Optimizer, FP16_UnfusedOptimizer): nothing but equal numbers would say whose they are. They are lost,
// and the weights are those that the model computed in.
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/deepspeed_files.h"
#include "checkpoint/foreign/deepspeed_model.h"
#include "checkpoint/foreign/deepspeed_optimizer.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/foreign/saved_state.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

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
  assemble(checkpoint, std::move(entries), std::move(saved), {given, /*is_entries=*/true});
  // complete_parameters() compares the names with the file's.
  std::map<std::string, std::string> original;
  for (size_t i = 0; i < names.size(); ++i) original.emplace(clean[i], names[i]);
  for (ForeignParameter& one : checkpoint.parameters) {
    one.name = original.at(one.name);
    for (std::string& alias : one.aliases) alias = original.at(alias);
  }
}

/// A run without ZeRO: the model's file has the optimizer's state.
void read_unsharded(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, const ParameterOrder& order) {
  checkpoint.stage = 0;
  const PickleValue* optimizer = model.find("optimizer");
  if (optimizer == nullptr) {
    checkpoint.not_read.push_back("the optimizer's state: the checkpoint has none");
    return;
  }
  if (is_optimizer_state(*optimizer)) return read_plain(checkpoint, model, *optimizer, order);
  if (optimizer->find("cur_scale") != nullptr) read_loss_scaler(checkpoint, model.file(), optimizer);
  checkpoint.lose(
      LostValue::Kind::kState, "",
      "the fp32 masters and the optimizer's state, which a run in fp16 or bf16 without ZeRO saves "
      "without names; the weights are those that the model computed in");
  std::vector<LostValue> lost;
  std::vector<json> groups;
  if (const PickleValue* state = optimizer->find("optimizer_state_dict"))
    groups = read_flat_optimizer(model.file(), *state, lost).groups;
  std::erase_if(lost, [](const LostValue& one) { return one.kind == LostValue::Kind::kState; });
  say_lost(checkpoint, lost);
  if (groups.size() == 1)
    checkpoint.groups = std::move(groups);
  else
    checkpoint.lose(LostValue::Kind::kOption, "", "the param groups' options: they have no names either");
}

ForeignCheckpoint read_deepspeed(const std::filesystem::path& folder, const ParameterOrder& order) {
  const DeepSpeedFiles files = list_deepspeed_files(folder, false);
  const DeepSpeedModel model(files.model[0]);
  check_parallelism(model, false);
  ForeignCheckpoint checkpoint;
  checkpoint.path = folder;
  checkpoint.world_size = static_cast<int>(integer_of(model.find("dp_world_size")).value_or(1));
  if (!files.optimizer.empty()) {
    read_zero_optimizer(checkpoint, files, model);
  } else if (files.model_by_rank || model.find("param_shapes") != nullptr) {
    throw CheckpointError(folder,
                          ": has no optimizer's files; expected one of each rank, "
                          "zero_pp_rank_0_mp_rank_00_optim_states.pt and so on");
  } else {
    read_unsharded(checkpoint, model, order);
  }
  checkpoint.format = checkpoint.stage == 0 ? "DeepSpeed" : "DeepSpeed ZeRO";
  read_counters(checkpoint, model);
  const int model_file = file_index(checkpoint, files.model[0]);
  complete_parameters(checkpoint, model, model_file,
                      files.model_by_rank ? files.model : std::vector<std::filesystem::path>());
  checkpoint.optimizer = optimizer_class(checkpoint, model.config());
  return checkpoint;
}

}  // namespace

std::optional<IdentifiedCheckpoint> identify_deepspeed(const std::filesystem::path& path,
                                                       const std::string& tag) {
  const auto folder = deepspeed_folder(path, tag, "latest");
  if (!folder || is_deepspeed_universal(*folder)) return std::nullopt;
  return IdentifiedCheckpoint{*folder, std::bind_front(read_deepspeed, *folder)};
}

}  // namespace tessera::checkpoint
