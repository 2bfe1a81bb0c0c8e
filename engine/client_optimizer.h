// An optimizer of torch::optim in place of the configuration's, as deepspeed.initialize(optimizer=…) takes
// one. In a separate header, because torch::optim takes long to compile.
//
//   torch::optim::AdamW optimizer(groups, torch::optim::AdamWOptions(1e-3));
//   auto engine = tessera::initialize(model, optimizer, config, comm);
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace tessera {

/// The optimizer's options and param groups as a configuration. Its first group with parameters
/// becomes OptimizerConfig::options, and the others become param_groups, which list their parameters' names.
/// `parameters`: the model's, among which the groups' tensors are found by identity. Throws ConfigError for
/// an optimizer that is not exactly torch::optim::Adam, AdamW, SGD or Adagrad, for an option that the update
/// rules here lack (amsgrad, initial_accumulator_value), for an optimizer that has taken steps, for a tensor
/// that is not the model's, and for an optimizer without parameters.
OptimizerConfig client_optimizer(const torch::optim::Optimizer& optimizer,
                                 const std::vector<zero::NamedTensor>& parameters);

/// The names of the trainable parameters that are in none of the optimizer's groups.
std::vector<std::string> untrained_by(const torch::optim::Optimizer& optimizer,
                                      const std::vector<zero::NamedTensor>& parameters);

/// Collective. As initialize() without the optimizer, whose options and groups overrule config.optimizer, as
/// in DeepSpeed. They are read once: the engine updates the parameters, and neither calls the optimizer nor
/// sees later changes of it. A torch scheduler has no effect either; `config.scheduler` has. Trainable
/// parameters in none of its groups keep their values, as with the optimizer itself. All ranks pass equal
/// optimizers. Throws ConfigError as client_optimizer(), and when `options` have param groups too.
template <class Model>
auto initialize(const Model& model, const torch::optim::Optimizer& optimizer, EngineConfig config,
                comm::CommunicatorPtr comm, const InitOptions& options = {}) {
  if (!options.param_groups.empty())
    throw ConfigError(
        "InitOptions has param_groups beside an optimizer, which has its own; expected one of the two");
  const std::vector<zero::NamedTensor> parameters = [&] {
    if constexpr (std::is_same_v<Model, torch::jit::Module>)
      return zero::parameters_of(model);
    else
      return zero::parameters_of(*model);
  }();
  config.optimizer = client_optimizer(optimizer, parameters);
  InitOptions with_untrained = options;
  with_untrained.untrained = untrained_by(optimizer, parameters);
  return initialize(model, config, std::move(comm), with_untrained);
}

}  // namespace tessera
