#include "zero/reduce/taken_gradients.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero {

TakenGradients::TakenGradients(const Layout& layout, std::vector<at::Tensor> parameters)
    : layout_(layout), parameters_(std::move(parameters)), stand_ins_(parameters_.size()) {}

TakenGradients::~TakenGradients() {
  for (const int parameter : filled_)
    if (parameters_[parameter].grad().is_same(stand_ins_[parameter]))
      parameters_[parameter].mutable_grad().reset();
}

/// Makes a tensor of the parameter's shape, whose storage has no memory.
at::Tensor TakenGradients::make(int parameter) const {
  const at::Tensor& tensor = parameters_[parameter];
  const size_t bytes = tensor.nbytes();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                             at::DataPtr(nullptr, tensor.device()),
                                                             /*allocator=*/nullptr, /*resizable=*/false));
  at::Tensor stand_in = at::empty({0}, tensor.options().requires_grad(false));
  stand_in.set_(std::move(storage), 0, tensor.sizes(), tensor.strides());
  stand_in.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(str(
      "tessera: the gradient of parameter ", layout_.parameters()[parameter].name,
      " is not in its grad: backward() has summed it over the ranks and keeps it until step(). Read it with "
      "full_gradient(), on all ranks; clip with gradient_clipping in the configuration; discard it with the "
      "engine's zero_grad()"));
  return stand_in;
}

void TakenGradients::stand_in(const std::vector<bool>& used) {
  const PauseListening our_own_operators;
  for (int parameter = 0; parameter < layout_.num_parameters(); ++parameter) {
    if (!used[parameter] || parameters_[parameter].grad().defined()) continue;
    at::Tensor& stand_in = stand_ins_[parameter];
    if (!stand_in.defined()) stand_in = make(parameter);
    parameters_[parameter].mutable_grad() = stand_in;
    filled_.push_back(parameter);
  }
}

void TakenGradients::leave() {
  for (const int parameter : filled_)
    if (!parameters_[parameter].grad().is_same(stand_ins_[parameter]))
      throw Error(
          "parameter ", layout_.parameters()[parameter].name, ": its grad was ",
          parameters_[parameter].grad().defined() ? "written" : "reset",
          " after backward(), which has no effect on the gradient that the engine keeps until step(): "
          "clip with gradient_clipping in the configuration, change gradients in a hook of the "
          "parameter, or discard all of them with the engine's zero_grad()");
  for (const int parameter : filled_) parameters_[parameter].mutable_grad().reset();
  filled_.clear();
}

void TakenGradients::forget() { filled_.clear(); }

}  // namespace tessera::zero
