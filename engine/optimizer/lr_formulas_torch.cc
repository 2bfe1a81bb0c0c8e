// The formulas of torch.optim.lr_scheduler, and the constant rate.
#include <cmath>
#include <numbers>

#include "engine/optimizer/lr_formulas.h"

namespace tessera::schedule {
namespace {

class Constant : public LrSchedule::Formula {
 public:
  Constant(const ConstantLrOptions&, const Groups& groups) : base_(groups.base_lrs) {}
  double lr(int64_t, size_t group) const override { return base_[group]; }

 private:
  Rates base_;
};

/// Optimizer steps in one interval. DeepSpeed's engine steps torch's schedulers once per optimizer step, so
/// that is the interval, unless "interval": "epoch" (our own key).
template <class Options>
int64_t interval_steps(const Options& options, const Groups& groups) {
  if (options.interval == "step") return 1;
  if (groups.steps_per_epoch <= 0)
    fail(Options::kName, "interval",
         "counts epochs, but the number of steps in an epoch is not known; expected \"step\"");
  return groups.steps_per_epoch;
}

class StepLr : public LrSchedule::Formula {
 public:
  StepLr(const StepLrOptions& options, const Groups& groups)
      : options_(options), base_(groups.base_lrs), interval_(interval_steps(options, groups)) {}

  double lr(int64_t num_steps, size_t group) const override {
    const int64_t num_decays = num_steps / interval_ / options_.step_size;
    return base_[group] * std::pow(options_.gamma, static_cast<double>(num_decays));
  }

 private:
  StepLrOptions options_;
  Rates base_;
  int64_t interval_;
};

/// Loshchilov and Hutter, "SGDR", arXiv:1608.03983, without restarts: past T_max the cosine continues, as
/// torch's does.
class CosineAnnealingLr : public LrSchedule::Formula {
 public:
  CosineAnnealingLr(const CosineAnnealingLrOptions& options, const Groups& groups)
      : options_(options), base_(groups.base_lrs), interval_(interval_steps(options, groups)) {}

  double lr(int64_t num_steps, size_t group) const override {
    // The cosine has the period 2 T_max: small arguments keep it exact however long the run.
    const int64_t t_max = options_.T_max;
    const auto phase = static_cast<double>(num_steps / interval_ % (2 * t_max));
    const double cosine = std::cos(std::numbers::pi * phase / static_cast<double>(t_max));
    return options_.eta_min + (base_[group] - options_.eta_min) * (1 + cosine) / 2;
  }

 private:
  CosineAnnealingLrOptions options_;
  Rates base_;
  int64_t interval_;
};

}  // namespace

FormulaPtr make_formula(const ConstantLrOptions& options, const Groups& groups) {
  return std::make_shared<Constant>(options, groups);
}
FormulaPtr make_formula(const StepLrOptions& options, const Groups& groups) {
  return std::make_shared<StepLr>(options, groups);
}
FormulaPtr make_formula(const CosineAnnealingLrOptions& options, const Groups& groups) {
  return std::make_shared<CosineAnnealingLr>(options, groups);
}

}  // namespace tessera::schedule
