// LrSchedule: the learning rate of every optimizer step, as a pure function of how many steps were applied.
// There is nothing to save or restore: a resumed run asks for the same step and gets the same rate.
//
// WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest have the results of DeepSpeed 0.19's
// deepspeed/runtime/lr_schedules.py; StepLR and CosineAnnealingLR are torch.optim.lr_scheduler's. (OneCycle
// is DeepSpeed's: its edges do not depend on the total number of steps as torch's OneCycleLR does.)
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/config/options.h"

namespace tessera {

/// What OneCycle with cycle_momentum sets in optimizers that have betas (Adam, AdamW, LAMB, Lion).
struct Betas {
  double beta1 = 0;
  double beta2 = 0;
};

/// Computes the learning rate of a step. Immutable; copies share one definition. Thread-safe.
class LrSchedule {
 public:
  /// `options`: as validated() has checked them, with total_num_steps and warmup_num_steps filled in.
  /// `base_lrs`: each param group's own rate (optimizer.params.lr). `steps_per_epoch`: optimizer steps in one
  /// epoch, 0 when unknown; only schedules that count epochs need it. Throws ConfigError when the number of
  /// steps or epochs is not known.
  LrSchedule(const ScheduleOptions& options, std::vector<double> base_lrs, int64_t steps_per_epoch = 0);

  /// Rate of the next optimizer step when `num_steps` have been applied: lr(0) is the first step's.
  /// Steps skipped because of non-finite gradients are not applied and so do not advance it.
  double lr(int64_t num_steps, size_t group = 0) const;

  /// Momentum cycled along with the rate (OneCycle): replaces the group's betas for that
  /// step. As in DeepSpeed, beta2 is then 0.99, the first step has cycle_min_mom, and
  /// decay_mom_rate > 0 raises beta1 without a bound.
  std::optional<Betas> betas(int64_t num_steps, size_t group = 0) const;

  size_t num_groups() const { return num_groups_; }

  class Formula;

 private:
  std::shared_ptr<const Formula> formula_;
  size_t num_groups_ = 0;
};

}  // namespace tessera
