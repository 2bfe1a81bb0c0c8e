#include "activations/chunked_loss.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/autocast.h"
#include "examples/language_model/model.h"
#include "tests/activations/models.h"
#include "tests/support/errors.h"
#include "tests/support/live_bytes.h"

namespace tessera::testing {
namespace {

struct Result {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
};

constexpr int64_t kRows = 40, kWords = 300;

/// `chunk_rows` 0: the plain loss.
Result result(int64_t chunk_rows, bool with_bias, at::ScalarType dtype = at::kFloat) {
  const auto leaf = [&](at::IntArrayRef sizes, uint64_t seed) {
    return randn(sizes, seed).to(dtype).set_requires_grad(true);
  };
  const at::Tensor hidden = leaf({2, kRows / 2, kDim}, 1), weight = leaf({kWords, kDim}, 2);
  const at::Tensor bias = with_bias ? leaf({kWords}, 3) : at::Tensor();
  at::Tensor target = randint(kWords, {2, kRows / 2}, 4);
  target[0][3] = -100;
  const at::Tensor loss =
      chunk_rows > 0 ? chunked_cross_entropy(hidden, weight, bias, target, {.chunk_rows = chunk_rows})
                     : at::cross_entropy_loss(at::linear(hidden, weight, bias).to(at::kFloat).flatten(0, 1),
                                              target.flatten());
  (loss * 3).backward();
  Result result{loss.detach(), {hidden.grad(), weight.grad()}};
  if (with_bias) result.gradients.push_back(bias.grad());
  return result;
}

TEST(ChunkedLoss, IsThePlainLoss) {
  for (const bool with_bias : {false, true}) {
    const Result plain = result(0, with_bias);
    for (const int64_t chunk_rows : {1, 7, 40, 1000}) {
      const Result chunked = result(chunk_rows, with_bias);
      EXPECT_TRUE(at::allclose(chunked.loss, plain.loss, 1e-6, 1e-6)) << chunk_rows;
      ASSERT_EQ(chunked.gradients.size(), plain.gradients.size());
      for (size_t i = 0; i < plain.gradients.size(); ++i)
        EXPECT_TRUE(at::allclose(chunked.gradients[i], plain.gradients[i], 0, 1e-6))
            << chunk_rows << " " << i;
    }
  }
}

/// The gradients of `hidden` and of `weight`, by chunks of 7 rows or by the plain loss.
std::vector<at::Tensor> gradients_where(const at::Tensor& target, int64_t ignore_index, bool by_chunks) {
  const at::Tensor hidden = randn({kRows, kDim}, 1).set_requires_grad(true);
  const at::Tensor weight = randn({kWords, kDim}, 2).set_requires_grad(true);
  const at::Tensor loss =
      by_chunks
          ? chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = 7, .ignore_index = ignore_index})
          : at::cross_entropy_loss(at::linear(hidden, weight), target, {}, at::Reduction::Mean, ignore_index);
  loss.backward();
  return {hidden.grad(), weight.grad()};
}

TEST(ChunkedLoss, IgnoresWhatThePlainLossIgnores) {
  for (const int64_t ignore_index : {int64_t{-100}, int64_t{-1}, int64_t{0}, kWords, int64_t{100'000}})
    for (const bool all : {false, true}) {
      at::Tensor target = randint(kWords, {kRows}, 4);
      (all ? target : target.narrow(0, 5, 12)).fill_(ignore_index);
      const auto plain = gradients_where(target, ignore_index, false);
      const auto chunked = gradients_where(target, ignore_index, true);
      for (size_t i = 0; i < plain.size(); ++i)
        EXPECT_TRUE(at::allclose(chunked[i], plain[i], 0, 1e-6))
            << "ignore_index " << ignore_index << (all ? ", of all rows, " : " ") << i;
      EXPECT_EQ(chunked[1].count_nonzero().item<int64_t>() == 0, all);
    }
}

TEST(ChunkedLoss, InBfloat16) {
  const Result plain = result(0, true, at::kBFloat16), chunked = result(8, true, at::kBFloat16);
  EXPECT_TRUE(at::allclose(chunked.loss, plain.loss, 1e-3, 1e-3));
  for (size_t i = 0; i < plain.gradients.size(); ++i)
    EXPECT_TRUE(at::allclose(chunked.gradients[i], plain.gradients[i], 5e-2, 5e-2)) << i;
}

TEST(ChunkedLoss, RoundsInSixteenBitsAsThePlainLoss) {
  constexpr double kLossScale = 1 << 17;  // more than fp16 has
  constexpr int64_t kManyRows = 4096;
  const at::Tensor target = randint(kWords, {kManyRows}, 4);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor hidden = (randn({kManyRows, kDim}, 1) / 4).to(dtype).set_requires_grad(true);
    const at::Tensor weight = (randn({kWords, kDim}, 2) / 4).to(dtype).set_requires_grad(true);
    (chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = 8}) * kLossScale).backward();
    const at::Tensor exact_hidden = hidden.detach().to(at::kDouble).set_requires_grad(true);
    const at::Tensor exact_weight = weight.detach().to(at::kDouble).set_requires_grad(true);
    (at::cross_entropy_loss(at::linear(exact_hidden, exact_weight), target) * kLossScale).backward();
    for (const auto& [found, exact] : {std::pair(hidden, exact_hidden), std::pair(weight, exact_weight)}) {
      EXPECT_EQ(found.grad().scalar_type(), dtype);
      const at::Tensor error = found.grad().to(at::kDouble) - exact.grad();
      EXPECT_LT((error.norm() / exact.grad().norm()).item<double>(), 0.005) << dtype << " " << found.sizes();
    }
  }
}

