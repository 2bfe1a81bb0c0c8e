#include "engine/client_optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/optimizer.h"
#include "engine/torch_optimizer.h"

namespace tessera {
namespace {

namespace optim = torch::optim;

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
  throw std::logic_error("no formula");
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
      throw ConfigError("the optimizer has a tensor of shape ", describe_shape(tensor.sizes()),
                        " that is not a parameter of the model");
    found.push_back(name->second);
  }
  return found;
}

/// `options_of`: of a group.
template <class OptionsOf>
OptimizerConfig config_of(const optim::Optimizer& optimizer, const std::vector<zero::NamedTensor>& parameters,
                          OptionsOf&& options_of) {
  const Names names = names_by_identity(parameters);
  OptimizerConfig config;
  bool is_first = true;
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    std::vector<std::string> members = names_of(group.params(), names);
    if (members.empty()) continue;  // as in DeepSpeed
    const OptimizerOptions options = options_of(group.options());
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

}  // namespace

OptimizerConfig client_optimizer(const optim::Optimizer& optimizer,
                                 const std::vector<zero::NamedTensor>& parameters) {
  if (const std::string why = without_formula(optimizer); !why.empty()) throw ConfigError(why);
  if (has_stepped(optimizer))
    throw ConfigError(
        "the optimizer has taken steps, and its state would be lost; expected one that has not "
        "(load_checkpoint() brings an engine's state)");
  return config_of(optimizer, parameters,
                   [&](const optim::OptimizerOptions& options) { return options_of(options, optimizer); });
}

std::string without_formula(const optim::Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  const std::string name = c10::demangle(type.name());
  const std::array known = {&typeid(optim::Adam), &typeid(optim::AdamW), &typeid(optim::SGD),
                            &typeid(optim::Adagrad), &typeid(optim::RMSprop)};
  if (std::ranges::none_of(known, [&](const std::type_info* one) { return *one == type; }))
    return str(name, " has no formula here, as torch::optim::Adam, AdamW, SGD, Adagrad and RMSprop have");
  // Adagrad fills its sums in its constructor, and not always with what its groups say.
  for (const auto& [parameter, state] : optimizer.state())
    if (const auto* adagrad = dynamic_cast<const optim::AdagradParamState*>(state.get());
        adagrad && adagrad->step() == 0 && adagrad->sum().count_nonzero().item<int64_t>() > 0)
      return str(name, ": the formula's sum of squares starts at 0, and not at initial_accumulator_value");
  std::optional<bool> centered;
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups())
    if (const auto* rmsprop = dynamic_cast<const optim::RMSpropOptions*>(&group.options()); rmsprop) {
      if (centered.value_or(rmsprop->centered()) != rmsprop->centered())
        return str(name, ": centered is the same in all groups of the formula");
      centered = rmsprop->centered();
    }
  return "";
}

InitOptions with_client_optimizer(std::shared_ptr<optim::Optimizer> optimizer,
                                  const std::vector<zero::NamedTensor>& parameters, EngineConfig& config,
                                  const comm::Communicator& comm, const InitOptions& options,
                                  Division division) {
  if (optimizer == nullptr) throw ConfigError("the optimizer is a null pointer; expected one");
  const char* const beside = !options.param_groups.empty() ? "param_groups"
                             : options.update_rule         ? "update_rule"
                             : options.whole_optimizer     ? "whole_optimizer"
                                                           : nullptr;
  if (beside != nullptr)
    throw ConfigError("InitOptions has ", beside,
                      " beside an optimizer, which has its own; expected one of the two");
  InitOptions with_client = options;
  with_client.untrained = untrained_by(*optimizer, parameters);
  if (without_formula(*optimizer).empty()) {
    config.optimizer = client_optimizer(*optimizer, parameters);
    return with_client;
  }
  const std::string name = c10::demangle(typeid(*optimizer).name());
  if (dynamic_cast<const optim::LBFGS*>(optimizer.get()) != nullptr)
    throw ConfigError(name,
                      " calls a closure, which computes the loss anew inside of step(), and here "
                      "gradients are reduced before it; expected an optimizer whose step() needs none");
  const auto* const cycle = std::get_if<OneCycleOptions>(&config.scheduler);
  if (cycle != nullptr && cycle->cycle_momentum)
    throw ConfigError("scheduler: OneCycle with cycle_momentum changes the betas of Adam, and ", name,
                      " runs as it is; expected cycle_momentum false");
  // Of the configuration, the groups' rates count alone.
  config.optimizer = config_of(*optimizer, parameters, [&](const optim::OptimizerOptions& its) {
    try {
      return OptimizerOptions(SGDOptions{.lr = its.get_lr()});
    } catch (const c10::Error&) {
      throw ConfigError("the options of ", name,
                        " do not override get_lr() and set_lr(), by which its rate is known here; "
                        "expected options that do, as those of torch::optim");
    }
  });
  std::vector<int> group_of;
  int next = 0;
  for (const optim::OptimizerParamGroup& group : optimizer->param_groups())
    group_of.push_back(group.params().empty() ? -1 : next++);
  const bool of_torch =
      typeid(*optimizer) == typeid(optim::Adagrad) || typeid(*optimizer) == typeid(optim::RMSprop);
  const bool on_rank_0 = division == Division::kRank0 && !of_torch && comm.size() > 1;
  if (on_rank_0 && comm.rank() == 0)
    options.log.warning(
        str(name,
            ": rank 0 updates all parameters and has all of the optimizer's states in its memory; where the "
            "update of a parameter depends on that parameter alone, Division::kParameters divides them"));
  with_client.whole_optimizer =
      run_as_it_is(std::move(optimizer), parameters, on_rank_0, std::move(group_of));
  return with_client;
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
