#include "engine/client_optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/optimizer.h"

namespace tessera {
namespace {

namespace optim = torch::optim;

void refuse(bool is_set, const optim::Optimizer& optimizer, const char* option, const char* why) {
  if (is_set) throw ConfigError(str(c10::demangle(typeid(optimizer).name()), ": ", option, ": ", why));
}

/// Returns the options of torch's Adam and AdamW as ours.
template <class Ours, class Theirs>
OptimizerOptions adam_options(const Theirs& o) {
  const auto [beta1, beta2] = o.betas();
  return Ours{.lr = o.lr(),
              .beta1 = beta1,
              .beta2 = beta2,
              .eps = o.eps(),
              .weight_decay = o.weight_decay(),
              .amsgrad = o.amsgrad()};
}

OptimizerOptions options_of(const optim::OptimizerOptions& options, const optim::Optimizer& optimizer) {
  if (typeid(optimizer) == typeid(optim::Adam))
    return adam_options<AdamOptions>(dynamic_cast<const optim::AdamOptions&>(options));
  if (typeid(optimizer) == typeid(optim::AdamW))
    return adam_options<AdamWOptions>(dynamic_cast<const optim::AdamWOptions&>(options));
  if (typeid(optimizer) == typeid(optim::SGD)) {
    const auto& o = dynamic_cast<const optim::SGDOptions&>(options);
    return SGDOptions{.lr = o.lr(),
                      .weight_decay = o.weight_decay(),
                      .momentum = o.momentum(),
                      .dampening = o.dampening(),
                      .nesterov = o.nesterov()};
  }
  if (typeid(optimizer) == typeid(optim::Adagrad)) {
    const auto& o = dynamic_cast<const optim::AdagradOptions&>(options);
    refuse(o.initial_accumulator_value() != 0, optimizer, "initial_accumulator_value",
           "the sum of squares starts at 0; expected 0");
    return AdagradOptions{
        .lr = o.lr(), .eps = o.eps(), .weight_decay = o.weight_decay(), .lr_decay = o.lr_decay()};
  }
  if (typeid(optimizer) == typeid(optim::RMSprop)) {
    const auto& o = dynamic_cast<const optim::RMSpropOptions&>(options);
    return RMSpropOptions{.lr = o.lr(),
                          .alpha = o.alpha(),
                          .eps = o.eps(),
                          .weight_decay = o.weight_decay(),
                          .momentum = o.momentum(),
                          .centered = o.centered()};
  }
  throw ConfigError(str(c10::demangle(typeid(optimizer).name()),
                        " is not an optimizer Tessera has; expected torch::optim::Adam, AdamW, SGD, Adagrad "
                        "or RMSprop, or one of the configuration's"));
}

/// Adagrad creates its state in the constructor.
bool has_stepped(const optim::Optimizer& optimizer) {
  return std::any_of(optimizer.state().begin(), optimizer.state().end(), [](const auto& item) {
    const auto* adagrad = dynamic_cast<const optim::AdagradParamState*>(item.second.get());
    return !adagrad || adagrad->step() > 0;
  });
}

using Names = std::map<at::TensorImpl*, std::string>;

/// Tied parameters: the first name.
Names names_by_identity(const std::vector<zero::NamedTensor>& parameters) {
  Names names;
  for (const zero::NamedTensor& parameter : parameters)
    names.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.name);
  return names;
}

std::vector<std::string> names_of(const std::vector<at::Tensor>& group, const Names& names) {
  std::vector<std::string> found;
  for (const at::Tensor& tensor : group) {
    const auto name = names.find(tensor.unsafeGetTensorImpl());
    if (name == names.end())
      throw ConfigError(str("the optimizer has a tensor of shape ", describe_shape(tensor.sizes()),
                            " that is not a parameter of the model"));
    found.push_back(name->second);
  }
  return found;
}

}  // namespace

OptimizerConfig client_optimizer(const optim::Optimizer& optimizer,
                                 const std::vector<zero::NamedTensor>& parameters) {
  if (has_stepped(optimizer))
    throw ConfigError(
        "the optimizer has taken steps, and its state would be lost; expected one that has not "
        "(load_checkpoint() brings an engine's state)");
  const Names names = names_by_identity(parameters);
  OptimizerConfig config;
  bool is_first = true;
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    std::vector<std::string> members = names_of(group.params(), names);
    if (members.empty()) continue;  // as in DeepSpeed
    const OptimizerOptions options = options_of(group.options(), optimizer);
    const auto* const first = std::get_if<RMSpropOptions>(&config.options);
    const auto* const rmsprop = std::get_if<RMSpropOptions>(&options);
    if (!is_first && first && rmsprop)
      refuse(first->centered != rmsprop->centered, optimizer, "centered",
             "differs between its param groups; expected the same in all");
    if (std::exchange(is_first, false))
      config.options = options;
    else
      config.param_groups.push_back({.match = {},
                                     .params = config::changed_options(config.options, options),
                                     .parameters = std::move(members)});
  }
  if (is_first) throw ConfigError("the optimizer has no parameters");
  return config;
}

std::vector<std::string> untrained_by(const optim::Optimizer& optimizer,
                                      const std::vector<zero::NamedTensor>& parameters) {
  std::set<const at::TensorImpl*> in_a_group;
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups())
    for (const at::Tensor& tensor : group.params()) in_a_group.insert(tensor.unsafeGetTensorImpl());
  std::vector<std::string> untrained;
  for (const zero::NamedTensor& parameter : parameters)
    if (parameter.tensor.requires_grad() && !in_a_group.contains(parameter.tensor.unsafeGetTensorImpl()))
      untrained.push_back(parameter.name);
  return untrained;
}

}  // namespace tessera
