#include "engine/optimizer/optimizer_setup.h"

#include <unordered_map>

#include "engine/config/optimizer.h"

namespace tessera {
namespace {

using kernels::Hyper;
using kernels::OptimizerKind;

OptimizerKind kind_of(const AdamOptions&) { return OptimizerKind::kAdam; }
OptimizerKind kind_of(const AdamWOptions&) { return OptimizerKind::kAdamW; }
OptimizerKind kind_of(const SGDOptions&) { return OptimizerKind::kSGD; }
OptimizerKind kind_of(const AdagradOptions&) { return OptimizerKind::kAdagrad; }
OptimizerKind kind_of(const RMSpropOptions&) { return OptimizerKind::kRMSprop; }
OptimizerKind kind_of(const LionOptions&) { return OptimizerKind::kLion; }
OptimizerKind kind_of(const LambOptions&) { return OptimizerKind::kLamb; }
OptimizerKind kind_of(const MuonOptions&) { return OptimizerKind::kMuon; }
OptimizerKind kind_of(const AdafactorOptions&) { return OptimizerKind::kAdafactor; }
OptimizerKind kind_of(const AdamW8bitOptions&) { return OptimizerKind::kAdamW8bit; }

kernels::AdjustLr adjust_lr_of(const std::string& name) {
  if (name == "match_rms_adamw") return kernels::AdjustLr::kMatchRmsAdamW;
  if (name == "spectral_unclamped") return kernels::AdjustLr::kSpectralUnclamped;
  return kernels::AdjustLr::kOriginal;
}

/// Every option that the type has, under the same name.
template <class Options>
Hyper hyper_of(const Options& o) {
  Hyper hyper{.lr = o.lr, .weight_decay = o.weight_decay};
  if constexpr (requires { o.beta1; }) hyper.beta1 = o.beta1, hyper.beta2 = o.beta2;
  if constexpr (requires { o.eps; }) hyper.eps = o.eps;
  if constexpr (requires { o.bias_correction; }) hyper.bias_correction = o.bias_correction;
  if constexpr (requires { o.momentum; }) hyper.momentum = o.momentum;
  if constexpr (requires { o.nesterov; }) hyper.nesterov = o.nesterov;
  if constexpr (requires { o.dampening; }) hyper.dampening = o.dampening;
  if constexpr (requires { o.lr_decay; }) hyper.lr_decay = o.lr_decay;
  if constexpr (requires { o.alpha; }) hyper.alpha = o.alpha, hyper.centered = o.centered;
  if constexpr (requires { o.amsgrad; }) hyper.amsgrad = o.amsgrad;
  if constexpr (requires { o.maximize; }) hyper.maximize = o.maximize;
  if constexpr (requires { o.max_coeff; }) hyper.max_coeff = o.max_coeff, hyper.min_coeff = o.min_coeff;
  if constexpr (requires { o.beta2_decay; })
    hyper.beta2_decay = o.beta2_decay, hyper.eps = o.eps1, hyper.eps2 = o.eps2, hyper.d = o.d;
  if constexpr (requires { o.optim_bits; })
    hyper.optim_bits = o.optim_bits, hyper.min_8bit_size = o.min_8bit_size;
  if constexpr (requires { o.use_muon; }) {
    hyper.use_muon = o.use_muon;
    hyper.adam_lr_ratio = o.adam_lr_ratio;
    hyper.ns_steps = o.ns_steps;
    hyper.adjust_lr = adjust_lr_of(o.adjust_lr_fn);
  }
  return hyper;
}

}  // namespace

bool glob_match(const std::string& pattern, const std::string& name) {
  // Backtracks to the last `*` only, so the time is bounded by the product of the lengths.
  size_t p = 0, n = 0, star = std::string::npos, resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

OptimizerSetup set_up_optimizer(const OptimizerConfig& config) {
  OptimizerSetup setup;
  setup.kind = std::visit([](const auto& options) { return kind_of(options); }, config.options);
  for (const OptimizerOptions& group : config::group_options(config))
    setup.groups.push_back(std::visit([](const auto& options) { return hyper_of(options); }, group));
  std::unordered_map<std::string, size_t> by_name;
  for (size_t i = 0; i < config.param_groups.size(); ++i)
    for (const std::string& name : config.param_groups[i].parameters) by_name.emplace(name, i);
  setup.group_of = [groups = config.param_groups, by_name](const std::string& parameter) {
    const auto named = by_name.find(parameter);
    const size_t end = named == by_name.end() ? groups.size() : named->second;
    for (size_t i = 0; i < end; ++i)
      for (const std::string& pattern : groups[i].match)
        if (glob_match(pattern, parameter)) return static_cast<int>(i) + 1;
    return named == by_name.end() ? 0 : static_cast<int>(end) + 1;
  };
  return setup;
}

}  // namespace tessera
