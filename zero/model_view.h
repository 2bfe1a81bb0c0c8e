// ModelView: a model as the engine sees it, a list of named tensors. Made from any torch::nn::Module or TorchScript module.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "zero/layout.h"

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace tessera::zero {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct ModelView {
  std::vector<NamedTensor> parameters;  ///< registration order; tied ones once a name
  std::vector<NamedTensor> buffers;
  bool scripted = false;  ///< TorchScript
  std::string forks_in;   ///< the TorchScript method that runs parts of itself on other threads (torch.jit.fork); empty: none
};

/// Local.
ModelView view_of(const torch::nn::Module& model);
ModelView view_of(const torch::jit::Module& model);

/// The distinct parameters of a model: tied ones once, with their aliases.
struct ParameterList {
  std::vector<ParameterSpec> specs;  ///< `dtype` is `compute_dtype`, `group` is 0
  std::vector<at::Tensor> tensors;   ///< specs[i]'s
};

/// Local. Throws ConfigError naming the parameter that cannot be sharded: fp64 or complex, sparse, expanded, or overlapping
/// the memory of another one.
ParameterList list_parameters(const ModelView& model, DType compute_dtype);

}  // namespace tessera::zero
