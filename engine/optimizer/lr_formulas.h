// The interface between LrSchedule and the formulas of the schedules: DeepSpeed's are in
// lr_formulas_deepspeed.cc, torch's in lr_formulas_torch.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/config/options.h"
#include "engine/optimizer/lr_schedule.h"

namespace tessera {

/// One schedule. Immutable, so thread-safe. See LrSchedule::lr() and betas().
class LrSchedule::Formula {
 public:
  virtual ~Formula() = default;
  virtual double lr(int64_t num_steps, size_t group) const = 0;
  virtual std::optional<Betas> betas(int64_t, size_t) const { return std::nullopt; }
};

namespace schedule {

using Rates = std::vector<double>;  ///< by param group
using FormulaPtr = std::shared_ptr<const LrSchedule::Formula>;

/// What a schedule is made for.
struct Groups {
  Rates base_lrs;
  int64_t steps_per_epoch;

  /// The same value for all groups, or one for each.
  Rates each(const PerGroup& values) const;
};

/// Throws ConfigError about scheduler.params.KEY.
[[noreturn]] void fail(const char* type, const char* key, const char* problem);

// Throw ConfigError when the number of steps or epochs is not known.
FormulaPtr make_formula(const ConstantLrOptions& options, const Groups& groups);
FormulaPtr make_formula(const WarmupLrOptions& options, const Groups& groups);
FormulaPtr make_formula(const WarmupDecayLrOptions& options, const Groups& groups);
FormulaPtr make_formula(const WarmupCosineLrOptions& options, const Groups& groups);
FormulaPtr make_formula(const OneCycleOptions& options, const Groups& groups);
FormulaPtr make_formula(const LrRangeTestOptions& options, const Groups& groups);
FormulaPtr make_formula(const StepLrOptions& options, const Groups& groups);
FormulaPtr make_formula(const CosineAnnealingLrOptions& options, const Groups& groups);

}  // namespace schedule
}  // namespace tessera
