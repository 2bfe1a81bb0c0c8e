#include "tests/zero/kernels/vectors.h"

#include <algorithm>
#include <cmath>

namespace tessera::zero::testing {
namespace {

/// (numel) fp32: factor * (1, 2, …, 7, 1, 2, …). Its parts differ at any offset that is no multiple of 7.
at::Tensor gradient(int64_t numel, double factor) {
  return at::arange(numel).remainder(7).add(1).to(at::kFloat) * factor;
}

/// Says when a reduce-scatter is issued.
class IssueWatch final : public tessera::testing::ForwardingCommunicator {
 public:
  IssueWatch(comm::CommunicatorPtr inner, std::function<void()> on_issue)
      : ForwardingCommunicator(std::move(inner)), on_issue_(std::move(on_issue)) {}

 protected:
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    on_issue_();
    return ForwardingCommunicator::do_reduce_scatter(full, into, label);
  }

 private:
  std::function<void()> on_issue_;
};

}  // namespace

Factors mean_over_ranks(int world, const std::function<Factors(int rank)>& factors_of) {
  Factors sum(factors_of(0).size(), 0);
  for (int rank = 0; rank < world; ++rank) {
    const Factors factors = factors_of(rank);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += factors[i];
  }
  for (double& value : sum) value /= world;
  return sum;
}

Vectors::Vectors(const std::vector<int64_t>& numels, const comm::CommunicatorPtr& comm,
                 const StageOptions& options)
    : rank_(comm->rank()), world_(comm->size()) {
  at::set_num_threads(1);
  std::vector<ParameterSpec> specs;
  for (size_t i = 0; i < numels.size(); ++i) {
    specs.push_back({.name = str("m", i, ".p"),
                     .shape = {numels[i]},
                     .dtype = DType::kFloat32,
                     .trainable = true,
                     .group = 0,
                     .aliases = {}});
    parameters.push_back(at::ones({numels[i]}).requires_grad_());
  }
  layout =
      std::make_unique<Layout>(specs, LayoutOptions{options.mesh ? options.mesh->world : world_, kNumel});
  for (int unit = 0; unit < layout->num_units(); ++unit)
    units.emplace_back(*layout, unit,
                       UnitOptions{.sharding = sharding_of(options.stage), .tiers = {}, .mesh = options.mesh},
                       *comm);
  auto watched = std::make_shared<IssueWatch>(comm, [this] { look_at_slots(/*issuing=*/true); });
  hooks_.emplace(parameters, [this](size_t) {
    look_at_slots(/*issuing=*/false);
    if (at_hook) at_hook();
  });
  order = std::make_unique<ReductionOrder>(first_order_of_reductions(units));
  reducer = std::make_unique<GradientReducer>(*layout, units, parameters, *order, /*residency=*/nullptr,
                                              watched, options);
}

/// `issuing`: one whose reduction is not kept yet.
void Vectors::look_at_slots(bool issuing) {
  const auto in_use = std::count_if(units.begin(), units.end(), [](const ParamUnit& unit) {
    return unit.gradient.slot.numel > 0 && unit.gradient.reduction != nullptr;
  });
  most_slots_in_use_ =
      std::max(most_slots_in_use_, static_cast<int>(in_use) + (issuing && reducer->slot_bytes() > 0));
}

void Vectors::backward(const Factors& factors, std::vector<int> order, bool first, bool boundary) {
  if (order.empty())
    for (int i = static_cast<int>(factors.size()) - 1; i >= 0; --i) order.push_back(i);
  reducer->begin_backward(first, boundary);
  at::Tensor sum = at::zeros({});
  // Autograd runs what came last first.
  for (auto i = order.rbegin(); i != order.rend(); ++i)
    if (factors[*i] != 0) sum = sum + (parameters[*i] * gradient(parameters[*i].numel(), factors[*i])).sum();
  if (sum.requires_grad()) sum.backward();
  reducer->finish_backward();
}

::testing::AssertionResult Vectors::hold(const Factors& factors, double tolerance) const {
  for (size_t i = 0; i < factors.size(); ++i) {
    const at::Tensor shard = reducer->shard(units[i]).to(at::kDouble);
    const at::Tensor unit = at::zeros({shard.numel() * world_}, at::kDouble);
    unit.narrow(0, 0, parameters[i].numel()).copy_(gradient(parameters[i].numel(), factors[i]));
    const at::Tensor expected = unit.narrow(0, rank_ * shard.numel(), shard.numel());
    for (int64_t j = 0; j < shard.numel(); ++j) {
      const double is = shard.const_data_ptr<double>()[j], should_be = expected.const_data_ptr<double>()[j];
      if (!(std::abs(is - should_be) <= tolerance * std::abs(should_be)))
        return ::testing::AssertionFailure() << "rank " << rank_ << ", vector " << i << ", element " << j
                                             << " of the shard: " << is << " instead of " << should_be;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tessera::zero::testing
