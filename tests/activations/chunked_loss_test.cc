#include "activations/chunked_loss.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
        EXPECT_TRUE(at::allclose(chunked.gradients[i], plain.gradients[i], 1e-5, 1e-6))
            << chunk_rows << " " << i;
    }
  }
}

TEST(ChunkedLoss, InBfloat16) {
  const Result plain = result(0, true, at::kBFloat16), chunked = result(8, true, at::kBFloat16);
  EXPECT_TRUE(at::allclose(chunked.loss, plain.loss, 1e-3, 1e-3));
  for (size_t i = 0; i < plain.gradients.size(); ++i)
    EXPECT_TRUE(at::allclose(chunked.gradients[i], plain.gradients[i], 5e-2, 5e-2)) << i;
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

}  // namespace
}  // namespace tessera::testing
