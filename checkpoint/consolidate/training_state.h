// TrainingState: what a checkpoint's `state` says of training, in the words of torch's optimizers, for
// writers of other programs' checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/sharded/manifest.h"

namespace tessera::checkpoint {

struct TrainingState {
  std::string optimizer;       ///< "AdamW", "SGD", …; empty: the checkpoint does not say
  std::vector<int64_t> steps;  ///< updates by parameter
  std::vector<nlohmann::json>
      groups;  ///< the options of each param group: lr, betas, …, with torch's own keys
  int64_t global_steps = 0;
  int64_t skipped_steps = 0;
  std::optional<int64_t> global_samples;
  nlohmann::json config = nlohmann::json::object();        ///< the resolved configuration
  nlohmann::json loss_scaler;                              ///< null: the loss was not scaled
  nlohmann::json lr_scheduler;                             ///< its state_dict; null: none
  nlohmann::json client_state = nlohmann::json::object();  ///< what the user's program added
  std::vector<std::string> notes;                          ///< what is not above, a line each
};

/// `scheduled_options`: see ConvertOptions; may be empty. Throws CheckpointError for a state that is not one.
TrainingState training_state(
    const Manifest& manifest, const std::string& source,
    const std::function<std::vector<nlohmann::json>(const Manifest&)>& scheduled_options);

/// Whether torch's optimizer has a state of this name for the parameters of a group with these options:
/// SGD has a "momentum_buffer" where it has momentum.
bool has_state(const nlohmann::json& group, const std::string& state);
/// Whether the states of this optimizer have a "step".
bool counts_steps(const std::string& optimizer);

}  // namespace tessera::checkpoint
