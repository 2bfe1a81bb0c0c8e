// Every optimizer over 20 steps against torch::optim, or, for those that torch does not have, against the
// paper's formula in fp64 tensor operations.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <string>
#include <vector>

#include "zero/kernels/kernels.h"

namespace tessera::kernels {
namespace {

/// Short operations on many threads are slower than on one; tests about threads set their own number.
class OneThread : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
[[maybe_unused]] const auto* const kOneThread = ::testing::AddGlobalTestEnvironment(new OneThread);

constexpr int64_t kNumel = 40'007;  // odd, several chunks, with a tail in every block and lane
constexpr int64_t kNumSteps = 20;

double max_error(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor reference = expected.detach().to(at::kDouble);
  return ((found.to(at::kDouble) - reference).abs().max() / reference.abs().max()).item<double>();
}

/// Weights and gradients of a run, the same for both implementations. Gradients span many magnitudes.
struct Scenario {
  at::Tensor weights;
  std::vector<at::Tensor> grads;
};

Scenario make_scenario() {
  at::manual_seed(7);
  Scenario run;
  run.weights = at::randn({kNumel});
  for (int64_t step = 0; step < kNumSteps; ++step)
    run.grads.push_back(at::randn({kNumel}) * at::pow(10.0, at::rand({kNumel}) * 4 - 3));
  return run;
}

Segment make_segment(OptimizerKind kind, const Hyper& hyper, const at::Tensor& weights) {
  Segment segment;
  segment.master = weights.clone();
  for (size_t i = 0; i < state_names(kind, hyper).size(); ++i)
    segment.state.push_back(at::zeros_like(weights));
  return segment;
}

Segment run_ours(OptimizerKind kind, const Hyper& hyper, const Scenario& run) {
  Segment segment = make_segment(kind, hyper, run.weights);
  for (int64_t step = 1; step <= kNumSteps; ++step) {
    segment.grad = run.grads[static_cast<size_t>(step - 1)];
    update(kind, hyper, step, 1.0, segment);
  }
  return segment;
}

template <class Optimizer, class Options>
at::Tensor run_torch(const Options& options, const Scenario& run) {
  at::Tensor weights = run.weights.clone().requires_grad_();
  Optimizer optimizer({weights}, options);
  for (const at::Tensor& grad : run.grads) {
    weights.mutable_grad() = grad.clone();
    optimizer.step();
  }
  return weights;
}

// A large lr, so that an error in the update is not hidden behind the weights it is added to.
Hyper adam_hyper(double weight_decay) {
  Hyper hyper;
  hyper.lr = 0.1;
  hyper.beta2 = 0.99;
  hyper.weight_decay = weight_decay;
  return hyper;
}

TEST(Optimizers, AdamEqualsTorch) {
  const Scenario run = make_scenario();
  for (double weight_decay : {0.0, 0.1}) {
    const auto options = torch::optim::AdamOptions(0.1).betas({0.9, 0.99}).weight_decay(weight_decay);
    const auto expected = run_torch<torch::optim::Adam>(options, run);
    const auto ours = run_ours(OptimizerKind::kAdam, adam_hyper(weight_decay), run);
    EXPECT_LT(max_error(ours.master, expected), 1e-6) << "weight decay " << weight_decay;
    EXPECT_GT(max_error(run.weights, expected), 1e-2);
  }
}

TEST(Optimizers, AdamWEqualsTorch) {
  const Scenario run = make_scenario();
  for (double weight_decay : {0.0, 0.1}) {
    const auto options = torch::optim::AdamWOptions(0.1).betas({0.9, 0.99}).weight_decay(weight_decay);
    const auto expected = run_torch<torch::optim::AdamW>(options, run);
    const auto ours = run_ours(OptimizerKind::kAdamW, adam_hyper(weight_decay), run);
    EXPECT_LT(max_error(ours.master, expected), 1e-6) << "weight decay " << weight_decay;
  }
}

TEST(Optimizers, AmsgradEqualsTorch) {
  Scenario run = make_scenario();
  for (size_t step = 10; step < run.grads.size(); ++step) run.grads[step] *= 0.01;  // the largest are behind
  for (double weight_decay : {0.0, 0.1}) {
    Hyper hyper = adam_hyper(weight_decay);
    hyper.amsgrad = true;
    const auto l2 =
        torch::optim::AdamOptions(0.1).betas({0.9, 0.99}).weight_decay(weight_decay).amsgrad(true);
    const auto decoupled =
        torch::optim::AdamWOptions(0.1).betas({0.9, 0.99}).weight_decay(weight_decay).amsgrad(true);
    const Segment adam = run_ours(OptimizerKind::kAdam, hyper, run);
    EXPECT_LT(max_error(adam.master, run_torch<torch::optim::Adam>(l2, run)), 1e-6);
    EXPECT_LT(max_error(run_ours(OptimizerKind::kAdamW, hyper, run).master,
                        run_torch<torch::optim::AdamW>(decoupled, run)),
              1e-6);
    EXPECT_GT(max_error(run_ours(OptimizerKind::kAdam, adam_hyper(weight_decay), run).master, adam.master),
              1e-3)
        << "the option must have an effect";
    EXPECT_TRUE((adam.state[2] >= adam.state[1]).all().item<bool>());
  }
}

TEST(Optimizers, RMSpropEqualsTorch) {
  const Scenario run = make_scenario();
  std::vector<at::Tensor> found;
  for (const bool centered : {false, true})
    for (const double momentum : {0.0, 0.9})
      for (const double weight_decay : {0.0, 0.1}) {
        Hyper hyper;
        hyper.lr = 0.01;
        hyper.alpha = 0.95;
        hyper.momentum = momentum;
        hyper.centered = centered;
        hyper.weight_decay = weight_decay;
        const auto options = torch::optim::RMSpropOptions(0.01)
                                 .alpha(0.95)
                                 .eps(1e-8)
                                 .weight_decay(weight_decay)
                                 .momentum(momentum)
                                 .centered(centered);
        const Segment ours = run_ours(OptimizerKind::kRMSprop, hyper, run);
        EXPECT_EQ(ours.state.size(), 1u + (centered ? 1 : 0) + (momentum > 0 ? 1 : 0));
        // Centered, the difference of two squares has fewer digits.
        EXPECT_LT(max_error(ours.master, run_torch<torch::optim::RMSprop>(options, run)),
                  centered ? 1e-4 : 1e-6)
            << "centered " << centered << " momentum " << momentum << " weight decay " << weight_decay;
        for (const at::Tensor& other : found) EXPECT_GT(max_error(ours.master, other), 1e-4);
        found.push_back(ours.master);
      }
}

TEST(Optimizers, MaximizingIsMinimizingAlongTheGradient) {
  const Scenario run = make_scenario();
  Scenario negative = run;
  for (at::Tensor& grad : negative.grads) grad = -grad;
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSGD,
                                   OptimizerKind::kAdagrad, OptimizerKind::kRMSprop}) {
    Hyper hyper = adam_hyper(0.1);
    const at::Tensor expected = run_ours(kind, hyper, negative).master;
    hyper.maximize = true;
    EXPECT_TRUE(at::equal(run_ours(kind, hyper, run).master, expected)) << static_cast<int>(kind);
  }
}

