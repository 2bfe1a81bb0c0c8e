#include "train/run/trainer_state.h"

#include <nlohmann/json.hpp>

namespace tessera::train {

using nlohmann::ordered_json;

ordered_json to_json(const TrainerState& state, const std::vector<ordered_json>& log_history) {
  ordered_json json;
  json["best_global_step"] = state.best ? ordered_json(state.best->step) : ordered_json(nullptr);
  json["best_metric"] = state.best ? ordered_json(state.best->value) : ordered_json(nullptr);
  json["best_model_checkpoint"] =
      state.best ? ordered_json(state.checkpoints + "/" + state.best->tag) : ordered_json(nullptr);
  json["epoch"] = state.epoch;
  json["global_step"] = state.global_step;
  json["max_steps"] = state.max_steps;
  json["num_train_epochs"] = state.num_train_epochs;
  json["logging_steps"] = state.logging_steps;
  if (state.early_stopping)
    json["stateful_callbacks"] = {
        {"EarlyStoppingCallback",
         {{"attributes", {{"early_stopping_patience_counter", state.early_stopping->num_stale}}}}}};
  json["log_history"] = log_history;
  return json;
}

}  // namespace tessera::train
