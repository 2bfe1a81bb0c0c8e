// TrainerState: the contents of trainer_state.json, a run's progress and its records so far, under the names
// of transformers.TrainerState.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "train/run/run_checkpoints.h"

namespace tessera::train {

struct TrainerState {
  int64_t global_step = 0;
  int64_t max_steps = 0;
  double epoch = 0;             ///< epochs done
  double num_train_epochs = 0;  ///< epochs of the whole run
  int64_t logging_steps = 0;
  std::optional<Best> best;
  std::string checkpoints;  ///< the folder that holds best->tag
  std::optional<EarlyStoppingState> early_stopping;
};

/// `log_history`: the records of metrics.jsonl.
nlohmann::ordered_json to_json(const TrainerState& state,
                               const std::vector<nlohmann::ordered_json>& log_history);

}  // namespace tessera::train
