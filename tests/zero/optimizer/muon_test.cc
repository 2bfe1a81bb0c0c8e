// Muon: which parameters are its matrices, and what it makes of a matrix. On shards:
// whole_parameters_test.cc. Beside torch.optim.Muon: tests/python/programs/muon_rank.py.
#include "zero/optimizer/muon.h"

#include <ATen/ops/linalg_svdvals.h>
#include <gtest/gtest.h>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

ParameterSpec spec_of(const std::string& name, std::vector<int64_t> shape,
                      std::vector<std::string> aliases = {}) {
  return {.name = name,
          .shape = std::move(shape),
          .dtype = DType::kFloat32,
          .trainable = true,
          .group = 0,
          .aliases = std::move(aliases)};
}

TEST(Muon, MatricesButEmbeddingsAndOutputLayers) {
  EXPECT_TRUE(is_muon_matrix(spec_of("h.0.attn.weight", {8, 8})));
  EXPECT_TRUE(is_muon_matrix(spec_of("conv.weight", {8, 3, 3, 3})));
  EXPECT_FALSE(is_muon_matrix(spec_of("h.0.attn.bias", {8})));
  EXPECT_FALSE(is_muon_matrix(spec_of("scale", {})));
  EXPECT_FALSE(is_muon_matrix(spec_of("model.Embed_tokens.weight", {8, 8})));
  EXPECT_FALSE(is_muon_matrix(spec_of("transformer.wte.weight", {8, 8})));
  EXPECT_FALSE(is_muon_matrix(spec_of("lm_head.weight", {8, 8})));
  EXPECT_FALSE(is_muon_matrix(spec_of("shared.weight", {8, 8}, {"lm_head.weight"})));
}

TEST(Muon, RateFactors) {
  using kernels::AdjustLr;
  const ParameterSpec tall = spec_of("w", {16, 4}), filters = spec_of("w", {2, 2, 3, 3});
  EXPECT_EQ(muon_rate_factor(AdjustLr::kOriginal, tall), 2);
  EXPECT_EQ(muon_rate_factor(AdjustLr::kOriginal, filters), 1);
  EXPECT_EQ(muon_rate_factor(AdjustLr::kMatchRmsAdamW, tall), 0.8);
  EXPECT_NEAR(muon_rate_factor(AdjustLr::kSpectralUnclamped, filters), 1 / 3.0, 1e-12);
  EXPECT_GT(orthogonalization_cost(filters), 0);
}

// The iteration brings singular values to between 0.7 and 1.2 (Jordan's post); bf16 adds a little.
TEST(Muon, SingularValuesComeNearOne) {
  const auto expect_near_one = [](const at::Tensor& matrix) {
    const at::Tensor values = at::linalg_svdvals(matrix.to(at::kFloat));
    EXPECT_GT(values.min().item<double>(), 0.6);
    EXPECT_LT(values.max().item<double>(), 1.3);
  };
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{12, 30}, {30, 12}, {9, 2, 3, 3}}) {
    const at::Tensor result = orthogonalize(randn(shape, 1).to(at::kBFloat16), 5);
    EXPECT_EQ(result.sizes(), at::IntArrayRef(shape));
    expect_near_one(result.reshape({shape[0], -1}));
  }
  const at::Tensor batch = randn({3, 12, 30}, 2).to(at::kBFloat16);
  const at::Tensor result = orthogonalize(batch, 5);
  for (int64_t i = 0; i < 3; ++i) {
    expect_near_one(result[i]);
    EXPECT_TRUE(at::equal(result[i], orthogonalize(batch[i], 5)));
  }
  const at::Tensor zero = at::zeros({3, 4}, at::kBFloat16);
  EXPECT_TRUE(at::equal(orthogonalize(zero, 5), zero));
}

}  // namespace
}  // namespace tessera::zero::testing
