#include "zero/optimizer/whole_parameters.h"

#include <exception>
#include <utility>

#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/memory/memory_use.h"
#include "zero/memory/pause_listening.h"
#include "zero/plan/owners.h"

namespace tessera::zero {

std::vector<int> owners_of_parameters(const Layout& layout) {
  std::vector<int64_t> costs;
  for (int parameter = 0; parameter < layout.num_parameters(); ++parameter)
    costs.push_back(layout.parameters()[parameter].trainable ? layout.slice(parameter).numel : -1);
  return owners_of(costs, layout.world_size());
}

WholeParameters::WholeParameters(const Layout& layout, std::vector<ParamUnit>& units,
                                 std::vector<at::Tensor> parameters, comm::CommunicatorPtr comm,
                                 std::shared_ptr<WholeOptimizer> optimizer)
    : layout_(layout),
      units_(units),
      parameters_(std::move(parameters)),
      comm_(std::move(comm)),
      optimizer_(std::move(optimizer)) {
  owners_ = owners_of_parameters(layout_);
  std::vector<OwnedTensor> owned;
  for (int parameter = 0; parameter < layout_.num_parameters(); ++parameter) {
    if (owners_[parameter] >= 0 && optimizer_->on_one_rank()) owners_[parameter] = 0;
    if (owns(parameter)) owned.push_back({&layout_.parameters()[parameter], parameters_[parameter]});
  }
  optimizer_->own(owned);
}

std::vector<WholeParameters::Whole> WholeParameters::gather_weights() {
  refused_ = false;
  std::vector<Whole> owned;
  for (ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    const InMemory weights(unit, kUpdated, InMemory::Access::kRead);
    const at::Tensor masters = gather_owned(unit, unit.state_to_gather().weights, *comm_, "parameters");
    for (const int parameter : unit.spec.parameters)
      if (owns(parameter)) owned.push_back({parameter, cut_out(layout_, parameter, masters), {}});
  }
  return owned;
}

void WholeParameters::gather_gradients(const GradientReducer& gradients, double grad_scale,
                                       const std::vector<bool>& used, std::vector<Whole>& owned) {
  auto next = owned.begin();
  for (ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
    const at::Tensor reduced = gather_owned(unit, gradients.mean_at_boundary(unit), *comm_, "gradient");
    for (; next != owned.end() && layout_.slice(next->parameter).unit == unit.index; ++next)
      if (used[next->parameter]) next->gradient = cut_out(layout_, next->parameter, reduced).mul_(grad_scale);
  }
}

/// A tensor of the model has other memory, shape and dtype as its own during the lifetime. Its identity,
/// hooks and version counter stay.
class OtherMemory {
 public:
  OtherMemory(at::Tensor tensor, const at::Tensor& memory, const at::Tensor& gradient)
      : tensor_(std::move(tensor)), before_(tensor_.detach()) {
    tensor_.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
    tensor_.mutable_grad() = gradient;
  }
  ~OtherMemory() {
    tensor_.mutable_grad().reset();
    tensor_.unsafeGetTensorImpl()->shallow_copy_from(before_.getIntrusivePtr());
  }
  OtherMemory(const OtherMemory&) = delete;

 private:
  at::Tensor tensor_, before_;
};

/// Collective. Throws on all ranks what fails on one.
void WholeParameters::run(const std::vector<Whole>& owned, const std::function<void()>& function) {
  std::exception_ptr mine;
  const std::string failure = comm::failure_on_any(*comm_, "step of the optimizer", [&] {
    try {
      std::vector<std::unique_ptr<OtherMemory>> whole;
      for (const Whole& one : owned)
        whole.push_back(std::make_unique<OtherMemory>(parameters_[one.parameter], one.weights, one.gradient));
      function();
      for (const Whole& one : owned)
        if (!parameters_[one.parameter].is_alias_of(one.weights))
          throw Error(optimizer_->name(), " has replaced the memory of parameter ",
                      layout_.parameters()[one.parameter].name,
                      "; expected it to be updated in place, as by p.copy_() or p.add_()");
    } catch (...) {
      mine = std::current_exception();
      throw;
    }
  });
  refused_ = mine || !failure.empty();
  if (mine) std::rethrow_exception(mine);
  if (!failure.empty()) throw Error(optimizer_->name(), ": ", failure);
}

void WholeParameters::scatter(const std::vector<Whole>& owned) {
  std::vector<OwnedParameter> updated;
  for (const Whole& one : owned) updated.push_back({one.parameter, one.weights});
  for (ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    const InMemory in_memory(unit, kUpdated, InMemory::Access::kReadWrite);
    unit.master.copy_(unit.local(join_owned(unit, layout_, updated, at::kFloat, *comm_, "new values")));
    if (unit.has_own_master()) at::Tensor(unit.values()).copy_(unit.master);
  }
}

void WholeParameters::update(const GradientReducer& gradients, double grad_scale,
                             const std::vector<bool>& used, const std::vector<kernels::Hyper>& groups) {
  const OurOwnWork scope;
  const MemoryFor use(MemoryUse::kOptimizer);
  std::vector<Whole> owned = gather_weights();
  gather_gradients(gradients, grad_scale, used, owned);
  run(owned, [&] { optimizer_->step(groups); });
  scatter(owned);
}

void WholeParameters::apply(const std::function<void()>& function) {
  const OurOwnWork scope;
  const MemoryFor use(MemoryUse::kOptimizer);
  const std::vector<Whole> owned = gather_weights();
  run(owned, function);
  scatter(owned);
}

}  // namespace tessera::zero
