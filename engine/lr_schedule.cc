// The formulas. DeepSpeed's schedulers are objects with a counter that starts at -1: the engine uses what the
// constructor set for the first step and calls step() after each applied one. So the rate of the step that
// follows `num_steps` applied ones is the constructor's for 0 and get_lr() with the counter at num_steps - 1
// after that. The odd consequences (WarmupLR starts with two steps at warmup_min_lr, WarmupCosineLR with one
// at zero) are kept: a configuration must train here as it did there.
#include "engine/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/schedule_params.h"

namespace tessera {

class LrSchedule::Formula {
 public:
  virtual ~Formula() = default;
  virtual double lr(int64_t num_steps, size_t group) const = 0;
  virtual std::optional<Betas> betas(int64_t, size_t) const { return std::nullopt; }
};

namespace {

using Rates = std::vector<double>;

class Constant : public LrSchedule::Formula {
 public:
  explicit Constant(Rates base) : base_(std::move(base)) {}
  double lr(int64_t, size_t group) const override { return base_[group]; }

 private:
  Rates base_;
};

/// The rising part that the three warm-up schedules share: 0 to 1 over `num_steps` counts.
class Warmup {
 public:
  explicit Warmup(ScheduleParams& params)
      : num_steps_(std::max<int64_t>(2, params.integer("warmup_num_steps", 1000, 0))),
        linear_(params.word("warmup_type", "log", {"log", "linear"}) == "linear"),
        inverse_log_(1.0 / std::log(static_cast<double>(num_steps_))) {
    if (params.has("warmup_ratio"))
      params.fail("warmup_ratio", "is of a number of steps that is not known; expected warmup_num_steps");
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

class WarmupLr : public LrSchedule::Formula {
 public:
  enum class After { kHold, kDecay };

  WarmupLr(ScheduleParams& params, After after, const Rates& base)
      : warmup_(params), min_(params.per_group("warmup_min_lr", 0.0)), after_(after) {
    if (after == After::kDecay) {
      total_num_steps_ = params.required_integer("total_num_steps", 1);
      max_ = params.per_group("warmup_max_lr", 0.001);
    } else {
      max_ = params.has("warmup_max_lr") ? params.per_group("warmup_max_lr") : base;
    }
  }

  double lr(int64_t num_steps, size_t group) const override {
    if (num_steps == 0) return min_[group];
    return min_[group] + (max_[group] - min_[group]) * gamma(num_steps - 1);
  }

 private:
  double gamma(int64_t counter) const {
    if (!warmup_.done(counter)) return warmup_.gamma(counter);
    if (after_ == After::kHold) return 1.0;
    return std::max(0.0,
                    static_cast<double>(total_num_steps_ - counter) /
                        static_cast<double>(std::max<int64_t>(1, total_num_steps_ - warmup_.num_steps())));
  }

  Warmup warmup_;
  Rates min_;
  Rates max_;
  After after_;
  int64_t total_num_steps_ = 0;
};

class WarmupCosineLr : public LrSchedule::Formula {
 public:
  WarmupCosineLr(ScheduleParams& params, Rates base)
      : warmup_(params),
        base_(std::move(base)),
        total_num_steps_(params.required_integer("total_num_steps", 1)),
        min_ratio_(params.number("warmup_min_ratio", 0.0)),
        cos_min_ratio_(params.number("cos_min_ratio", 0.0001)) {}

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
  explicit OneCycle(ScheduleParams& params)
      : min_lr_(params.per_group("cycle_min_lr")),
        max_lr_(params.per_group("cycle_max_lr")),
        first_size_(params.number("cycle_first_step_size", 2000)),
        second_size_(params.number("cycle_second_step_size", first_size_)),
        first_stairs_(params.integer("cycle_first_stair_count", 0, 0)),
        second_stairs_(params.integer("cycle_second_stair_count", first_stairs_, 0)),
        decay_size_(params.number("decay_step_size", 0)),
        lr_decay_rate_(params.number("decay_lr_rate", 0)),
        momentum_decay_rate_(params.number("decay_mom_rate", 0)),
        min_momentum_(params.per_group("cycle_min_mom", 0.8)),
        max_momentum_(params.per_group("cycle_max_mom", 0.9)),
        cycle_momentum_(params.flag("cycle_momentum", true)) {
    if (first_size_ <= 0)
      params.fail("cycle_first_step_size", str("found ", first_size_, ", expected more than 0"));
    if (second_size_ < 0)
      params.fail("cycle_second_step_size", str("found ", second_size_, ", expected 0 or more"));
  }

  double lr(int64_t num_steps, size_t group) const override {
    if (num_steps == 0) return min_lr_[group];
    if (in_cycle(num_steps)) return min_lr_[group] + (max_lr_[group] - min_lr_[group]) * height(num_steps);
    if (decay_size_ == 0 || lr_decay_rate_ == 0) return min_lr_[group];
    return min_lr_[group] / (1 + lr_decay_rate_ * decay_interval(num_steps));
  }

  std::optional<Betas> betas(int64_t num_steps, size_t group) const override {
    if (!cycle_momentum_) return std::nullopt;
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
    if (decay_size_ == 0 || momentum_decay_rate_ == 0) return max_momentum_[group];
    return max_momentum_[group] * (1 + momentum_decay_rate_ * decay_interval(num_steps));
  }

  /// 0 at the ends of the cycle, 1 at its peak.
  double height(int64_t num_steps) const {
    const double total = total_size();
    const auto count = static_cast<double>(num_steps);
    const double x = 1.0 + count / total - std::floor(1 + count / total);
    const double peak = first_size_ / total;
    const bool rising = x <= peak;
    const auto stairs = static_cast<double>(rising ? first_stairs_ : second_stairs_);
    if (stairs == 0) return rising ? x / peak : (x - 1) / (peak - 1);
    // From the step count and not from x, whose rounding could drop a whole stair.
    const double in_this_cycle = std::fmod(count, total);
    const double position = in_this_cycle <= first_size_ ? in_this_cycle * stairs / first_size_
                                                         : (total - in_this_cycle) * stairs / second_size_;
    return std::floor(position) / stairs;
  }

  Rates min_lr_;
  Rates max_lr_;
  double first_size_;
  double second_size_;
  int64_t first_stairs_;
  int64_t second_stairs_;
  double decay_size_;
  double lr_decay_rate_;
  double momentum_decay_rate_;
  Rates min_momentum_;
  Rates max_momentum_;
  bool cycle_momentum_;
};

class LrRangeTest : public LrSchedule::Formula {
 public:
  explicit LrRangeTest(ScheduleParams& params)
      : min_lr_(params.per_group("lr_range_test_min_lr", 1e-3)),
        step_size_(params.integer("lr_range_test_step_size", 2000, 1)),
        step_rate_(params.number("lr_range_test_step_rate", 1.0)),
        staircase_(params.flag("lr_range_test_staircase", false)) {}

  double lr(int64_t num_steps, size_t group) const override {
    const double interval = static_cast<double>(num_steps) / static_cast<double>(step_size_);
    return min_lr_[group] * (1 + step_rate_ * (staircase_ ? std::floor(interval) : interval));
  }

 private:
  Rates min_lr_;
  int64_t step_size_;
  double step_rate_;
  bool staircase_;
};

/// DeepSpeed's engine calls a torch scheduler's step() after every optimizer step, so that is the unit of
/// step_size and T_max, unless "interval": "epoch" (our own key) says otherwise.
class Interval {
 public:
  Interval(ScheduleParams& params, int64_t steps_per_epoch) {
    if (params.word("interval", "step", {"step", "epoch"}) == "step") return;
    if (steps_per_epoch <= 0)
      params.fail("interval",
                  "counts epochs, but the number of steps in an epoch is not known; expected \"step\"");
    steps_ = steps_per_epoch;
  }
  int64_t count(int64_t num_steps) const { return num_steps / steps_; }

 private:
  int64_t steps_ = 1;
};

class StepLr : public LrSchedule::Formula {
 public:
  StepLr(ScheduleParams& params, Rates base, int64_t steps_per_epoch)
      : interval_(params, steps_per_epoch),
        base_(std::move(base)),
        step_size_(params.required_integer("step_size", 1)),
        gamma_(params.number("gamma", 0.1)) {}

  double lr(int64_t num_steps, size_t group) const override {
    return base_[group] * std::pow(gamma_, static_cast<double>(interval_.count(num_steps) / step_size_));
  }

 private:
  Interval interval_;
  Rates base_;
  int64_t step_size_;
  double gamma_;
};

/// Loshchilov and Hutter, "SGDR", arXiv:1608.03983, without restarts: past T_max
/// the cosine goes on, as torch's does.
class CosineAnnealingLr : public LrSchedule::Formula {
 public:
  CosineAnnealingLr(ScheduleParams& params, Rates base, int64_t steps_per_epoch)
      : interval_(params, steps_per_epoch),
        base_(std::move(base)),
        t_max_(params.required_integer("T_max", 1)),
        eta_min_(params.number("eta_min", 0.0)) {}

  double lr(int64_t num_steps, size_t group) const override {
    // The cosine has the period 2 T_max: small arguments keep it exact however long the run.
    const auto phase = static_cast<double>(interval_.count(num_steps) % (2 * t_max_));
    const double cosine = std::cos(std::numbers::pi * phase / static_cast<double>(t_max_));
    return eta_min_ + (base_[group] - eta_min_) * (1 + cosine) / 2;
  }

 private:
  Interval interval_;
  Rates base_;
  int64_t t_max_;
  double eta_min_;
};

/// DeepSpeed's and torch's constructors can start in the middle of a schedule;
/// here the step count says where it is.
void refuse_other_start(ScheduleParams& params, const std::string& key) {
  if (params.number(key, -1) != -1)
    params.fail(key, "starts in the middle of the schedule; expected -1 (a resumed run continues by itself)");
}

std::shared_ptr<const LrSchedule::Formula> make_formula(const SchedulerConfig& config, Rates base,
                                                        int64_t steps_per_epoch) {
  using Result = std::shared_ptr<const LrSchedule::Formula>;
  ScheduleParams params(config, base.size());
  const std::string& type = config.type;
  const bool from_torch = type == "StepLR" || type == "CosineAnnealingLR";
  if (!type.empty()) refuse_other_start(params, from_torch ? "last_epoch" : "last_batch_iteration");

  const Result result = [&]() -> Result {
    if (type.empty()) return std::make_shared<Constant>(base);
    if (type == "WarmupLR") return std::make_shared<WarmupLr>(params, WarmupLr::After::kHold, base);
    if (type == "WarmupDecayLR") return std::make_shared<WarmupLr>(params, WarmupLr::After::kDecay, base);
    if (type == "WarmupCosineLR") return std::make_shared<WarmupCosineLr>(params, base);
    if (type == "OneCycle") return std::make_shared<OneCycle>(params);
    if (type == "LRRangeTest") return std::make_shared<LrRangeTest>(params);
    if (type == "StepLR") return std::make_shared<StepLr>(params, base, steps_per_epoch);
    if (type == "CosineAnnealingLR")
      return std::make_shared<CosineAnnealingLr>(params, base, steps_per_epoch);
    throw ConfigError(str("scheduler.type: unknown schedule \"", type, "\"; accepted are ",
                          join(LrSchedule::types(), ", ")));
  }();
  params.reject_unread();
  return result;
}

}  // namespace

const std::vector<std::string_view>& LrSchedule::types() {
  static const std::vector<std::string_view> kTypes = {"WarmupLR",         "WarmupDecayLR", "WarmupCosineLR",
                                                       "OneCycle",         "LRRangeTest",   "StepLR",
                                                       "CosineAnnealingLR"};
  return kTypes;
}

LrSchedule::LrSchedule(const SchedulerConfig& config, std::vector<double> base_lrs, int64_t steps_per_epoch)
    : num_groups_(base_lrs.size()) {
  TESSERA_CHECK(!base_lrs.empty());
  formula_ = make_formula(config, std::move(base_lrs), steps_per_epoch);
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
