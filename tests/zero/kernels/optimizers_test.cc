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

#include <functional>
#include <string>
#include <vector>

#include "tests/zero/kernels/one_segment.h"
#include "tests/zero/kernels/papers.h"
#include "zero/kernels/kernels.h"

namespace tessera::kernels {
namespace {

namespace optim = torch::optim;

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

/// Weights and gradients of a run, the same for both implementations. Gradients span many magnitudes; the
/// largest come in the first half, so that amsgrad has something to remember.
struct Scenario {
  at::Tensor weights;
  std::vector<at::Tensor> grads;
};

Scenario make_scenario() {
  at::manual_seed(7);
  Scenario run;
  run.weights = at::randn({kNumel});
  for (int64_t step = 0; step < kNumSteps; ++step)
    run.grads.push_back(at::randn({kNumel}) * at::pow(10.0, at::rand({kNumel}) * 4 - 3) *
                        (step < kNumSteps / 2 ? 1 : 0.01));
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

using Reference = std::function<at::Tensor(const Scenario&)>;

template <class Optimizer, class Options>
Reference by(const Options& options) {
  return [=](const Scenario& run) {
    at::Tensor weights = run.weights.clone().requires_grad_();
    Optimizer optimizer({weights}, options);
    for (const at::Tensor& grad : run.grads) {
      weights.mutable_grad() = grad.clone();
      optimizer.step();
    }
    return weights;
  };
}

/// `step(number, w, m, v, g)` in fp64.
template <class Step>
Reference by_hand(const Step& step) {
  return [=](const Scenario& run) {
    at::Tensor w = run.weights.to(at::kDouble), m = at::zeros_like(w), v = at::zeros_like(w);
    for (size_t i = 0; i < run.grads.size(); ++i)
      step(static_cast<int64_t>(i) + 1, w, m, v, run.grads[i].to(at::kDouble));
    return w;
  };
}

struct Case {
  std::string name;
  OptimizerKind kind;
  Hyper hyper;
  Reference expected;
  double limit = 1e-6;
};

/// A large lr, so that an error in the update is not hidden behind the weights it is added to.
Hyper large_steps(double weight_decay) { return {.lr = 0.1, .beta2 = 0.99, .weight_decay = weight_decay}; }

void add_adams(std::vector<Case>& cases, double weight_decay) {
  for (const bool amsgrad : {false, true}) {
    Hyper hyper = large_steps(weight_decay);
    hyper.amsgrad = amsgrad;
    const std::string name = std::string(amsgrad ? " amsgrad" : "") + (weight_decay > 0 ? " decay" : "");
    const auto set = [&](auto options) {
      return options.betas({0.9, 0.99}).weight_decay(weight_decay).amsgrad(amsgrad);
    };
    cases.push_back(
        {"Adam" + name, OptimizerKind::kAdam, hyper, by<optim::Adam>(set(optim::AdamOptions(0.1)))});
    if (weight_decay > 0)  // without it they are one
      cases.push_back(
          {"AdamW" + name, OptimizerKind::kAdamW, hyper, by<optim::AdamW>(set(optim::AdamWOptions(0.1)))});
  }
}

void add_rmsprops(std::vector<Case>& cases, double weight_decay) {
  for (const bool centered : {false, true})
    for (const double momentum : {0.0, 0.9}) {
      // Centered, the difference of two squares has fewer digits.
      cases.push_back({"RMSprop",
                       OptimizerKind::kRMSprop,
                       {.lr = 0.01,
                        .weight_decay = weight_decay,
                        .momentum = momentum,
                        .alpha = 0.95,
                        .centered = centered},
                       by<optim::RMSprop>(optim::RMSpropOptions(0.01)
                                              .alpha(0.95)
                                              .eps(1e-8)
                                              .weight_decay(weight_decay)
                                              .momentum(momentum)
                                              .centered(centered)),
                       centered ? 1e-4 : 1e-6});
    }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const double weight_decay : {0.0, 0.1}) {
    add_adams(all, weight_decay);
    add_rmsprops(all, weight_decay);
    for (const double lr_decay : {0.0, 0.05})
      all.push_back(
          {"Adagrad",
           OptimizerKind::kAdagrad,
           {.lr = 0.1, .eps = 1e-10, .weight_decay = weight_decay, .lr_decay = lr_decay},
           by<optim::Adagrad>(
               optim::AdagradOptions(0.1).lr_decay(lr_decay).weight_decay(weight_decay).eps(1e-10))});
    const Hyper hyper{.lr = 0.05, .beta2 = 0.99, .weight_decay = weight_decay};
    all.push_back({"Lion", OptimizerKind::kLion, hyper,
                   by_hand([hyper](int64_t, at::Tensor& w, at::Tensor& m, at::Tensor&, const at::Tensor& g) {
                     testing::lion_of_the_paper(hyper, w, m, g);
                   })});
  }
  for (const Hyper& h : std::vector<Hyper>{{},
                                           {.weight_decay = 0.1},
                                           {.momentum = 0.9},
                                           {.weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3},
                                           {.weight_decay = 0.1, .momentum = 0.9, .nesterov = true}}) {
    Hyper hyper = h;
    hyper.lr = 0.05;
    all.push_back({"SGD", OptimizerKind::kSGD, hyper,
                   by<optim::SGD>(optim::SGDOptions(0.05)
                                      .momentum(h.momentum)
                                      .dampening(h.dampening)
                                      .weight_decay(h.weight_decay)
                                      .nesterov(h.nesterov))});
  }
  Hyper uncorrected = large_steps(0);
  uncorrected.bias_correction = false;
  all.push_back({"Adam without bias correction", OptimizerKind::kAdam, uncorrected,
                 by_hand([](int64_t, at::Tensor& w, at::Tensor& m, at::Tensor& v, const at::Tensor& g) {
                   m = 0.9 * m + 0.1 * g;
                   v = 0.99 * v + 0.01 * g * g;
                   w = w - 0.1 * m / (v.sqrt() + 1e-8);
                 })});
  return all;
}

TEST(Optimizers, EqualTorchsAndTheirPapersAndEachOptionHasAnEffect) {
  const Scenario run = make_scenario();
  const std::vector<Case> all = cases();
  std::vector<at::Tensor> found;
  for (const Case& one : all) {
    SCOPED_TRACE(one.name + ", case " + std::to_string(found.size()));
    const at::Tensor master = run_ours(one.kind, one.hyper, run).master;
    EXPECT_LT(max_error(master, one.expected(run)), one.limit);
    EXPECT_GT(max_error(run.weights, master), 1e-2);
    for (const at::Tensor& other : found) EXPECT_GT(max_error(master, other), 1e-4);
    found.push_back(master);
  }
}

TEST(Optimizers, MaximizingIsMinimizingAlongTheGradientAndWithoutOneNothingMoves) {
  const Scenario run = make_scenario();
  Scenario negative = run, zero = run;
  for (at::Tensor& grad : negative.grads) grad = -grad;
  for (at::Tensor& grad : zero.grads)
    grad = at::zeros_like(grad);  // as rows of an embedding that are not used
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSGD,
                                   OptimizerKind::kAdagrad, OptimizerKind::kRMSprop, OptimizerKind::kLion}) {
    SCOPED_TRACE(static_cast<int>(kind));
    Hyper hyper = large_steps(0.1);
    const at::Tensor expected = run_ours(kind, hyper, negative).master;
    hyper.maximize = true;
    if (kind != OptimizerKind::kLion) {
      EXPECT_TRUE(at::equal(run_ours(kind, hyper, run).master, expected));
    }
    hyper = {.lr = 0.1, .momentum = 0.9, .centered = true, .amsgrad = true};
    EXPECT_TRUE(at::equal(run_ours(kind, hyper, zero).master, run.weights));
  }
}

