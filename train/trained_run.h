// TrainedRun: the folder a run has left (train/run_directory.h), read back to
// evaluate its model or to ask it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "train/evaluate.h"
#include "train/predictor.h"
#include "train/registry.h"
#include "train/run.h"
#include "train/trainer_config.h"

namespace tessera::train {

struct TrainedRun {
  std::filesystem::path folder;  ///< of the run
  RunConfig config;  ///< config.json's, but for what only training needs: the optimizer has no state, there
                     ///< is no schedule
  std::filesystem::path weights;  ///< folder/model.safetensors; empty: a checkpoint's
  std::string tag;                ///< of the checkpoint
};

/// Local. `folder`: of the run, of its checkpoints, or of one of them (train/run_path.h). For `world_size`
/// ranks, however many have trained; `overrides` as given to --set. The weights are those of the checkpoint
/// `tag`; without one, given the run, the exported model, which is the best; without that the latest
/// checkpoint. Throws ConfigError: no folder of a run, or one that has neither; CheckpointError.
TrainedRun open_run(const std::filesystem::path& folder, int world_size,
                    const std::vector<std::string>& overrides = {}, const std::string& tag = "");

/// Collective. Gives the engine the run's weights. Throws CheckpointError.
void load_trained_weights(const TrainedRun& run, Engine& engine);

/// Collective. What `tessera eval` does: loads data and weights, and evaluates every set the task has (the
/// one on the way; the test set, if it is another), sharded as the run was. Rank 0 shows the results and
/// writes FOLDER/eval_results.json. Throws as run(), and CheckpointError.
std::vector<Evaluation> evaluate_run(const TrainedRun& run, const Registry& registry,
                                     const comm::Environment& environment, const TrainerOutput& output);

/// Local. What `tessera predict` asks: the run's model, alone in this process. Throws as
/// Registry::make_predictor, and CheckpointError.
std::unique_ptr<Predictor> load_predictor(const TrainedRun& run, const Registry& registry,
                                          const Logger& logger);

}  // namespace tessera::train
