// Adafactor and AdamW8bit on owners: bits, bytes, and what a checkpoint keeps. Adafactor beside torch's is in
// tests/python/programs/optim_rank.py.
#include "zero/optimizer/whole_formula.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using kernels::OptimizerKind;

struct ByFormula {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> saved;  // this rank's
  int64_t bytes = 0, formula = 0;
};

kernels::Hyper hyper_of(OptimizerKind kind) {
  if (kind == OptimizerKind::kAdafactor) return {.lr = 0.05, .eps = 1e-7, .weight_decay = 0.1};
  return {.lr = 0.01, .weight_decay = 0.1, .min_8bit_size = 20};
}

/// Three updates of a chain of layers; of `saved`, by all ranks of a checkpoint, three more.
ByFormula train_by_formula(const comm::CommunicatorPtr& comm, int stage, OptimizerKind kind,
                           const std::vector<at::Tensor>& saved = {}) {
  Chain model(4);
  const std::shared_ptr<WholeOptimizer> optimizer = make_whole_formula(kind, "a formula");
  Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
    options.optimizer.kind = kind;
    options.optimizer.groups = {hyper_of(kind)};
    options.optimizer.whole = optimizer;
    options.unit_numel = 100;
  });
  if (!saved.empty()) optimizer->set_state(saved);
  train_three_steps(model, rig, comm->rank(), DType::kFloat32);
  return {
      rig.weights(), {optimizer->state()}, optimizer->bytes(), optimizer->formula_bytes({hyper_of(kind)})};
}

TEST(WholeFormula, TheBitsDependOnNeitherStageNorWorld) {
  for (const OptimizerKind kind : {OptimizerKind::kAdafactor, OptimizerKind::kAdamW8bit}) {
    for (const int world : {1, 2, 3}) {
      std::vector<at::Tensor> first;
      for (int stage = 0; stage <= 3; ++stage) {
        run_ranks(world, [&](comm::CommunicatorPtr comm) {
          const ByFormula trained = train_by_formula(comm, stage, kind);
          if (comm->rank() != 0) return;
          if (first.empty() || (stage == 1 && !in_shared_memory())) first = trained.weights;
          EXPECT_TRUE(same_bits(trained.weights, first)) << "world " << world << " stage " << stage;
        });
      }
    }
  }
}

TEST(WholeFormula, StatesOfACheckpointGoToWhoeverOwnsThem) {
  for (const OptimizerKind kind : {OptimizerKind::kAdafactor, OptimizerKind::kAdamW8bit}) {
    std::vector<at::Tensor> saved(2);
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      saved[static_cast<size_t>(comm->rank())] = train_by_formula(comm, 2, kind).saved[0];
    });
    std::vector<at::Tensor> first;
    for (const int world : {2, 1}) {
      run_ranks(world, [&](comm::CommunicatorPtr comm) {
        const ByFormula with = train_by_formula(comm, 3, kind, saved),
                        without = train_by_formula(comm, 3, kind);
        if (comm->rank() != 0) return;
        EXPECT_FALSE(same_bits(with.weights, without.weights)) << "the states must count";
      });
    }
    // What is read is what was saved.
    run_ranks(1, [&](comm::CommunicatorPtr comm) {
      const std::shared_ptr<WholeOptimizer> optimizer = make_whole_formula(kind, "a formula");
      Chain model(4);
      Rig rig(*model, comm, 0, [&](ShardedModelOptions& options) {
        options.optimizer.kind = kind;
        options.optimizer.groups = {hyper_of(kind)};
        options.optimizer.whole = optimizer;
      });
      optimizer->set_state(saved);
      const at::Tensor once = optimizer->state();
      optimizer->set_state({once});
      EXPECT_TRUE(at::equal(optimizer->state(), once));
      EXPECT_GT(optimizer->bytes(), 0);
    });
  }
}