// Rows of an embedding that are not used have gradients of zero.
TEST(Optimizers, AGradientOfZeroMovesNothing) {
  Scenario run = make_scenario();
  for (at::Tensor& grad : run.grads) grad.zero_();
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSGD,
                                   OptimizerKind::kAdagrad, OptimizerKind::kRMSprop, OptimizerKind::kLion}) {
    Hyper hyper = adam_hyper(0);
    hyper.momentum = 0.9;
    hyper.amsgrad = hyper.centered = true;
    EXPECT_TRUE(at::equal(run_ours(kind, hyper, run).master, run.weights)) << static_cast<int>(kind);
  }
}

TEST(Optimizers, AdamAndAdamWPlaceTheDecayDifferently) {
  const Scenario run = make_scenario();
  const auto adam = run_ours(OptimizerKind::kAdam, adam_hyper(0.1), run);
  const auto adamw = run_ours(OptimizerKind::kAdamW, adam_hyper(0.1), run);
  EXPECT_GT(max_error(adam.master, adamw.master), 1e-2);
}

TEST(Optimizers, AdamWithoutBiasCorrection) {
  const Scenario run = make_scenario();
  Hyper hyper = adam_hyper(0.0);
  hyper.bias_correction = false;
  const auto ours = run_ours(OptimizerKind::kAdam, hyper, run);
  at::Tensor w = run.weights.to(at::kDouble), m = at::zeros_like(w), v = at::zeros_like(w);
  for (const at::Tensor& grad : run.grads) {
    const at::Tensor g = grad.to(at::kDouble);
    m = 0.9 * m + 0.1 * g;
    v = 0.99 * v + 0.01 * g * g;
    w = w - 0.1 * m / (v.sqrt() + 1e-8);
  }
  EXPECT_LT(max_error(ours.master, w), 1e-6);
}

