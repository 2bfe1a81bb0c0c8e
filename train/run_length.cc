#include "train/run_length.h"

#include "core/error.h"
#include "core/str.h"

namespace tessera::train {

int64_t total_steps(const TrainerConfig& trainer, const TrainSampler& sampler,
                    const std::optional<Position>& begun) {
  if (trainer.max_steps > 0) return trainer.max_steps;
  int64_t steps = 0;
  if (__builtin_mul_overflow(trainer.epochs, sampler.steps_per_epoch(), &steps)) {
    throw ConfigError(str("trainer.epochs: found ", trainer.epochs, ", which at ", sampler.steps_per_epoch(),
                          " steps an epoch is more than can be counted; expected fewer"));
  }
  if (!begun) return steps;
  const int64_t epochs_left = trainer.epochs - begun->data.epoch - 1;
  if (epochs_left < 0) return begun->steps_done;
  return begun->steps_done + sampler.steps_behind(begun->data.samples_into_epoch) +
         epochs_left * sampler.steps_per_epoch();
}

}  // namespace tessera::train
