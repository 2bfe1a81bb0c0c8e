// The options of every optimizer and every learning-rate schedule, with their defaults: DeepSpeed's
// (deepspeed/ops/adam/fused_adam.py, fused_lamb.py, fused_lion.py, runtime/lr_schedules.py) and torch.optim's
// (SGD, Adagrad, RMSprop, lr_scheduler.StepLR, CosineAnnealingLR). Fields have the names of the keys in
// optimizer.params and scheduler.params; keys_optimizer.cc and keys_schedule.cc have a table of fields for
// each struct.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// ------------------------------------------------------------------------------------------- optimizers

/// Adam with the weight decay added to the gradient (L2), as torch.optim.Adam, or decoupled from it, as
/// AdamW. In JSON, "Adam" means AdamW unless adam_w_mode is false, as in DeepSpeed.
template <bool kDecoupled>
struct AdamOptionsOf {
  static constexpr const char* kName = kDecoupled ? "AdamW" : "Adam";
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  ///< "betas"
  double eps = 1e-8;
  double weight_decay = 0;
  bool bias_correction = true;
  bool amsgrad = false;
  bool maximize = false;
  bool operator==(const AdamOptionsOf&) const = default;
};
using AdamOptions = AdamOptionsOf<false>;
using AdamWOptions = AdamOptionsOf<true>;

struct SGDOptions {
  static constexpr const char* kName = "SGD";
  double lr = 1e-3;
  double weight_decay = 0;
  double momentum = 0, dampening = 0;
  bool nesterov = false;
  bool maximize = false;
  bool operator==(const SGDOptions&) const = default;
};

struct AdagradOptions {
  static constexpr const char* kName = "Adagrad";
  double lr = 1e-2;
  double eps = 1e-10;
  double weight_decay = 0;
  double lr_decay = 0;
  bool maximize = false;
  bool operator==(const AdagradOptions&) const = default;
};

struct RMSpropOptions {
  static constexpr const char* kName = "RMSprop";
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;
  bool operator==(const RMSpropOptions&) const = default;
};

struct LionOptions {
  static constexpr const char* kName = "Lion";
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  ///< "betas"
  double weight_decay = 0;
  bool operator==(const LionOptions&) const = default;
};

struct LambOptions {
  static constexpr const char* kName = "LAMB";
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  ///< "betas"
  double eps = 1e-8;
  double weight_decay = 0;
  bool bias_correction = true;
  double max_coeff = 10, min_coeff = 0.01;  ///< bounds of the trust ratio
  bool operator==(const LambOptions&) const = default;
};

/// Muon for matrices, AdamW for the other parameters: zero/optimizer/muon.h. Defaults as in DeepSpeed.
struct MuonOptions {
  static constexpr const char* kName = "Muon";
  double lr = 0.02;
  double adam_lr_ratio = 0.015;  ///< AdamW's rate is lr times this; "adam_lr" in JSON is the rate itself
  double momentum = 0.95;
  bool nesterov = true;
  int64_t ns_steps = 5;
  std::string adjust_lr_fn =
      "original";  ///< or "match_rms_adamw", "spectral_unclamped", as torch.optim.Muon's
  double weight_decay = 0;
  double beta1 = 0.9, beta2 = 0.95;  ///< AdamW's, as is eps
  double eps = 1e-10;
  bool use_muon = true;  ///< of a param group: false leaves its matrices to AdamW
  bool operator==(const MuonOptions&) const = default;
};

/// torch.optim.Adafactor, on whole parameters: zero/optimizer/whole_formula.h.
struct AdafactorOptions {
  static constexpr const char* kName = "Adafactor";
  double lr = 1e-2;
  double beta2_decay = -0.8;
  double eps1 = 1.1920928955078125e-07, eps2 = 1e-3;  ///< "eps"; the first is torch's None: fp32's epsilon
  double d = 1;
  double weight_decay = 0;
  bool maximize = false;
  bool operator==(const AdafactorOptions&) const = default;
};

/// AdamW with 8-bit moments, as bitsandbytes' AdamW8bit: zero/kernels/adam_8bit.h. Defaults are
/// bitsandbytes'.
struct AdamW8bitOptions {
  static constexpr const char* kName = "AdamW8bit";
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  ///< "betas"
  double eps = 1e-8;
  double weight_decay = 0.01;
  int64_t optim_bits = 8;
  int64_t min_8bit_size = 4096;
  bool operator==(const AdamW8bitOptions&) const = default;
};

using OptimizerOptions =
    std::variant<AdamOptions, AdamWOptions, SGDOptions, AdagradOptions, RMSpropOptions, LionOptions,
                 LambOptions, MuonOptions, AdafactorOptions, AdamW8bitOptions>;

// -------------------------------------------------------------------------------------------- schedules

/// One value for all param groups, or one for each: the first for the parameters in no group.
using PerGroup = std::vector<double>;

/// The optimizer's learning rate throughout.
struct ConstantLrOptions {
  static constexpr const char* kName = "";
  bool operator==(const ConstantLrOptions&) const = default;
};

