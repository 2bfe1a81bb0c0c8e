// TrainedRun: a trained run's folder (train/run/run_directory.h), read to evaluate its model or to predict
// with it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "train/report/evaluate.h"
#include "train/run.h"
#include "train/task/predictor.h"
#include "train/task/registry.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

struct TrainedRun {
  std::filesystem::path folder;       ///< of the run
  RunConfig config;                   ///< of config.json, without optimizer state and schedule
  std::filesystem::path checkpoints;  ///< the folder of the checkpoints, which may be a copy in the run's
  std::filesystem::path weights;      ///< folder/model.safetensors; empty: a checkpoint is used
  std::string tag;                    ///< of the checkpoint used; empty: the latest, when it is read
};

/// `folder`: of the run, of its checkpoints, or of one of them (train/run/run_path.h). `world_size`:
/// the number of ranks, which may differ from that of training. `overrides`: as given to --set. Uses the
/// weights of the checkpoint `tag`; without a tag those of the exported model, if `folder` is the run's and
/// has one; otherwise those of the latest checkpoint. Throws ConfigError if this is not a run's folder or has
/// no weights; CheckpointError.
TrainedRun open_run(const std::filesystem::path& folder, int world_size,
                    const std::vector<std::string>& overrides = {}, const std::string& tag = "");

/// Collective. Loads the run's weights into the engine, and returns the path of what it has loaded. Of a run
/// in progress, which may remove its latest checkpoint meanwhile, it then takes the next and says so. Throws
/// CheckpointError.
std::string load_trained_weights(const TrainedRun& run, Engine& engine, const Logger& logger);

/// Collective. For `tessera eval`: loads data and weights, and evaluates the task's evaluation set and test
/// set, with the run's ZeRO stage. Rank 0 prints the results and writes FOLDER/eval_results.json; not where
/// this user may not write, which is logged. Throws as run(), and CheckpointError.
std::vector<Evaluation> evaluate_run(const TrainedRun& run, const Registry& registry,
                                     const comm::Environment& environment, const TrainerOutput& output);

/// Loads the run's model in this one process, for `tessera predict`. Throws what Registry::make_predictor
/// throws, and CheckpointError.
std::unique_ptr<Predictor> load_predictor(const TrainedRun& run, const Registry& registry,
                                          const Logger& logger);

}  // namespace tessera::train
