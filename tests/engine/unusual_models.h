// Models whose constructors do all kinds of things with their parameters.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::testing {

/// A constructor as a function, and what it has registered.
struct BuiltImpl : torch::nn::Module {
  using Build = std::function<void(BuiltImpl&)>;
  explicit BuiltImpl(const Build& build) { build(*this); }
  at::Tensor& parameter(const std::string& name, const at::Tensor& tensor, bool requires_grad = true) {
    return register_parameter(name, tensor, requires_grad);
  }
  at::Tensor& buffer(const std::string& name, const at::Tensor& tensor) {
    return register_buffer(name, tensor);
  }
  template <class Holder>
  Holder module(const std::string& name, Holder part) {
    return register_module(name, part);
  }
  std::vector<at::Tensor> others;  ///< tensors that are not registered
};

struct UnusualModel {
  std::string name;
  BuiltImpl::Build build;
  bool whole = false;     ///< has to be made in the ordinary way
  bool computed = false;  ///< every rank has to compute something
};

const std::vector<UnusualModel>& unusual_models();

}  // namespace tessera::testing
