#include "engine/optimizer/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "core/check.h"
#include "core/error.h"

namespace tessera {

/// One schedule. Immutable, so thread-safe. See LrSchedule::lr() and betas().
class LrSchedule::Formula {
 public:
  virtual ~Formula() = default;
  virtual double lr(int64_t num_steps, size_t group) const = 0;
  virtual std::optional<Betas> betas(int64_t, size_t) const { return std::nullopt; }
};

namespace {

using Rates = std::vector<double>;  // by param group
using FormulaPtr = std::shared_ptr<const LrSchedule::Formula>;

/// What a schedule is made for.
struct Groups {
  Rates base_lrs;
  int64_t steps_per_epoch;

  /// The same value for all groups, or one for each.
  Rates each(const PerGroup& values) const {
    TESSERA_CHECK(values.size() == 1 || values.size() == base_lrs.size());
    return values.size() == 1 ? Rates(base_lrs.size(), values[0]) : values;
  }
};

[[noreturn]] void fail(const char* type, const char* key, const char* problem) {
  throw ConfigError("scheduler.params.", key, ": ", problem, " (scheduler.type is ", type, ")");
}

// ------------------------------------------------------------------------------------------- DeepSpeed's
//
// These are objects with a counter that starts at -1: the engine uses what the constructor set for the first
// step and calls step() after each applied one. So the rate of the step that follows `num_steps` applied ones
// is the constructor's for 0, and get_lr() with the counter at num_steps - 1 after that. The consequences
// (WarmupLR starts with two steps at warmup_min_lr, WarmupCosineLR with one at zero) are kept, so that a
// configuration trains as with DeepSpeed.

template <class Options>
int64_t total_steps(const Options& options) {
  if (!options.total_num_steps)
    fail(Options::kName, "total_num_steps", "is missing; this schedule has no default for it");
  return *options.total_num_steps;
}

/// The rising part that the three warm-up schedules share: 0 to 1 over `num_steps` counts.
class Warmup {
 public:
  Warmup(const WarmupOptions& options, const char* type)
      : num_steps_(std::max<int64_t>(2, options.num_steps)),
        linear_(options.type == "linear"),
        inverse_log_(1.0 / std::log(static_cast<double>(num_steps_))) {
    if (options.ratio)
      fail(type, "warmup_ratio", "is of a number of steps that is not known; expected warmup_num_steps");
  }

  int64_t num_steps() const { return num_steps_; }
  bool done(int64_t counter) const { return counter >= num_steps_; }
  double gamma(int64_t counter) const {
    const auto count = static_cast<double>(counter);
    return linear_ ? count / static_cast<double>(num_steps_) : inverse_log_ * std::log(count + 1);
  }

 private:
  int64_t num_steps_;
  bool linear_;
  double inverse_log_;
};

/// WarmupLR, which stays at the top, and WarmupDecayLR.
class WarmupLr : public LrSchedule::Formula {
 public:
  template <class Options>
  WarmupLr(const Options& options, const Groups& groups)
      : warmup_(options.warmup, Options::kName),
        min_(groups.each(options.warmup_min_lr)),
        max_(options.warmup_max_lr.empty() ? groups.base_lrs : groups.each(options.warmup_max_lr)) {
    if constexpr (requires { options.total_num_steps; }) total_num_steps_ = total_steps(options);
  }

  double lr(int64_t num_steps, size_t group) const override {
    if (num_steps == 0) return min_[group];
    return min_[group] + (max_[group] - min_[group]) * gamma(num_steps - 1);
  }

 private:
  double gamma(int64_t counter) const {
    if (!warmup_.done(counter)) return warmup_.gamma(counter);
    if (!total_num_steps_) return 1.0;
    return std::max(0.0,
                    static_cast<double>(*total_num_steps_ - counter) /
                        static_cast<double>(std::max<int64_t>(1, *total_num_steps_ - warmup_.num_steps())));
  }

  Warmup warmup_;
  Rates min_;
  Rates max_;
  std::optional<int64_t> total_num_steps_;
};

class WarmupCosineLr : public LrSchedule::Formula {
 public:
  WarmupCosineLr(const WarmupCosineLrOptions& options, const Groups& groups)
      : warmup_(options.warmup, options.kName),
        base_(groups.base_lrs),
        total_num_steps_(total_steps(options)),
        min_ratio_(options.warmup_min_ratio),
        cos_min_ratio_(options.cos_min_ratio) {}

  double lr(int64_t num_steps, size_t group) const override {
    return num_steps == 0 ? 0.0 : base_[group] * ratio(num_steps - 1);
  }

 private:
  double ratio(int64_t counter) const {
    if (!warmup_.done(counter)) return min_ratio_ + warmup_.gamma(counter) * (1.0 - min_ratio_);
    const auto since = static_cast<double>(counter - warmup_.num_steps() + 1);
    const auto decay_steps =
        static_cast<double>(std::max<int64_t>(1, total_num_steps_ - warmup_.num_steps()));
    const double cosine = (1 + std::cos(std::numbers::pi * std::min(1.0, since / decay_steps))) / 2;
    return std::max(0.0, cos_min_ratio_ + (1.0 - cos_min_ratio_) * cosine);
  }

  Warmup warmup_;
  Rates base_;
  int64_t total_num_steps_;
  double min_ratio_;
  double cos_min_ratio_;
};

/// Smith, "A disciplined approach to neural network hyper-parameters",
/// arXiv:1803.09820: up, down, then decay.
class OneCycle : public LrSchedule::Formula {
 public:
  OneCycle(const OneCycleOptions& options, const Groups& groups)
      : options_(options),
        min_lr_(groups.each(options.cycle_min_lr)),
        max_lr_(groups.each(options.cycle_max_lr)),
        first_size_(static_cast<double>(options.cycle_first_step_size)),
        second_size_(
            static_cast<double>(options.cycle_second_step_size.value_or(options.cycle_first_step_size))),
        decay_size_(static_cast<double>(options.decay_step_size)),
        min_momentum_(groups.each(options.cycle_min_mom)),
        max_momentum_(groups.each(options.cycle_max_mom)) {}