Reference lamb(const Hyper& hyper) {
  return by_hand([=](int64_t step, at::Tensor& w, at::Tensor& m, at::Tensor& v, const at::Tensor& g) {
    testing::lamb_of_the_paper(hyper, step, w, m, v, g);
  });
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
  Hyper bounded = large_steps(0.0), uncorrected = large_steps(0.1);
  bounded.max_coeff = 0.2;
  uncorrected.bias_correction = false;
  std::vector<at::Tensor> found;
  for (const Hyper& hyper : {large_steps(0.0), large_steps(0.1), uncorrected, bounded}) {
    found.push_back(run_lamb_in_shards(hyper, run));
    EXPECT_LT(max_error(found.back(), lamb(hyper)(run)), 1e-6) << "case " << found.size();
    for (size_t i = 0; i + 1 < found.size(); ++i) EXPECT_GT(max_error(found[i], found.back()), 1e-4);
  }
}

TEST(Optimizers, LambTrustRatioIsBounded) {
  const Hyper hyper;
  EXPECT_EQ(lamb_trust_ratio(hyper, {4, 1}), 2.0);
  EXPECT_EQ(lamb_trust_ratio(hyper, {1e6, 1}), hyper.max_coeff);
  EXPECT_EQ(lamb_trust_ratio(hyper, {1, 1e6}), hyper.min_coeff);
  EXPECT_EQ(lamb_trust_ratio(hyper, {0, 1}), 1.0);
  EXPECT_EQ(lamb_trust_ratio(hyper, {1, 0}), 1.0);
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
  EXPECT_EQ(state_names(OptimizerKind::kRMSprop, hyper), (Names{"square_avg"}));
  hyper = {.momentum = 0.9, .centered = true, .amsgrad = true};
  EXPECT_EQ(state_names(OptimizerKind::kSGD, hyper), (Names{"momentum_buffer"}));
  EXPECT_EQ(state_names(OptimizerKind::kRMSprop, hyper),
            (Names{"square_avg", "grad_avg", "momentum_buffer"}));
  EXPECT_EQ(state_names(OptimizerKind::kAdamW, hyper), (Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
}

}  // namespace
}  // namespace tessera::kernels
