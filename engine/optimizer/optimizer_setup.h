// Turns OptimizerConfig into what the sharded optimizer takes: a kind of update rule and, for each param
// group, its hyper-parameters.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "zero/kernels/kernels.h"

namespace tessera {

struct OptimizerSetup {
  kernels::OptimizerKind kind;
  std::vector<kernels::Hyper> groups;  ///< [0]: for parameters in no group; [i + 1]: param_groups[i]
  std::function<int(const std::string& parameter)> group_of;
};

/// `config`: as validated() has checked it.
OptimizerSetup set_up_optimizer(const OptimizerConfig& config);

/// Calls visit(name, member) for every option of a group, by the configuration's names. One that is added to
/// Hyper does not compile before it is here.
template <class Hyper, class Visit>
void visit_options(Hyper& hyper, const Visit& visit) {
  auto& [lr, beta1, beta2, eps, weight_decay, momentum, dampening, nesterov, lr_decay, alpha, centered,
         amsgrad, maximize, bias_correction, max_coeff, min_coeff, use_muon, adam_lr_ratio, ns_steps,
         adjust_lr, beta2_decay, eps2, d, optim_bits, min_8bit_size] = hyper;
  visit("lr", lr);
  visit("betas[0]", beta1);
  visit("betas[1]", beta2);
  visit("eps", eps);
  visit("weight_decay", weight_decay);
  visit("momentum", momentum);
  visit("dampening", dampening);
  visit("nesterov", nesterov);
  visit("lr_decay", lr_decay);
  visit("alpha", alpha);
  visit("centered", centered);
  visit("amsgrad", amsgrad);
  visit("maximize", maximize);
  visit("bias_correction", bias_correction);
  visit("max_coeff", max_coeff);
  visit("min_coeff", min_coeff);
  visit("use_muon", use_muon);
  visit("adam_lr_ratio", adam_lr_ratio);
  visit("ns_steps", ns_steps);
  visit("adjust_lr", adjust_lr);
  visit("beta2_decay", beta2_decay);
  visit("eps2", eps2);
  visit("d", d);
  visit("optim_bits", optim_bits);
  visit("min_8bit_size", min_8bit_size);
}

/// Shell-style: `*` any run of characters, `?` one.
bool glob_match(const std::string& pattern, const std::string& name);

}  // namespace tessera