TEST(Optimizers, SgdEqualsTorch) {
  struct Case {
    double momentum, dampening, weight_decay;
    bool nesterov;
  };
  const Scenario run = make_scenario();
  for (const Case& c : {Case{0, 0, 0, false}, Case{0, 0, 0.1, false}, Case{0.9, 0, 0, false},
                        Case{0.9, 0.3, 0.1, false}, Case{0.9, 0, 0.1, true}}) {
    Hyper hyper;
    hyper.lr = 0.05;
    hyper.momentum = c.momentum;
    hyper.dampening = c.dampening;
    hyper.weight_decay = c.weight_decay;
    hyper.nesterov = c.nesterov;
    const auto options = torch::optim::SGDOptions(0.05)
                             .momentum(c.momentum)
                             .dampening(c.dampening)
                             .weight_decay(c.weight_decay)
                             .nesterov(c.nesterov);
    const auto expected = run_torch<torch::optim::SGD>(options, run);
    const auto ours = run_ours(OptimizerKind::kSGD, hyper, run);
    EXPECT_LT(max_error(ours.master, expected), 1e-6)
        << "momentum " << c.momentum << " dampening " << c.dampening << " nesterov " << c.nesterov;
  }
}

TEST(Optimizers, AdagradEqualsTorch) {
  const Scenario run = make_scenario();
  for (double weight_decay : {0.0, 0.1}) {
    for (double lr_decay : {0.0, 0.05}) {
      Hyper hyper;
      hyper.lr = 0.1;
      hyper.eps = 1e-10;
      hyper.weight_decay = weight_decay;
      hyper.lr_decay = lr_decay;
      const auto options =
          torch::optim::AdagradOptions(0.1).lr_decay(lr_decay).weight_decay(weight_decay).eps(1e-10);
      const auto expected = run_torch<torch::optim::Adagrad>(options, run);
      const auto ours = run_ours(OptimizerKind::kAdagrad, hyper, run);
      EXPECT_LT(max_error(ours.master, expected), 1e-6)
          << "weight decay " << weight_decay << " lr decay " << lr_decay;
    }
  }
}

TEST(Optimizers, LionEqualsItsPaper) {
  const Scenario run = make_scenario();
  for (double weight_decay : {0.0, 0.1}) {
    Hyper hyper;
    hyper.lr = 0.05;
    hyper.beta2 = 0.99;
    hyper.weight_decay = weight_decay;
    const auto ours = run_ours(OptimizerKind::kLion, hyper, run);
    at::Tensor w = run.weights.to(at::kDouble), m = at::zeros_like(w);
    for (const at::Tensor& grad : run.grads) {
      const at::Tensor g = grad.to(at::kDouble);
      w = w - 0.05 * (at::sign(0.9 * m + 0.1 * g) + weight_decay * w);
      m = 0.99 * m + 0.01 * g;
    }
    EXPECT_LT(max_error(ours.master, w), 1e-6) << "weight decay " << weight_decay;
    EXPECT_LT(max_error(ours.state[0], m), 1e-6);
  }
}