  double lr(int64_t num_steps, size_t group) const override {
    if (num_steps == 0) return min_lr_[group];
    if (in_cycle(num_steps)) return min_lr_[group] + (max_lr_[group] - min_lr_[group]) * height(num_steps);
    if (decay_size_ == 0 || options_.decay_lr_rate == 0) return min_lr_[group];
    return min_lr_[group] / (1 + options_.decay_lr_rate * decay_interval(num_steps));
  }

  std::optional<Betas> betas(int64_t num_steps, size_t group) const override {
    if (!options_.cycle_momentum) return std::nullopt;
    return Betas{momentum(num_steps, group), 0.99};
  }

 private:
  double total_size() const { return first_size_ + second_size_; }
  bool in_cycle(int64_t num_steps) const { return static_cast<double>(num_steps - 1) < total_size(); }
  double decay_interval(int64_t num_steps) const {
    return (static_cast<double>(num_steps) - total_size()) / decay_size_;
  }

  double momentum(int64_t num_steps, size_t group) const {
    if (num_steps == 0) return min_momentum_[group];
    if (in_cycle(num_steps))
      return max_momentum_[group] - (max_momentum_[group] - min_momentum_[group]) * height(num_steps);
    if (decay_size_ == 0 || options_.decay_mom_rate == 0) return max_momentum_[group];
    return max_momentum_[group] * (1 + options_.decay_mom_rate * decay_interval(num_steps));
  }

  /// 0 at the ends of the cycle, 1 at its peak.
  double height(int64_t num_steps) const {
    const double total = total_size();
    const auto count = static_cast<double>(num_steps);
    const double x = 1.0 + count / total - std::floor(1 + count / total);
    const double peak = first_size_ / total;
    const bool rising = x <= peak;
    const int64_t first_stairs = options_.cycle_first_stair_count;
    const auto stairs =
        static_cast<double>(rising ? first_stairs : options_.cycle_second_stair_count.value_or(first_stairs));
    if (stairs == 0) return rising ? x / peak : (x - 1) / (peak - 1);
    // The position comes from the step count and not from x, whose rounding could drop a whole stair.
    const double in_this_cycle = std::fmod(count, total);
    const double position = in_this_cycle <= first_size_ ? in_this_cycle * stairs / first_size_
                                                         : (total - in_this_cycle) * stairs / second_size_;
    return std::floor(position) / stairs;
  }

  OneCycleOptions options_;
  Rates min_lr_;
  Rates max_lr_;
  double first_size_;
  double second_size_;
  double decay_size_;
  Rates min_momentum_;
  Rates max_momentum_;
};

class LrRangeTest : public LrSchedule::Formula {
 public:
  LrRangeTest(const LrRangeTestOptions& options, const Groups& groups)
      : options_(options), min_lr_(groups.each(options.lr_range_test_min_lr)) {}

  double lr(int64_t num_steps, size_t group) const override {
    const double interval =
        static_cast<double>(num_steps) / static_cast<double>(options_.lr_range_test_step_size);
    return min_lr_[group] * (1 + options_.lr_range_test_step_rate *
                                     (options_.lr_range_test_staircase ? std::floor(interval) : interval));
  }

 private:
  LrRangeTestOptions options_;
  Rates min_lr_;
};

// ---------------------------------------------------------------------- torch's, and the constant rate

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

FormulaPtr make_formula(const WarmupLrOptions& options, const Groups& groups) {
  return std::make_shared<WarmupLr>(options, groups);
}
FormulaPtr make_formula(const WarmupDecayLrOptions& options, const Groups& groups) {
  return std::make_shared<WarmupLr>(options, groups);
}
FormulaPtr make_formula(const WarmupCosineLrOptions& options, const Groups& groups) {
  return std::make_shared<WarmupCosineLr>(options, groups);
}
FormulaPtr make_formula(const OneCycleOptions& options, const Groups& groups) {
  return std::make_shared<OneCycle>(options, groups);
}
FormulaPtr make_formula(const LrRangeTestOptions& options, const Groups& groups) {
  return std::make_shared<LrRangeTest>(options, groups);
}
FormulaPtr make_formula(const ConstantLrOptions& options, const Groups& groups) {
  return std::make_shared<Constant>(options, groups);
}
FormulaPtr make_formula(const StepLrOptions& options, const Groups& groups) {
  return std::make_shared<StepLr>(options, groups);
}
FormulaPtr make_formula(const CosineAnnealingLrOptions& options, const Groups& groups) {
  return std::make_shared<CosineAnnealingLr>(options, groups);
}

}  // namespace

LrSchedule::LrSchedule(const ScheduleOptions& options, std::vector<double> base_lrs, int64_t steps_per_epoch)
    : num_groups_(base_lrs.size()) {
  TESSERA_CHECK(!base_lrs.empty());
  const Groups groups{std::move(base_lrs), steps_per_epoch};
  formula_ = std::visit([&](const auto& one) { return make_formula(one, groups); }, options);
}

double LrSchedule::lr(int64_t num_steps, size_t group) const {
  TESSERA_CHECK(num_steps >= 0 && group < num_groups_);
  return formula_->lr(num_steps, group);
}

std::optional<Betas> LrSchedule::betas(int64_t num_steps, size_t group) const {
  TESSERA_CHECK(num_steps >= 0 && group < num_groups_);
  return formula_->betas(num_steps, group);
}

}  // namespace tessera
