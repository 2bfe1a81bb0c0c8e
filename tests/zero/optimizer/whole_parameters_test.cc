// Rules that need whole parameters: Muon on shards, the formulas and a user's rule and optimizer on owners.
// The bits, the states in checkpoints, the bytes, what is refused, and what a failure leaves. Adafactor and
// Muon beside torch's: tests/python/programs/{optim_rank,muon_rank}.py; AdamW8bit's formula:
// adam_8bit_test.cc.
#include "zero/optimizer/whole_parameters.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/error.h"
#include "tests/zero/zero_testing.h"
#include "zero/optimizer/whole_formula.h"

namespace tessera::zero::testing {
namespace {

using kernels::OptimizerKind;

/// Steps by gradient / its norm, which needs the whole gradient.
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
  int64_t bytes() const override { return static_cast<int64_t>(owned.size()); }
  at::Tensor state() const override { return {}; }
  void check_state_of_another_program(const at::Tensor&) const override {}
  void set_state(const std::vector<at::Tensor>&, const NamesInCheckpoint*) override {}

  std::set<std::string> owned;
  std::map<std::string, at::Tensor> gradients;  // of the last step
  bool fails = false, replaces = false;

 private:
  std::vector<NamedTensor> parameters_;
  bool on_one_rank_;
};

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

using Made = std::shared_ptr<WholeOptimizer>;
using Maker = std::function<Made(const std::vector<NamedTensor>&)>;

struct Rule {
  friend void PrintTo(const Rule& rule, std::ostream* out) { *out << rule.name; }
  std::string name;
  OptimizerKind kind;
  kernels::Hyper hyper;
  std::vector<Maker> makers;   // all give the same bits; none: the rule is on shards
  double furthest = INFINITY;  // that three steps move a parameter
};

Rule by_formula(const std::string& name, OptimizerKind kind, const kernels::Hyper& hyper) {
  return {name, kind, hyper, {[kind](const auto&) -> Made { return make_whole_formula(kind, "a formula"); }}};
}

std::vector<Rule> rules_with_states() {
  return {by_formula("Adafactor", OptimizerKind::kAdafactor, {.lr = 0.05, .eps = 1e-7, .weight_decay = 0.1}),
          by_formula("AdamW8bit", OptimizerKind::kAdamW8bit,
                     {.lr = 0.01, .weight_decay = 0.1, .min_8bit_size = 20}),
          {"RowMeans", OptimizerKind::kSGD, {.lr = 0.1, .weight_decay = 0.1}, {[](const auto&) -> Made {
             return make_whole_optimizer(std::make_shared<RowMeans>());
           }}}};
}

std::vector<Rule> all_rules() {
  std::vector<Rule> rules = rules_with_states();
  rules.push_back({"Muon",
                   OptimizerKind::kMuon,
                   {.lr = 0.05, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true},
                   {}});
  rules.push_back({"Normalized",
                   OptimizerKind::kSGD,
                   {},
                   {[](const auto& parameters) { return std::make_shared<Normalized>(parameters); },
                    [](const auto& parameters) { return std::make_shared<Normalized>(parameters, true); }},
                   0.31});
  return rules;
}

struct How {
  DType dtype = DType::kFloat32;
  size_t maker = 0;
  std::vector<at::Tensor> saved = {};  // by all ranks of a checkpoint
  Change change = {};
};

struct Trained {
  std::vector<at::Tensor> weights;
  at::Tensor saved;  // this rank's
  int64_t bytes = 0, formula = 0;
};

/// Three updates of a chain of layers.
Trained train(const comm::CommunicatorPtr& comm, int stage, const Rule& rule, const How& how = {}) {
  Chain model(4);
  const std::vector<NamedTensor> parameters = view_of(*model).parameters;
  const Made optimizer = rule.makers.empty() ? nullptr : rule.makers.at(how.maker)(parameters);
  Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
    options.optimizer.kind = rule.kind;
    options.optimizer.groups = {rule.hyper};
    options.optimizer.whole = optimizer;
    options.compute_dtype = how.dtype;
    options.unit_numel = 100;
    if (how.change) how.change(options);
  });
  if (!how.saved.empty()) optimizer->set_state(how.saved, nullptr);
  const std::vector<at::Tensor> before = rig.weights();
  train_three_steps(model, rig, comm->rank(), how.dtype);
  Trained trained{.weights = rig.weights(), .saved = {}};
  if (optimizer)
    trained = {std::move(trained.weights), optimizer->state(), optimizer->bytes(),
               optimizer->formula_bytes({rule.hyper})};
  for (size_t i = 0; i < before.size(); ++i) {
    const double moved = (trained.weights[i] - before[i]).norm().item<double>();
    EXPECT_EQ(moved == 0, i >= before.size() - 2) << i << ": Chain's extra layer has no gradient";
    EXPECT_LE(moved, rule.furthest) << i;
    if (stage > 0) continue;
    const at::Tensor values = parameters[i].tensor.detach();
    EXPECT_TRUE(at::equal(values, trained.weights[i].view_as(values).to(values.scalar_type())))
        << "the model has the masters' cast, " << i;
  }
  return trained;
}