TEST(ChunkedLoss, SmallProbabilitiesKeepTheirBitsInFp16) {
  constexpr int64_t kManyWords = 16384, kTargets = 16, kManyRows = 1024, kFewDims = 4;
  const at::Tensor target = randint(kTargets, {kManyRows}, 4);
  const at::Tensor hidden = (randn({kManyRows, kFewDims}, 1) / 4).to(at::kHalf);
  const at::Tensor weight = (randn({kManyWords, kFewDims}, 2) / 4).to(at::kHalf).set_requires_grad(true);
  (chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = kManyRows}) * 65536.0).backward();
  const at::Tensor exact = weight.detach().to(at::kDouble).set_requires_grad(true);
  (at::cross_entropy_loss(at::linear(hidden.to(at::kDouble), exact), target) * 65536.0).backward();
  const auto others = [&](const at::Tensor& gradient) { return gradient.slice(0, kTargets).to(at::kDouble); };
  const at::Tensor error = others(weight.grad()) - others(exact.grad());
  EXPECT_LT((error.norm() / others(exact.grad()).norm()).item<double>(), 0.001) << "words that are no target";
}

TEST(ChunkedLoss, HoldsNoMoreThanAChunkOfLogits) {
  const int64_t words = 4096, rows = 512, chunk = 64;
  const at::Tensor hidden = randn({rows, 8}, 1).set_requires_grad(true);
  const at::Tensor weight = randn({words, 8}, 2), target = randint(words, {rows}, 3);
  const LiveBytes live;
  chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = chunk}).backward();
  EXPECT_LT(live.peak(), 5 * chunk * words * 4) << "logits, their logarithms and gradients, of one chunk";
  EXPECT_LT(live.peak(), rows * words * 4) << "the logits of all rows";
}

TEST(ChunkedLoss, RefusesOtherShapes) {
  const at::Tensor hidden = randn({4, 8}, 1), weight = randn({10, 8}, 2), target = randint(10, {5}, 3);
  EXPECT_THAT(error_of([&] { chunked_cross_entropy(hidden, weight, {}, target); }),
              ::testing::HasSubstr("hidden [4, 8], weight [10, 8], target [5]"));
}

/// Of the GPT; 0: its own.
decltype(GptOptions::loss) loss_of_rows(int64_t chunk_rows) {
  if (chunk_rows == 0) return {};
  return [chunk_rows](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target) {
    return chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = chunk_rows});
  };
}

/// A GPT whose loss goes by `kRowsAtOnce` tokens.
template <int64_t kRowsAtOnce>
struct TinyGptImpl : GptImpl {
  TinyGptImpl()
      : GptImpl({.dim = 64,
                 .layers = 2,
                 .heads = 2,
                 .vocabulary = 512,
                 .sequence = 16,
                 .loss = loss_of_rows(kRowsAtOnce)}) {}
};
template <int64_t kRowsAtOnce>
struct TinyGpt : torch::nn::ModuleHolder<TinyGptImpl<kRowsAtOnce>> {
  using Impl = TinyGptImpl<kRowsAtOnce>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
};

template <int64_t kRowsAtOnce>
TrainingRun train_tiny(int world, int stage, bool autocast, const std::string& policy = "none") {
  Case c;
  c.world = world;
  c.micro_batch = 4 / world;
  c.steps = 3;
  c.config.zero.stage = stage;
  c.config.zero.unit_numel = 10'000;
  c.config.zero.param_persistence_threshold = 0;
  c.config.autocast.enabled = autocast;
  c.config.activations.policy = policy;
  return engine_run<TinyGpt<kRowsAtOnce>>(
      c, [&](TinyGptImpl<kRowsAtOnce>& model, int step, int64_t first, int64_t num) {
        const AutocastScope scope({.enabled = autocast}, at::kCPU);
        const at::Tensor tokens = randint(512, {4, 17}, step).narrow(0, first, num);
        return model.forward(tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16));
      });
}

TEST(ChunkedLoss, TrainsTheSameAtEveryStage) {
  const TrainingRun plain = train_tiny<0>(1, 0, false), whole = train_tiny<24>(2, 0, false);
  EXPECT_LT(largest_difference(whole.weights, plain.weights), 1e-5);
  for (size_t step = 0; step < plain.gradients.size(); ++step)
    EXPECT_LT(largest_difference(whole.gradients[step], plain.gradients[step]), 1e-5) << step;
  for (const int stage : {1, 2, 3}) {
    const TrainingRun sharded = train_tiny<24>(2, stage, false);
    EXPECT_EQ(sharded.losses, whole.losses) << "stage " << stage;
    EXPECT_TRUE(bit_equal(sharded.weights, whole.weights)) << "stage " << stage;
  }
}

TEST(ChunkedLoss, UnderAutocastAndRecomputation) {
  const TrainingRun plain = train_tiny<0>(1, 0, true), chunked = train_tiny<24>(1, 3, true);
  EXPECT_LT(largest_difference(chunked.weights, plain.weights), 1e-2);
  for (const char* policy : {"cheap", "block"}) {
    const TrainingRun recomputed = train_tiny<24>(1, 3, true, policy);
    EXPECT_EQ(recomputed.losses, chunked.losses) << policy;
    EXPECT_TRUE(bit_equal(recomputed.weights, chunked.weights)) << policy;
  }
}

}  // namespace
}  // namespace tessera::testing
