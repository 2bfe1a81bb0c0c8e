#include "engine/optimizer_setup.h"

#include <map>

#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

using kernels::Hyper;
using kernels::OptimizerKind;

OptimizerKind kind_of(const std::string& type) {
  static const std::map<std::string, OptimizerKind> kinds{
      {"Adam", OptimizerKind::kAdam},       {"AdamW", OptimizerKind::kAdamW}, {"SGD", OptimizerKind::kSGD},
      {"Adagrad", OptimizerKind::kAdagrad}, {"Lion", OptimizerKind::kLion},   {"LAMB", OptimizerKind::kLamb}};
  const auto found = kinds.find(type);
  if (found == kinds.end())
    throw ConfigError(str("optimizer.type: ", type, " is not an optimizer Tessera has"));
  return found->second;
}

void apply(Hyper& hyper, const std::map<std::string, double>& params) {
  const std::map<std::string, double Hyper::*> numbers{{"lr", &Hyper::lr},
                                                       {"beta1", &Hyper::beta1},
                                                       {"beta2", &Hyper::beta2},
                                                       {"eps", &Hyper::eps},
                                                       {"weight_decay", &Hyper::weight_decay},
                                                       {"momentum", &Hyper::momentum},
                                                       {"dampening", &Hyper::dampening},
                                                       {"lr_decay", &Hyper::lr_decay},
                                                       {"max_coeff", &Hyper::max_coeff},
                                                       {"min_coeff", &Hyper::min_coeff}};
  for (const auto& [name, value] : params) {
    if (const auto number = numbers.find(name); number != numbers.end()) {
      hyper.*number->second = value;
    } else if (name == "nesterov") {
      hyper.nesterov = value != 0;
    } else if (name == "bias_correction") {
      hyper.bias_correction = value != 0;
    } else {
      throw ConfigError(str("optimizer.params.", name, ": no optimizer has this parameter"));
    }
  }
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
  setup.kind = kind_of(config.type);
  Hyper base;
  apply(base, config.params);
  setup.groups.push_back(base);
  for (const ParamGroupConfig& group : config.param_groups) {
    Hyper hyper = base;
    apply(hyper, group.params);
    setup.groups.push_back(hyper);
  }
  setup.group_of = [groups = config.param_groups](const std::string& parameter) {
    for (size_t i = 0; i < groups.size(); ++i)
      for (const std::string& pattern : groups[i].match)
        if (glob_match(pattern, parameter)) return static_cast<int>(i) + 1;
    return 0;
  };
  return setup;
}

}  // namespace tessera
