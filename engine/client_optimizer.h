// An optimizer of torch::optim in place of the configuration's, as deepspeed.initialize(optimizer=…) takes
// one. In a separate header, because torch::optim takes long to compile.
//
//   auto optimizer = std::make_shared<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-3));
//   auto engine = tessera::initialize(model, optimizer, config, comm);
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/engine.h"

namespace tessera {

/// The optimizer's options and param groups as a configuration. Its first group with parameters
/// becomes OptimizerConfig::options, and the others become param_groups, which list their parameters' names.
/// `parameters`: the model's, among which the groups' tensors are found by identity. Throws ConfigError for
/// an optimizer without a formula here, for one that has taken steps, for a tensor that is not the model's,
/// and for an optimizer without parameters.
OptimizerConfig client_optimizer(const torch::optim::Optimizer& optimizer,
                                 const std::vector<zero::NamedTensor>& parameters);

/// Why the optimizer has no formula here: it is not exactly torch::optim::Adam, AdamW, SGD, Adagrad or
/// RMSprop, or has an option that the formula lacks. Empty where it has one.
std::string without_formula(const torch::optim::Optimizer& optimizer);

/// The names of the trainable parameters that are in none of the optimizer's groups.
std::vector<std::string> untrained_by(const torch::optim::Optimizer& optimizer,
                                      const std::vector<zero::NamedTensor>& parameters);

/// Whose part the update of a parameter is, with an optimizer that runs as it is.
enum class Division : uint8_t {
  /// Rank 0 updates all and has all states. It is right for every optimizer.
  kRank0,
  /// Each parameter has one owner: for an optimizer whose update of a parameter depends on that parameter,
  /// its gradient and its states alone. Classes of torch::optim are divided in any case.
  kParameters,
};

/// What initialize() takes for the optimizer: sets config.optimizer.
InitOptions with_client_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                  const std::vector<zero::NamedTensor>& parameters, EngineConfig& config,
                                  const comm::Communicator& comm, const InitOptions& options,
                                  Division division);

/// Collective. As initialize() without the optimizer, whose options and groups overrule config.optimizer, as
/// in DeepSpeed. Trainable parameters in none of its groups keep their values, as with the optimizer
/// itself. All ranks pass equal optimizers.
///
/// One that has a formula here (without_formula()) is read once: the engine updates the parameters' shards,
/// and neither calls the optimizer nor sees later changes of it, so `config.scheduler` has an effect and a
/// scheduler of torch has none. Any other runs as it is, on whole parameters ([Note: whole parameters] in
/// zero/optimizer/whole_optimizer.h): engine->step() calls its step() with the parameters that this rank owns
/// in its groups. Then a scheduler of torch works on it, and config.scheduler and set_learning_rates() write
/// their rates into it. Checkpoints have what its save() writes; its options need get_lr() and set_lr().
///
/// Throws ConfigError as client_optimizer(), for one that needs a closure (LBFGS), and when `options` have
/// param groups or an optimizer, too.
template <class Model>
auto initialize(const Model& model, std::shared_ptr<torch::optim::Optimizer> optimizer, EngineConfig config,
                comm::CommunicatorPtr comm, const InitOptions& options = {},
                Division division = Division::kRank0) {
  const std::vector<zero::NamedTensor> parameters = [&] {
    if constexpr (std::is_same_v<Model, torch::jit::Module>)
      return zero::parameters_of(model);
    else
      return zero::parameters_of(*model);
  }();
  const InitOptions with_client =
      with_client_optimizer(std::move(optimizer), parameters, config, *comm, options, division);
  return initialize(model, config, std::move(comm), with_client);
}
/// The same of an optimizer that has a formula here, and need not live longer. Throws ConfigError for others.
template <class Model>
auto initialize(const Model& model, const torch::optim::Optimizer& optimizer, EngineConfig config,
                comm::CommunicatorPtr comm, const InitOptions& options = {}) {
  if (const std::string why = without_formula(optimizer); !why.empty())
    throw ConfigError(why,
                      ", so the optimizer runs as it is, as long as the engine; expected a "
                      "std::shared_ptr of it");
  // It is neither called nor kept.
  const std::shared_ptr<torch::optim::Optimizer> unowned(
      std::shared_ptr<void>(), const_cast<torch::optim::Optimizer*>(&optimizer));  // NOLINT(*-const-cast)
  return initialize(model, unowned, std::move(config), std::move(comm), options);
}

}  // namespace tessera
