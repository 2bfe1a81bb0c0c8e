// An optimizer of whole parameters: what it is given, where that comes back, and what a failure leaves.
#include "zero/optimizer/whole_parameters.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

/// Steps by gradient / its norm, which needs the whole gradient, and remembers what it was given.
class Normalized final : public WholeOptimizer {
 public:
  explicit Normalized(std::vector<NamedTensor> parameters, bool on_one_rank = false)
      : parameters_(std::move(parameters)), on_one_rank_(on_one_rank) {}

  std::string name() const override { return "Normalized"; }
  bool on_one_rank() const override { return on_one_rank_; }
  void own(const std::vector<OwnedTensor>& parameters) override {
    for (const OwnedTensor& one : parameters) owned.insert(one.spec->name);
  }
  void step(const std::vector<kernels::Hyper>&) override {
    if (fails) throw std::runtime_error("no");
    for (const auto& [name, tensor] : parameters_) {
      if (!owned.contains(name)) {
        EXPECT_FALSE(tensor.grad().defined()) << name;
        continue;
      }
      EXPECT_EQ(tensor.scalar_type(), at::kFloat);
      if (replaces) tensor.set_data(tensor.clone());
      if (!tensor.grad().defined()) continue;
      gradients[name] = tensor.grad().clone();
      at::Tensor(tensor).sub_(tensor.grad() / tensor.grad().norm(), 0.1);
    }
  }
  int64_t bytes() const override { return 0; }
  at::Tensor state() const override { return {}; }
  void check_state_of_another_program(const at::Tensor&) const override {}
  void set_state(const std::vector<at::Tensor>&) override {}

  std::set<std::string> owned;
  std::map<std::string, at::Tensor> gradients;
  bool fails = false, replaces = false;

 private:
  std::vector<NamedTensor> parameters_;
  bool on_one_rank_;
};

struct Trained {
  std::vector<at::Tensor> weights;
  std::map<std::string, at::Tensor> gradients;  // of all ranks
};

Trained train(const comm::CommunicatorPtr& comm, int stage, DType dtype, bool on_one_rank,
              const Change& change = {}) {
  Chain model(4);
  auto optimizer = std::make_shared<Normalized>(view_of(*model).parameters, on_one_rank);
  Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
    options.optimizer.whole = optimizer;
    options.compute_dtype = dtype;
    options.unit_numel = 100;
    if (change) change(options);
  });
  const std::vector<at::Tensor> before = rig.weights();
  train_three_steps(model, rig, comm->rank(), dtype);
  Trained trained{rig.weights(), {}};
  EXPECT_EQ(optimizer->owned.size(), on_one_rank && comm->rank() > 0 ? 0u : optimizer->owned.size());
  for (const auto& [name, gradient] : optimizer->gradients) trained.gradients[name] = gradient;
  int moved = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const bool unused = i >= before.size() - 2;  // Chain's extra layer
    const double norm = (trained.weights[i] - before[i]).norm().item<double>();
    EXPECT_LE(norm, 0.31) << i;
    EXPECT_EQ(norm == 0, unused) << i;
    moved += norm > 0 ? 1 : 0;
  }
  EXPECT_EQ(moved, 8);
  return trained;
}

TEST(WholeParameters, TheBitsDependOnNeitherStageNorOwners) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int world : {1, 2, 3}) {
      std::vector<at::Tensor> first;
      for (int stage = 0; stage <= 3; ++stage) {
        for (const bool on_one_rank : {false, true}) {
          run_ranks(world, [&](comm::CommunicatorPtr comm) {
            const Trained trained = train(comm, stage, dtype, on_one_rank);
            if (comm->rank() != 0) return;
            // Over Gloo the sums of stage 0 have another order on three ranks and more.
            if (first.empty() || (stage == 1 && !in_shared_memory())) first = trained.weights;
            EXPECT_TRUE(same_bits(trained.weights, first)) << "world " << world << " stage " << stage;
          });
        }
      }
    }
  }
}

TEST(WholeParameters, RowsOfRanksHoldTheSame) {
  std::vector<at::Tensor> first;
  for (const int size : {4, 2, 1}) {
    run_ranks(4, [&](comm::CommunicatorPtr comm) {
      const Trained trained = train(comm, 3, DType::kFloat32, /*on_one_rank=*/false,
                                    [&](ShardedModelOptions& options) { options.groups.shard = size % 4; });
      if (comm->rank() != 0) return;
      if (first.empty()) first = trained.weights;
      EXPECT_LT(largest_difference(trained.weights, first), 1e-5) << size;
    });
  }
}

TEST(WholeParameters, AFailureIsEveryRanksAndLeavesTheParameters) {
  for (const int stage : {0, 2, 3}) {
    for (const bool replaces : {false, true}) {
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        Chain model(4);
        auto optimizer = std::make_shared<Normalized>(view_of(*model).parameters);
        Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
          options.optimizer.whole = optimizer;
          options.unit_numel = 100;
        });
        const std::vector<at::Tensor> before = rig.weights();
        (replaces ? optimizer->replaces : optimizer->fails) = comm->rank() == 1;
        const at::Tensor input = batch(comm->rank(), 0);
        rig.backward(model->forward(input).square().sum());
        const std::string said = message_of([&] { rig.update(); });
        if (replaces) {
          EXPECT_NE(said.find("has replaced the memory of parameter"), std::string::npos) << said;
        } else {
          EXPECT_EQ(said, comm->rank() == 1 ? "no" : "Normalized: rank 1: no");
        }
        EXPECT_NE(message_of([&] { rig.sharded->check_usable(); }), "");
        for (const NamedTensor& parameter : view_of(*model).parameters)
          EXPECT_FALSE(parameter.tensor.grad().defined());
      });
    }
  }
}

TEST(WholeParameters, AnotherFunctionMovesThem) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(4);
      const std::vector<NamedTensor> parameters = view_of(*model).parameters;
      auto optimizer = std::make_shared<Normalized>(parameters);
      Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
        options.optimizer.whole = optimizer;
        options.unit_numel = 100;
      });
      const std::vector<at::Tensor> before = rig.weights();
      for (int round = 0; round < 2; ++round) {
        rig.step(model->forward(batch(comm->rank(), round)).square().sum());
        rig.sharded->apply_to_whole([&] {
          for (const NamedTensor& parameter : parameters)
            if (optimizer->owned.contains(parameter.name)) at::Tensor(parameter.tensor).fill_(round + 1);
        });
        for (const at::Tensor& weight : rig.weights())
          EXPECT_TRUE((weight == round + 1).all().item<bool>()) << "stage " << stage;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::zero::testing
