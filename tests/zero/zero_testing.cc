#include "tests/zero/zero_testing.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "comm/init/init.h"
#include "comm/torch_dtype.h"
#include "core/str.h"
#include "tests/comm/run_ranks.h"

namespace tessera::zero::testing {

ChainImpl::ChainImpl(int num_layers, uint64_t seed) {
  for (int i = 0; i < num_layers; ++i)
    layers.push_back(register_module(str("fc", i), torch::nn::Linear(kWidth, kWidth)));
  extra = register_module("extra", torch::nn::Linear(kWidth, kWidth));
  fill_parameters(*this, seed);
}

at::Tensor ChainImpl::forward(at::Tensor x) {
  for (auto& layer : layers) x = at::tanh(layer->forward(x));
  return x;
}

at::Tensor ChainImpl::through(const std::vector<int>& used, at::Tensor x) {
  for (int i : used) x = at::tanh(layers[i]->forward(x));
  return x;
}

Rig::Rig(const ModelView& view, comm::CommunicatorPtr comm, int stage, const Change& change) {
  at::set_num_threads(1);
  ShardedModelOptions options;
  options.sharding = sharding_of(stage);
  options.unit_numel = kLinearNumel;
  options.residency.capacity_units = 2;
  options.residency.persistence_numel = 0;
  options.optimizer.kind = kernels::OptimizerKind::kSGD;
  options.optimizer.groups[0].lr = 0.5;
  if (change) change(options);
  sharded = std::make_unique<ShardedModel>(view, std::move(comm), options);
}

GradientSummary Rig::update(double scale) {
  GradientSummary summary = sharded->summarize_gradients();
  num_late = summary.late_units.size();
  sharded->step(scale);
  return summary;
}

std::vector<at::Tensor> Rig::weights() {
  std::vector<at::Tensor> all;
  for (const auto& spec : sharded->layout().parameters()) all.push_back(sharded->full_parameter(spec.name));
  return all;
}

std::vector<at::Tensor> Rig::gradients() {
  std::vector<at::Tensor> all;
  for (const auto& spec : sharded->layout().parameters()) all.push_back(sharded->full_gradient(spec.name));
  return all;
}

int Rig::num_gathers() {
  int sum = 0;
  for (int gathers : residency().counts().gathers) sum += gathers;
  return sum;
}

void train_three_steps(Chain& model, Rig& rig, int rank, DType dtype) {
  for (int step = 0; step < 3; ++step) {
    const at::Tensor input = batch(rank, step);
    rig.backward(model->forward(input.to(to_torch(dtype))).to(at::kFloat).square().sum());
    rig.update(0.5);
  }
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i].detach().reshape(-1), b[i].detach().reshape(-1))) return false;
  return true;
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    largest =
        std::max(largest, (a[i].detach().reshape(-1) - b[i].detach().reshape(-1)).abs().max().item<double>());
  return largest;
}

std::vector<at::Tensor> plain_gradients(torch::nn::Module& model, const at::Tensor& loss) {
  for (auto& parameter : model.parameters()) parameter.mutable_grad().reset();
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().to_dense() : at::zeros_like(parameter));
  return gradients;
}

void run_ranks(int world, const std::function<void(comm::CommunicatorPtr)>& body) {
  comm::testing::run_ranks(
      world, {.backend = tessera::testing::default_backend(), .timeout = std::chrono::seconds(20)}, body);
}

comm::CommunicatorPtr alone() {
  comm::CommunicatorPtr result;
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) { result = std::move(comm); });
  return result;
}

}  // namespace tessera::zero::testing
