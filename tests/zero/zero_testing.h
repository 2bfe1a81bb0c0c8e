// A sharded model without the engine around it, models whose units are known, and communicators that fail on request.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/init.h"
#include "core/error.h"
#include "core/str.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/models.h"
#include "zero/gathered_parameters.h"
#include "zero/sharded_model.h"

namespace tessera::zero::testing {

using tessera::testing::fill_parameters;
using tessera::testing::randint;
using tessera::testing::randn;

constexpr int64_t kWidth = 8;
/// A Linear(kWidth, kWidth), weight and bias: so every layer of a Chain is a unit.
constexpr int64_t kLinearNumel = kWidth * kWidth + 16;

/// Linear layers one after another, and one more that only some passes use.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int num_layers, uint64_t seed = 1) {
    for (int i = 0; i < num_layers; ++i)
      layers.push_back(register_module(str("fc", i), torch::nn::Linear(kWidth, kWidth)));
    extra = register_module("extra", torch::nn::Linear(kWidth, kWidth));
    fill_parameters(*this, seed);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear extra{nullptr};
};
TORCH_MODULE(Chain);

using Change = std::function<void(ShardedModelOptions&)>;

/// What Engine does, in few words.
struct Rig {
  Rig(const ModelView& view, comm::CommunicatorPtr comm, int stage, const Change& change = {}) {
    at::set_num_threads(1);
    ShardedModelOptions options;
    options.sharding = sharding_of(stage);
    options.unit_numel = kLinearNumel;
    options.residency.capacity_units = 2;
    options.residency.persistence_numel = 0;
    options.residency.agreement_timeout = std::chrono::seconds(5);
    options.optimizer = kernels::OptimizerKind::kSGD;
    options.groups[0].lr = 0.5;
    if (change) change(options);
    sharded = std::make_unique<ShardedModel>(view, std::move(comm), options);
    sharded->begin_pass(Pass::kTrain);
  }
  Rig(const torch::nn::Module& model, comm::CommunicatorPtr comm, int stage, const Change& change = {})
      : Rig(view_of(model), std::move(comm), stage, change) {}

  void backward(const at::Tensor& loss, bool first = true, bool boundary = true) {
    sharded->residency().rethrow();
    sharded->gradients().begin_backward(first, boundary);
    torch::autograd::backward({loss}, {});
    sharded->residency().rethrow();
    sharded->gradients().finish_backward();
    sharded->end_pass();
    if (!boundary) sharded->begin_pass(Pass::kTrain);
  }
  GradientSummary update(double scale = 1) {
    GradientSummary summary = sharded->optimizer().summarize(sharded->gradients());
    num_late = summary.late_units.size();
    if (num_late > 0) {
      sharded->gradients().reduce_late(summary.late_units);
      summary = sharded->optimizer().summarize(sharded->gradients());
    }
    sharded->update(scale, summary.used);
    sharded->begin_pass(Pass::kTrain);
    return summary;
  }
  void step(const at::Tensor& loss) {
    backward(loss);
    update();
  }
  Residency& residency() { return sharded->residency(); }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all;
    for (const auto& spec : sharded->layout().parameters()) all.push_back(sharded->full_parameter(spec.name));
    return all;
  }
  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> all;
    for (const auto& spec : sharded->layout().parameters()) all.push_back(sharded->full_gradient(spec.name));
    return all;
  }
  /// Sum over units of the gathers of the last pass.
  int num_gathers() {
    int sum = 0;
    for (int gathers : residency().counts().gathers) sum += gathers;
    return sum;
  }

  std::unique_ptr<ShardedModel> sharded;
  size_t num_late = 0;
};

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i].detach().reshape(-1), b[i].detach().reshape(-1))) return false;
  return true;
}

inline double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    largest = std::max(largest, (a[i].detach().reshape(-1) - b[i].detach().reshape(-1)).abs().max().item<double>());
  return largest;
}

/// Gradients by plain autograd, in registration order (zeros where there is none).
inline std::vector<at::Tensor> plain_gradients(torch::nn::Module& model, const at::Tensor& loss) {
  for (auto& parameter : model.parameters()) parameter.mutable_grad().reset();
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().to_dense() : at::zeros_like(parameter));
  return gradients;
}

inline void run_ranks(int world, const std::function<void(comm::CommunicatorPtr)>& body) {
  comm::run_threads(world, {.timeout = std::chrono::seconds(20)}, body);
}
inline comm::CommunicatorPtr alone() {
  comm::CommunicatorPtr result;
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) { result = std::move(comm); });
  return result;
}

/// The message of what `body` throws; empty: it throws nothing.
template <class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Which all-gather fails, counted over a communicator and its duplicates.
struct FailurePlan {
  int at = -1;  ///< from 0; -1: none
  bool in_wait = false;
  std::atomic<int> count{0};
};

/// Throws at one all-gather.
class FailingCommunicator final : public tessera::testing::ForwardingCommunicator {
 public:
  FailingCommunicator(comm::CommunicatorPtr inner, std::shared_ptr<FailurePlan> plan)
      : ForwardingCommunicator(std::move(inner)), plan_(std::move(plan)) {}

  comm::CommunicatorPtr duplicate(std::string_view name) override {
    return std::make_shared<FailingCommunicator>(ForwardingCommunicator::duplicate(name), plan_);
  }

 protected:
  struct FailingWork final : comm::Work {
    bool test() override { return true; }
    void wait() override { throw CommError("the cable was pulled"); }
  };
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override {
    if (plan_->count++ == plan_->at) {
      if (plan_->in_wait) return std::make_shared<FailingWork>();
      throw CommError("the cable was pulled");
    }
    return ForwardingCommunicator::do_all_gather(full, shard, label);
  }

 private:
  std::shared_ptr<FailurePlan> plan_;
};

}  // namespace tessera::zero::testing