/// The rising part of a schedule: keys warmup_num_steps, warmup_ratio and warmup_type.
struct WarmupOptions {
  int64_t num_steps = 1000;       ///< optimizer steps
  std::optional<double> ratio{};  ///< in place of num_steps: of the run's steps (fill_in_schedule())
  std::string type = "log";       ///< or "linear"
  bool operator==(const WarmupOptions&) const = default;
};

struct WarmupLrOptions {
  static constexpr const char* kName = "WarmupLR";
  PerGroup warmup_min_lr = {0};
  PerGroup warmup_max_lr = {};  ///< empty: the optimizer's lr
  WarmupOptions warmup = {};
  bool operator==(const WarmupLrOptions&) const = default;
};

struct WarmupDecayLrOptions {
  static constexpr const char* kName = "WarmupDecayLR";
  std::optional<int64_t> total_num_steps{};  ///< unset ("auto"): the run's steps (fill_in_schedule())
  PerGroup warmup_min_lr = {0};
  PerGroup warmup_max_lr = {1e-3};  ///< empty: the optimizer's lr
  WarmupOptions warmup = {};
  bool operator==(const WarmupDecayLrOptions&) const = default;
};

struct WarmupCosineLrOptions {
  static constexpr const char* kName = "WarmupCosineLR";
  std::optional<int64_t> total_num_steps{};  ///< unset ("auto"): the run's steps (fill_in_schedule())
  double warmup_min_ratio = 0, cos_min_ratio = 1e-4;
  WarmupOptions warmup = {};
  bool operator==(const WarmupCosineLrOptions&) const = default;
};

struct OneCycleOptions {
  static constexpr const char* kName = "OneCycle";
  PerGroup cycle_min_lr = {}, cycle_max_lr = {};  ///< required
  double decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size{};  ///< unset: as the first
  int64_t cycle_first_stair_count = 0;
  std::optional<int64_t> cycle_second_stair_count{};  ///< unset: as the first
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  PerGroup cycle_min_mom = {0.8}, cycle_max_mom = {0.9};
  double decay_mom_rate = 0;
  bool operator==(const OneCycleOptions&) const = default;
};

struct LrRangeTestOptions {
  static constexpr const char* kName = "LRRangeTest";
  PerGroup lr_range_test_min_lr = {1e-3};
  int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;
  bool operator==(const LrRangeTestOptions&) const = default;
};

struct StepLrOptions {
  static constexpr const char* kName = "StepLR";
  std::string interval = "step";  ///< what step_size counts: optimizer steps, or "epoch"
  int64_t step_size = 0;          ///< required
  double gamma = 0.1;
  bool operator==(const StepLrOptions&) const = default;
};

struct CosineAnnealingLrOptions {
  static constexpr const char* kName = "CosineAnnealingLR";
  std::string interval = "step";  ///< what T_max counts: optimizer steps, or "epoch"
  int64_t T_max = 0;              ///< required
  double eta_min = 0;
  bool operator==(const CosineAnnealingLrOptions&) const = default;
};

using ScheduleOptions =
    std::variant<ConstantLrOptions, WarmupLrOptions, WarmupDecayLrOptions, WarmupCosineLrOptions,
                 OneCycleOptions, LrRangeTestOptions, StepLrOptions, CosineAnnealingLrOptions>;

/// What several schedules have: null in the others.
inline WarmupOptions* warmup_of(ScheduleOptions& schedule) {
  return std::visit(
      [](auto& options) -> WarmupOptions* {
        if constexpr (requires { options.warmup; }) return &options.warmup;
        return nullptr;
      },
      schedule);
}
inline std::optional<int64_t>* total_num_steps_of(ScheduleOptions& schedule) {
  return std::visit(
      [](auto& options) -> std::optional<int64_t>* {
        if constexpr (requires { options.total_num_steps; }) return &options.total_num_steps;
        return nullptr;
      },
      schedule);
}
/// Whether the schedule counts epochs, not optimizer steps.
inline bool counts_epochs(const ScheduleOptions& schedule) {
  return std::visit(
      [](const auto& options) {
        if constexpr (requires { options.interval; }) return options.interval == "epoch";
        return false;
      },
      schedule);
}

// --------------------------------------------------------------------------------------------- by name

/// "AdamW", "WarmupLR" …: the type, as optimizer.type and scheduler.type have it.
template <class... Types>
std::string type_of(const std::variant<Types...>& options) {
  return std::visit([](const auto& alternative) { return std::string(alternative.kName); }, options);
}

/// Every alternative of a variant of options, with its defaults.
template <class Variant>
std::vector<Variant> all_types() {
  return []<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::vector<Variant>{Variant(std::in_place_index<kIndex>)...};
  }(std::make_index_sequence<std::variant_size_v<Variant>>());
}

/// The alternative of this name (in its canonical spelling), with its defaults; nothing if there is
/// none.
template <class Variant>
std::optional<Variant> options_named(std::string_view type) {
  for (Variant& options : all_types<Variant>())
    if (type_of(options) == type) return options;
  return std::nullopt;
}

}  // namespace tessera
