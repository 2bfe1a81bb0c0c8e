#include "engine/client_optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <typeinfo>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/optimizer.h"

namespace tessera {
namespace {

namespace optim = torch::optim;

void refuse(bool is_set, const optim::Optimizer& optimizer, const char* option, const char* why) {
  if (is_set) throw ConfigError(str(c10::demangle(typeid(optimizer).name()), ": ", option, ": ", why));
}

/// Of torch's Adam and AdamW.
template <class Ours, class Theirs>
OptimizerOptions adam_options(const Theirs& o, const optim::Optimizer& optimizer) {
  refuse(o.amsgrad(), optimizer, "amsgrad", "the AMSGrad variant is not built in; expected false");
  const auto [beta1, beta2] = o.betas();
  return Ours{.lr = o.lr(), .beta1 = beta1, .beta2 = beta2, .eps = o.eps(), .weight_decay = o.weight_decay()};
}

OptimizerOptions options_of(const optim::OptimizerOptions& options, const optim::Optimizer& optimizer) {
  if (typeid(optimizer) == typeid(optim::Adam))
    return adam_options<AdamOptions>(dynamic_cast<const optim::AdamOptions&>(options), optimizer);
  if (typeid(optimizer) == typeid(optim::AdamW))
    return adam_options<AdamWOptions>(dynamic_cast<const optim::AdamWOptions&>(options), optimizer);
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
  throw ConfigError(
      str(c10::demangle(typeid(optimizer).name()),
          " is not an optimizer Tessera has; expected torch::optim::Adam, AdamW, SGD or Adagrad, or one "
          "of the configuration's"));
}

/// Adagrad creates its state in the constructor.
bool has_stepped(const optim::Optimizer& optimizer) {
  return std::any_of(optimizer.state().begin(), optimizer.state().end(), [](const auto& item) {
    const auto* adagrad = dynamic_cast<const optim::AdagradParamState*>(item.second.get());
    return !adagrad || adagrad->step() > 0;
  });
}

/// The names of a group's parameters; each is marked in `in_a_group`.
std::vector<std::string> names_of(const std::vector<at::Tensor>& group,
                                  const std::map<at::TensorImpl*, std::string>& names,
                                  std::set<std::string>& in_a_group) {
  std::vector<std::string> found;
  for (const at::Tensor& tensor : group) {
    const auto name = names.find(tensor.unsafeGetTensorImpl());
    if (name == names.end())
      throw ConfigError(str("the optimizer has a tensor of shape ", describe_shape(tensor.sizes()),
                            " that is not a parameter of the model"));
    found.push_back(name->second);
    in_a_group.insert(name->second);
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
  std::map<at::TensorImpl*, std::string> names;  // tied parameters: the first name
  for (const zero::NamedTensor& parameter : parameters)
    names.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.name);

  OptimizerConfig config;
  std::set<std::string> in_a_group;
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    std::vector<std::string> match = names_of(group.params(), names, in_a_group);
    if (match.empty()) continue;  // as in DeepSpeed
    const OptimizerOptions options = options_of(group.options(), optimizer);
    if (in_a_group.size() == match.size())
      config.options = options;
    else
      config.param_groups.push_back(
          {.match = std::move(match), .params = config::changed_options(config.options, options)});
  }
  for (const zero::NamedTensor& parameter : parameters)
    if (parameter.tensor.requires_grad() &&
        !in_a_group.contains(names.at(parameter.tensor.unsafeGetTensorImpl())))
      throw ConfigError(
          str("parameter ", parameter.name,
              " is trainable and in no param group of the optimizer: add it to one, or freeze it with "
              "requires_grad_(false)"));
  return config;
}

}  // namespace tessera
