// How many optimizer steps a run has, and after which of them something is due.
#pragma once

#include <cstdint>
#include <optional>

#include "train/run_checkpoints.h"
#include "train/sampler.h"
#include "train/trainer_config.h"

namespace tessera::train {

/// Whether what happens every so many steps or epochs is to happen after the `count`th; `every` 0: never.
inline bool is_due(int64_t count, int64_t every) { return every > 0 && count > 0 && count % every == 0; }

/// Local. trainer.max_steps, or the steps of trainer.epochs. `begun`: where a run that goes on stands. Epochs
/// are passes over the data, so with another batch size than before what is left of them is another number of
/// steps. Throws ConfigError for more than can be counted.
int64_t total_steps(const TrainerConfig& trainer, const TrainSampler& sampler,
                    const std::optional<Position>& begun = std::nullopt);

}  // namespace tessera::train
