// read_deepspeed(): what DeepSpeed's engine.save_checkpoint() has written. [Note: DeepSpeed's files] in
// deepspeed_files.cc.
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/deepspeed_files.h"
#include "checkpoint/foreign/deepspeed_model.h"
#include "checkpoint/foreign/deepspeed_optimizer.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/foreign/saved_state.h"
#include "core/str.h"

namespace tessera::checkpoint {

std::optional<ForeignCheckpoint> read_deepspeed(const std::filesystem::path& path, const std::string& tag,
                                                const ParameterOrder& order) {
  const auto folder = deepspeed_folder(path, tag, "latest");
  if (!folder || is_deepspeed_universal(*folder)) return std::nullopt;
  const DeepSpeedFiles files = list_deepspeed_files(*folder, false);
  const DeepSpeedModel model(files.model[0]);
  check_parallelism(model, false);
  ForeignCheckpoint checkpoint;
  checkpoint.path = *folder;
  checkpoint.world_size = static_cast<int>(integer_of(model.find("dp_world_size")).value_or(1));
  if (!files.optimizer.empty()) {
    read_zero_optimizer(checkpoint, files, model);
  } else if (files.model_by_rank || model.find("param_shapes") != nullptr) {
    throw CheckpointError(str(folder->string(),
                              ": has no optimizer's files; expected one of each rank, "
                              "zero_pp_rank_0_mp_rank_00_optim_states.pt and so on"));
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

}  // namespace tessera::checkpoint