class WholeRule : public ::testing::TestWithParam<Rule> {};
class WholeRuleWithStates : public WholeRule {};
const auto kNameOf = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(All, WholeRule, ::testing::ValuesIn(all_rules()), kNameOf);
INSTANTIATE_TEST_SUITE_P(All, WholeRuleWithStates, ::testing::ValuesIn(rules_with_states()), kNameOf);

TEST_P(WholeRule, TheBitsDependOnNeitherStageNorOwners) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int world : dtype == DType::kFloat32 ? std::vector<int>{1, 2, 3} : std::vector<int>{2}) {
      std::vector<at::Tensor> first;
      for (int stage = 0; stage <= 3; ++stage) {
        for (size_t maker = 0; maker < std::max<size_t>(1, GetParam().makers.size()); ++maker) {
          run_ranks(world, [&](comm::CommunicatorPtr comm) {
            const Trained trained = train(comm, stage, GetParam(), {.dtype = dtype, .maker = maker});
            if (comm->rank() != 0) {
              EXPECT_TRUE(maker == 0 || trained.bytes == 0) << "rank 0 owns all";
              return;
            }
            // Over Gloo the sums of stage 0 have another order on three ranks and more.
            if (first.empty() || (stage == 1 && !in_shared_memory())) first = trained.weights;
            EXPECT_TRUE(same_bits(trained.weights, first)) << "world " << world << " stage " << stage;
          });
        }
      }
    }
  }
}

// Gradients add up in another order, which shows in Muon's bf16; a part in a wrong place would be off by a
// rate.
TEST_P(WholeRule, RowsOfRanksHoldTheSame) {
  std::vector<at::Tensor> expected;
  for (const int size : {0, 2, 1}) {
    std::vector<std::vector<at::Tensor>> of_rank(4);
    run_ranks(4, [&](comm::CommunicatorPtr comm) {
      of_rank[static_cast<size_t>(comm->rank())] =
          train(comm, 3, GetParam(),
                {.change = [&](ShardedModelOptions& options) { options.groups.shard = size; }})
              .weights;
    });
    for (const auto& weights : of_rank) EXPECT_TRUE(same_bits(weights, of_rank[0])) << size;
    if (expected.empty()) expected = of_rank[0];
    EXPECT_LT(largest_difference(of_rank[0], expected), GetParam().name == "Muon" ? 5e-3 : 1e-5) << size;
  }
}

TEST_P(WholeRuleWithStates, StatesGoToWhoeverOwnsThem) {
  const Rule& rule = GetParam();
  for (const int saved_by : {1, 2, 3}) {
    std::vector<at::Tensor> saved(static_cast<size_t>(saved_by));
    run_ranks(saved_by, [&](comm::CommunicatorPtr comm) {
      saved[static_cast<size_t>(comm->rank())] = train(comm, 2, rule).saved;
    });
    for (const int world : {1, 3}) {
      std::vector<at::Tensor> first;
      for (int stage = 0; stage <= 3; ++stage) {
        run_ranks(world, [&](comm::CommunicatorPtr comm) {
          const std::vector<at::Tensor> weights = train(comm, stage, rule, {.saved = saved}).weights;
          if (comm->rank() != 0) return;
          if (first.empty() || (stage == 1 && !in_shared_memory())) first = weights;
          EXPECT_TRUE(same_bits(weights, first)) << "world " << world << " stage " << stage;
        });
      }
      run_ranks(world, [&](comm::CommunicatorPtr comm) {
        const std::vector<at::Tensor> without = train(comm, 3, rule).weights;
        if (comm->rank() != 0) return;
        EXPECT_FALSE(same_bits(without, first)) << "the states must count";
      });
    }
  }
}

TEST_P(WholeRuleWithStates, WhatIsReadIsWhatWasSaved) {
  run_ranks(1, [&](comm::CommunicatorPtr comm) {
    const at::Tensor saved = train(comm, 2, GetParam()).saved;
    Chain model(4);
    const Made optimizer = GetParam().makers[0](view_of(*model).parameters);
    Rig rig(*model, comm, 0, [&](ShardedModelOptions& options) {
      options.optimizer.kind = GetParam().kind;
      options.optimizer.groups = {GetParam().hyper};
      options.optimizer.whole = optimizer;
    });
    const NamesInCheckpoint none;
    optimizer->set_state({saved}, &none);
    EXPECT_EQ(optimizer->bytes(), 0) << "of no parameter";
    optimizer->set_state({saved}, nullptr);
    EXPECT_TRUE(at::equal(optimizer->state(), saved));
    EXPECT_GT(optimizer->bytes(), 0);
    optimizer->set_state({saved}, &none);
    EXPECT_TRUE(at::equal(optimizer->state(), saved)) << "others stay";
  });
}

