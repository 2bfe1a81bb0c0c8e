// ModelView: a model as the engine sees it, a list of named tensors. Made from any
// torch::nn::Module or TorchScript module.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/model/model_program.h"
#include "zero/model/module_state.h"
#include "zero/plan/layout.h"
#include "zero/plan/stage.h"

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace tessera::zero {

class DeferredModel;

struct ModelView {
  std::vector<NamedTensor> parameters;  ///< registration order; tied ones once a name
  /// Gives buffers and more, whenever they are asked for; null: there are none.
  std::shared_ptr<ModuleState> state = nullptr;
  bool scripted = false;  ///< TorchScript
  std::string forks_in;   ///< the TorchScript method that runs parts of itself on other threads
                          ///< (torch.jit.fork); empty: none
  /// Whether all that the module holds has been searched for views of parameters. C++ has no list of a
  /// class's members: there another holder of a parameter's memory may be one.
  bool members_searched = false;
  DeferredModel* deferred = nullptr;  ///< computes the values; null: they are there
  /// What the model computes, compared between ranks; unset: that is not known. Called while the model lives.
  std::function<Program()> program = nullptr;
};

/// Both throw ConfigError naming a view of a parameter that they find. `deferred`: what made the model
/// without its values; null: they are there.
ModelView view_of(const torch::nn::Module& model, DeferredModel* deferred = nullptr);
ModelView view_of(const torch::jit::Module& model, DeferredModel* deferred = nullptr);
/// Throws ConfigError for a model that uses torch.jit.fork where parameters are sharded:
/// one thread at a time may run it there.
void refuse_forks(const ModelView& model, const Sharding& sharding);
/// The view's parameters alone.
std::vector<NamedTensor> parameters_of(const torch::nn::Module& model);
std::vector<NamedTensor> parameters_of(const torch::jit::Module& model);
/// Whether these are the model's parameters still, the same tensors in the same order. Cheap enough
/// for every step: names are not looked at.
bool holds(const torch::nn::Module& model, const std::vector<NamedTensor>& parameters);
bool holds(const torch::jit::Module& model, const std::vector<NamedTensor>& parameters);

/// Throws ConfigError naming a tensor beside the model's parameters that lies in their memory: it
/// would stay at the first values, as the parameters move into the engine's memory. That is one of the
/// model's buffers, or, where members could not be searched, any tensor that somebody holds. Where they were,
/// such a tensor is outside of the model: `warn` is told, once.
void refuse_other_holders(const ModelView& model, const std::function<void(const std::string&)>& warn);
/// `held`: what the model holds, by name. Throws ConfigError naming the first that is no parameter but
/// lies in one's memory.
void refuse_views(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& held);

/// The distinct parameters of a model: tied ones once, with their aliases.
struct ParameterList {
  std::vector<ParameterSpec> specs;  ///< `group` is 0
  std::vector<at::Tensor> tensors;   ///< specs[i]'s
};

/// Throws ConfigError naming the parameter that cannot be sharded: fp64 or complex, sparse,
/// expanded, or overlapping the memory of another one. `compute_dtype` is every parameter's; with
/// fp32 they keep the dtypes they have.
ParameterList list_parameters(const ModelView& model, DType compute_dtype);

}  // namespace tessera::zero
