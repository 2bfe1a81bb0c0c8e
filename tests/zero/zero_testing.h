// A sharded model without an engine, models whose units are known, and communicators that fail on request.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/error_message.h"
#include "comm/init/init.h"
#include "core/error.h"
#include "core/str.h"
#include "tests/support/backend.h"
#include "tests/support/errors.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/models.h"
#include "zero/gathered_parameters.h"
#include "zero/sharded_model.h"

namespace tessera::zero::testing {

using tessera::testing::error_of;
using tessera::testing::fill_parameters;
using tessera::testing::in_shared_memory;
using tessera::testing::randint;
using tessera::testing::randn;
using tessera::testing::seconds_since;

constexpr int64_t kWidth = 8;
/// What a rank gives to the model in a step, of shape (3, kWidth).
inline at::Tensor batch(int rank, int step) { return randn({3, kWidth}, 1'000 + 10 * step + rank); }
/// A Linear(kWidth, kWidth), weight and bias: so every layer of a Chain is a unit.
constexpr int64_t kLinearNumel = kWidth * kWidth + 16;

/// Linear layers one after another, and one more that only some passes use.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int num_layers, uint64_t seed = 1);
  at::Tensor forward(at::Tensor x);
  /// Through the layers `used` only, in that order.
  at::Tensor through(const std::vector<int>& used, at::Tensor x);
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear extra{nullptr};
};
TORCH_MODULE(Chain);

using Change = std::function<void(ShardedModelOptions&)>;

/// A ShardedModel with the options of these tests.
struct Rig {
  Rig(const ModelView& view, comm::CommunicatorPtr comm, int stage, const Change& change = {});
  Rig(const torch::nn::Module& model, comm::CommunicatorPtr comm, int stage, const Change& change = {})
      : Rig(view_of(model), std::move(comm), stage, change) {}

  void backward(const at::Tensor& loss, bool first = true, bool last = true) {
    sharded->backward(loss, {.first = first, .last = last});
  }
  GradientSummary update(double scale = 1);
  void step(const at::Tensor& loss) {
    backward(loss);
    update();
  }
  Residency& residency() { return sharded->residency(); }
  std::vector<at::Tensor> weights();
  std::vector<at::Tensor> gradients();
  /// Sum over units of the gathers of the last pass.
  int num_gathers();

  std::unique_ptr<ShardedModel> sharded;
  size_t num_late = 0;
};

/// Three steps of the rank's batches on half of the gradients, with inputs of `dtype`.
void train_three_steps(Chain& model, Rig& rig, int rank, DType dtype);

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// Gradients by plain autograd, in registration order (zeros where there is none).
std::vector<at::Tensor> plain_gradients(torch::nn::Module& model, const at::Tensor& loss);

/// Ranks as threads, on default_backend(). In shared memory all ranks see one copy of the parameters from
/// stage 1 on: nothing is gathered or released there, and no order of gathers needs agreement.
void run_ranks(int world, const std::function<void(comm::CommunicatorPtr)>& body);
comm::CommunicatorPtr alone();

/// What `body` throws, in one line, without libtorch's back-trace; "" if it throws nothing.
template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return comm::error_message(error);
  }
  return "";
}

/// Which all-gather fails, counted over a communicator and its duplicates.
struct FailurePlan {
  int at = -1;  ///< from 0; -1: none
  bool in_wait = false;
  std::atomic<int> count{0};
};

/// Fails at the all-gather of its FailurePlan.
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
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                              std::string_view label) override {
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