/// The paper's Algorithm 2 with phi the identity, the ratio bounded as
/// DeepSpeed's max_coeff and min_coeff do.
at::Tensor lamb_of_the_paper(const Hyper& hyper, const Scenario& run) {
  at::Tensor w = run.weights.to(at::kDouble), m = at::zeros_like(w), v = at::zeros_like(w);
  for (int64_t step = 1; step <= kNumSteps; ++step) {
    const at::Tensor g = run.grads[static_cast<size_t>(step - 1)].to(at::kDouble);
    m = hyper.beta1 * m + (1 - hyper.beta1) * g;
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g;
    const double correction1 = hyper.bias_correction ? 1 - std::pow(hyper.beta1, step) : 1;
    const double correction2 = hyper.bias_correction ? 1 - std::pow(hyper.beta2, step) : 1;
    const at::Tensor u = m / correction1 / ((v / correction2).sqrt() + hyper.eps) + hyper.weight_decay * w;
    double ratio = (w.norm() / u.norm()).item<double>();
    ratio = std::min(std::max(ratio, hyper.min_coeff), hyper.max_coeff);
    w = w - hyper.lr * ratio * u;
  }
  return w;
}

/// One parameter that lies in three shards: parts of the norms are added, as ranks would.
at::Tensor run_lamb_in_shards(const Hyper& hyper, const Scenario& run) {
  Segment whole = make_segment(OptimizerKind::kLamb, hyper, run.weights);
  const std::vector<int64_t> cuts = {0, 12'345, 12'346, kNumel};
  const auto part = [&](const at::Tensor& tensor, size_t i) { return tensor.slice(0, cuts[i], cuts[i + 1]); };
  for (int64_t step = 1; step <= kNumSteps; ++step) {
    std::vector<Segment> parts(3);
    LambPart total;
    for (size_t i = 0; i < parts.size(); ++i) {
      const at::Tensor grad = part(run.grads[static_cast<size_t>(step - 1)], i);
      parts[i] = {part(whole.master, i), grad, {part(whole.state[0], i), part(whole.state[1], i)}, {}};
      const LambPart sums = lamb_norms(hyper, step, 1.0, parts[i]);
      total.weight_sq += sums.weight_sq;
      total.update_sq += sums.update_sq;
    }
    for (Segment& segment : parts) {
      segment.grad = at::Tensor();  // the second pass does not need it
      lamb_apply(hyper, step, lamb_trust_ratio(hyper, total), segment);
    }
  }
  return whole.master;
}

TEST(Optimizers, LambEqualsItsPaper) {
  const Scenario run = make_scenario();
  for (double weight_decay : {0.0, 0.1}) {
    for (bool bias_correction : {true, false}) {
      Hyper hyper = adam_hyper(weight_decay);
      hyper.bias_correction = bias_correction;
      EXPECT_LT(max_error(run_lamb_in_shards(hyper, run), lamb_of_the_paper(hyper, run)), 1e-6)
          << "weight decay " << weight_decay << " bias correction " << bias_correction;
    }
  }
}

TEST(Optimizers, LambTrustRatioIsBounded) {
  Hyper hyper;
  EXPECT_EQ(lamb_trust_ratio(hyper, {4, 1}), 2.0);
  EXPECT_EQ(lamb_trust_ratio(hyper, {1e6, 1}), hyper.max_coeff);
  EXPECT_EQ(lamb_trust_ratio(hyper, {1, 1e6}), hyper.min_coeff);
  EXPECT_EQ(lamb_trust_ratio(hyper, {0, 1}), 1.0);
  EXPECT_EQ(lamb_trust_ratio(hyper, {1, 0}), 1.0);

  const Scenario run = make_scenario();
  hyper = adam_hyper(0.0);
  hyper.max_coeff = 0.2;
  EXPECT_LT(max_error(run_lamb_in_shards(hyper, run), lamb_of_the_paper(hyper, run)), 1e-6);
}

TEST(Optimizers, StateNamesAreTorchs) {
  using Names = std::vector<std::string_view>;
  Hyper hyper;
  EXPECT_EQ(state_names(OptimizerKind::kAdam, hyper), (Names{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(state_names(OptimizerKind::kAdamW, hyper), (Names{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(state_names(OptimizerKind::kLamb, hyper), (Names{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(state_names(OptimizerKind::kAdagrad, hyper), (Names{"sum"}));
  EXPECT_EQ(state_names(OptimizerKind::kLion, hyper), (Names{"exp_avg"}));
  EXPECT_EQ(state_names(OptimizerKind::kSGD, hyper), Names{});
  hyper.momentum = 0.9;
  EXPECT_EQ(state_names(OptimizerKind::kSGD, hyper), (Names{"momentum_buffer"}));
}

}  // namespace
}  // namespace tessera::kernels
