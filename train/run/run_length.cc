#include "train/run/run_length.h"

#include "core/error.h"

namespace tessera::train {

int64_t total_steps(const TrainerConfig& trainer, const TrainSampler& sampler,
                    const std::optional<Position>& resumed_at) {
  if (trainer.max_steps > 0) return trainer.max_steps;
  int64_t steps = 0;
  if (__builtin_mul_overflow(trainer.epochs, sampler.steps_per_epoch(), &steps)) {
    throw ConfigError("trainer.epochs: found ", trainer.epochs, ", which at ", sampler.steps_per_epoch(),
                      " steps an epoch is more than can be counted; expected fewer");
  }
  if (!resumed_at) return steps;
  const int64_t epochs_left = trainer.epochs - resumed_at->data.epoch - 1;
  if (epochs_left < 0) return resumed_at->steps_done;
  return resumed_at->steps_done + sampler.steps_remaining(resumed_at->data.samples_into_epoch) +
         epochs_left * sampler.steps_per_epoch();
}

}  // namespace tessera::train
