// The number of optimizer steps of a run, and after which of them something is due.
#pragma once

#include <cstdint>
#include <optional>

#include "train/run/run_checkpoints.h"
#include "train/task/sampler.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

/// Whether `count` steps or epochs is a positive multiple of `every`; `every` 0: never.
inline bool is_due(int64_t count, int64_t every) { return every > 0 && count > 0 && count % every == 0; }

/// Trainer.max_steps, or the steps of trainer.epochs. `resumed_at`: the position of a resumed run; the
/// rest of its epochs is counted in steps of the current batch size, which may differ from the earlier one.
/// Throws ConfigError if the number overflows.
int64_t total_steps(const TrainerConfig& trainer, const TrainSampler& sampler,
                    const std::optional<Position>& resumed_at = std::nullopt);

}  // namespace tessera::train
