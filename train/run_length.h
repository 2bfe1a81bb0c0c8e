// How many optimizer steps a run has.
#pragma once

#include <cstdint>
#include <optional>

#include "train/run_checkpoints.h"
#include "train/sampler.h"
#include "train/trainer_config.h"

namespace tessera::train {

/// Local. trainer.max_steps, or the steps of trainer.epochs. `begun`: where a run that goes on stands. Epochs are passes over the data, so
/// with another batch size than before what is left of them is another number of steps. Throws ConfigError for more than can be counted.
int64_t total_steps(const TrainerConfig& trainer, const TrainSampler& sampler, const std::optional<Position>& begun = std::nullopt);

}  // namespace tessera::train