TEST(WholeFormula, BytesAreTheFormula) {
  for (const OptimizerKind kind : {OptimizerKind::kAdafactor, OptimizerKind::kAdamW8bit}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      const ByFormula trained = train_by_formula(comm, 2, kind);
      EXPECT_GT(trained.formula, 0);
      EXPECT_LE(trained.bytes, trained.formula);  // the chain has a layer without a gradient
    });
  }
  const ParameterSpec matrix{.name = "fc.weight", .shape = {1000, 300}, .aliases = {}},
      embedding{.name = "embed_tokens.weight", .shape = {1000, 300}, .aliases = {}},
      bias{.name = "fc.bias", .shape = {1000}, .aliases = {}};
  const kernels::Hyper hyper;
  EXPECT_EQ(formula_state_bytes(OptimizerKind::kAdamW8bit, hyper, matrix), 2 * 300'000 + 2 * 4 * 1172);
  EXPECT_EQ(formula_state_bytes(OptimizerKind::kAdamW8bit, hyper, embedding), 8 * 300'000);
  EXPECT_EQ(formula_state_bytes(OptimizerKind::kAdamW8bit, hyper, bias), 8 * 1000);
  EXPECT_EQ(formula_state_bytes(OptimizerKind::kAdamW8bit, {.optim_bits = 32}, matrix), 8 * 300'000);
  EXPECT_EQ(formula_state_bytes(OptimizerKind::kAdafactor, hyper, matrix), 4 * 1300);
  EXPECT_EQ(formula_state_bytes(OptimizerKind::kAdafactor, hyper, bias), 4 * 1000);
}

TEST(WholeFormula, DamagedStatesAreRefused) {
  run_ranks(1, [&](comm::CommunicatorPtr comm) {
    const at::Tensor saved = train_by_formula(comm, 0, OptimizerKind::kAdamW8bit).saved[0];
    const auto said = [&](const at::Tensor& damaged) {
      return message_of([&] { train_by_formula(comm, 0, OptimizerKind::kAdamW8bit, {damaged}); });
    };
    EXPECT_EQ(said(saved), "");
    EXPECT_NE(said(saved.narrow(0, 0, 5)).find("found 5 bytes"), std::string::npos);
    EXPECT_NE(said(saved.narrow(0, 0, 20)).find("in 20"), std::string::npos);
    at::Tensor other = saved.clone();
    other.narrow(0, 8, 10).fill_('x');
    EXPECT_NE(said(other).find("states of a formula"), std::string::npos);
    EXPECT_NE(said(saved.narrow(0, 0, saved.numel() - 1)), "") << "the last tensor is cut";
  });
}

/// A rule of a user's: the mean of each row, in fp32, and the number of the update in a byte.
struct RowMeans final : WholeUpdateRule {
  std::string name() const override { return "RowMeans"; }
  void update(const Parameter& p, const Step& step) const override {
    EXPECT_NE(p.name, "");
    at::Tensor &means = p.states["means"], &count = p.states["count"];
    if (!means.defined()) {
      means = at::zeros_like(p.gradient.mean(-1, true));
      count = at::zeros({1}, at::kByte);
    }
    EXPECT_EQ(count.item<int64_t>() + 1, step.number);
    count.add_(1);
    means.lerp_(p.gradient.mean(-1, true), 0.5);
    p.weights.mul_(1 - step.lr * step.weight_decay).sub_(means.tanh(), step.lr);
  }
};

ByFormula train_by_rule(const comm::CommunicatorPtr& comm, int stage,
                        const std::vector<at::Tensor>& saved = {}) {
  Chain model(4);
  const std::shared_ptr<WholeOptimizer> optimizer = make_whole_optimizer(std::make_shared<RowMeans>());
  EXPECT_EQ(optimizer->name(), "RowMeans");
  Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
    options.optimizer.groups = {{.lr = 0.1, .weight_decay = 0.1}};
    options.optimizer.whole = optimizer;
    options.unit_numel = 100;
  });
  if (!saved.empty()) optimizer->set_state(saved);
  train_three_steps(model, rig, comm->rank(), DType::kFloat32);
  return {rig.weights(), {optimizer->state()}, optimizer->bytes(), optimizer->formula_bytes({{}})};
}

TEST(WholeUpdateRule, TheBitsDependOnNeitherStageNorWorldAndStatesGoToOwners) {
  for (const int world : {1, 2, 3}) {
    std::vector<at::Tensor> first, saved(static_cast<size_t>(world)), second;
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(world, [&](comm::CommunicatorPtr comm) {
        const ByFormula trained = train_by_rule(comm, stage);
        saved[static_cast<size_t>(comm->rank())] = trained.saved[0];
        if (world == 1) {
          EXPECT_EQ(trained.bytes, 4 * (4 * (kWidth + 1) + 2)) << "of 4 layers: means in fp32, two counts";
        }
        if (comm->rank() != 0) return;
        if (first.empty() || (stage == 1 && !in_shared_memory())) first = trained.weights;
        EXPECT_TRUE(same_bits(trained.weights, first)) << "world " << world << " stage " << stage;
      });
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        const std::vector<at::Tensor> weights = train_by_rule(comm, stage, saved).weights;
        if (comm->rank() != 0) return;
        if (second.empty() || (stage == 1 && !in_shared_memory())) second = weights;
        EXPECT_TRUE(same_bits(weights, second)) << "stage " << stage;
        EXPECT_FALSE(same_bits(weights, first)) << "the states must count";
      });
    }
  }
}

/// Makes one state, at the first update.
struct Makes final : WholeUpdateRule {
  Makes(std::string state, at::Tensor tensor) : state(std::move(state)), tensor(std::move(tensor)) {}
  std::string name() const override { return "Makes"; }
  void update(const Parameter& p, const Step&) const override { p.states[state] = tensor; }
  std::string state;
  at::Tensor tensor;
};

TEST(WholeUpdateRule, AStateThatCannotBeSavedIsAnErrorOfTheFirstUpdate) {
  const ParameterSpec spec{.name = "w", .shape = {2}, .aliases = {}};
  const auto said = [&](const std::string& state, const at::Tensor& tensor) {
    const at::Tensor weights = at::ones({2});
    weights.mutable_grad() = at::ones({2});
    const auto optimizer = make_whole_optimizer(std::make_shared<Makes>(state, tensor));
    optimizer->own({{&spec, weights}});
    return message_of([&] { optimizer->step({{}}); });
  };
  EXPECT_EQ(said("a", at::ones({3})), "");
  EXPECT_NE(said("step", at::ones({3})).find("the state step of parameter w has the name of the step count"),
            std::string::npos);
  EXPECT_NE(said("a", {}).find("the state a of parameter w is no tensor"), std::string::npos);
  EXPECT_NE(said("a", at::ones({3}, at::kComplexFloat)).find("ComplexFloat"), std::string::npos);
}

}  // namespace
}  // namespace tessera::zero::testing