TEST_P(WholeRuleWithStates, DamagedStatesAreRefused) {
  run_ranks(1, [&](comm::CommunicatorPtr comm) {
    const at::Tensor saved = train(comm, 0, GetParam()).saved;
    const auto said = [&](const at::Tensor& damaged) {
      return message_of([&] { train(comm, 0, GetParam(), {.saved = {damaged}}); });
    };
    EXPECT_EQ(said(saved), "");
    EXPECT_NE(said(saved.narrow(0, 0, 5)).find("found 5 bytes"), std::string::npos);
    EXPECT_NE(said(saved.narrow(0, 0, 20)).find("in 20"), std::string::npos);
    at::Tensor other = saved.clone();
    other.narrow(0, 8, 10).fill_('x');
    EXPECT_NE(said(other).find("states of "), std::string::npos);
    EXPECT_NE(said(saved.narrow(0, 0, saved.numel() - 1)), "") << "the last tensor is cut";
  });
}

TEST_P(WholeRuleWithStates, BytesAreTheFormula) {
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    const Trained trained = train(comm, 2, GetParam());
    if (GetParam().name == "RowMeans") return;  // nobody knows what it is going to keep
    EXPECT_GT(trained.formula, 0);
    EXPECT_LE(trained.bytes, trained.formula);  // the chain has a layer without a gradient
  });
  if (GetParam().name != "RowMeans") return;
  run_ranks(1, [&](comm::CommunicatorPtr comm) {
    EXPECT_EQ(train(comm, 2, GetParam()).bytes, 4 * (4 * (kWidth + 1) + 2))
        << "of 4 layers: means in fp32, two counts";
  });
}

TEST(WholeFormula, BytesByShapeAndName) {
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

/// A chain that is trained by Normalized.
struct NormalizedRig {
  NormalizedRig(comm::CommunicatorPtr comm, int stage)
      : optimizer(std::make_shared<Normalized>(parameters)),
        rig(*model, std::move(comm), stage, [&](ShardedModelOptions& options) {
          options.optimizer.whole = optimizer;
          options.unit_numel = 100;
        }) {}
  Chain model{4};
  std::vector<NamedTensor> parameters = view_of(*model).parameters;
  std::shared_ptr<Normalized> optimizer;
  Rig rig;
};

TEST(WholeParameters, GradientsAreTheScaledMeanOfAllRanks) {
  for (const int stage : {0, 3}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      NormalizedRig by(comm, stage);
      by.rig.backward(by.model->forward(batch(comm->rank(), 0)).square().sum());
      by.rig.update(0.5);
      Chain plain(4);
      const at::Tensor both = at::cat({batch(0, 0), batch(1, 0)});
      const std::vector<at::Tensor> expected =
          plain_gradients(*plain, plain->forward(both).square().sum() / 2);
      for (size_t i = 0; i < by.parameters.size(); ++i) {
        const auto found = by.optimizer->gradients.find(by.parameters[i].name);
        if (found == by.optimizer->gradients.end()) continue;  // another rank's, or unused
        EXPECT_LT((found->second - 0.5 * expected[i]).abs().max().item<double>(), 1e-5) << found->first;
      }
    });
  }
}

TEST(WholeParameters, AFailureIsEveryRanksAndLeavesTheParameters) {
  for (const int stage : {0, 2, 3}) {
    for (const bool replaces : {false, true}) {
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        NormalizedRig by(comm, stage);
        (replaces ? by.optimizer->replaces : by.optimizer->fails) = comm->rank() == 1;
        by.rig.backward(by.model->forward(batch(comm->rank(), 0)).square().sum());
        const std::string said = message_of([&] { by.rig.update(); });
        if (replaces) {
          EXPECT_NE(said.find("has replaced the memory of parameter"), std::string::npos) << said;
        } else {
          EXPECT_EQ(said, comm->rank() == 1 ? "no" : "Normalized: rank 1: no");
        }
        EXPECT_NE(message_of([&] { by.rig.sharded->check_usable(); }), "");
        for (const NamedTensor& parameter : by.parameters) EXPECT_FALSE(parameter.tensor.grad().defined());
        by.rig.sharded->drop_gradients();  // of that step alone
        by.optimizer->replaces = by.optimizer->fails = false;
        by.rig.backward(by.model->forward(batch(comm->rank(), 0)).square().sum());
        EXPECT_EQ(message_of([&] { by.rig.update(); }), "");
      });
    }
  }
}

TEST(WholeParameters, AnotherFunctionMovesThem) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      NormalizedRig by(comm, stage);
      for (int round = 0; round < 2; ++round) {
        by.rig.step(by.model->forward(batch(comm->rank(), round)).square().sum());
        by.rig.sharded->apply_to_whole([&] {
          for (const NamedTensor& parameter : by.parameters)
            if (by.optimizer->owned.contains(parameter.name)) at::Tensor(parameter.tensor).fill_(round + 1);
        });
        for (const at::Tensor& weight : by.rig.weights())
          EXPECT_TRUE((weight == round + 1).all().item<bool>()) << "stage " << stage;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::zero::testing
