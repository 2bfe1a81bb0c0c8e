// CheckpointState: the engine's state in a checkpoint besides tensors, as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/checkpoint/module_record.h"
#include "engine/optimizer/loss_scaler.h"

namespace tessera {

struct CheckpointState {
  int64_t global_steps = 0;
  int64_t skipped_steps = 0;
  int64_t micro_steps = 0;
  int64_t schedule_steps = 0;  ///< where the learning-rate schedule is; older checkpoints: applied steps
  double gradient_norm = 0;    ///< of the last step; not finite after a skipped one
  LossScaler::State loss_scaler;
  std::string optimizer;                 ///< "AdamW"
  std::vector<int64_t> parameter_steps;  ///< number of updates, by parameter in the manifest's order
  std::vector<bool> by_muon;  ///< whether Muon updates it, in the same order; empty: another optimizer
  ModuleRecord module;        ///< written; read by itself
  nlohmann::json config;      ///< resolved; for information, not read
  nlohmann::json client_state;
};

nlohmann::json to_json(const CheckpointState& state);
/// Throws CheckpointError naming `source`, key, what was found and
/// expected. `num_parameters`: the manifest's.
CheckpointState parse_checkpoint_state(const nlohmann::json& json, size_t num_parameters,
                                       const std::string& source);

}  // namespace tessera
