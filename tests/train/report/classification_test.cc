// Sums of classification over a batch. Reports of them: scikit_learn_test.py.
#include "train/report/classification.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "train/report/classification_report.h"

namespace tessera::train {
namespace {

TEST(Classification, CountsSamplesLossesAndHits) {
  const at::Tensor logits =
      at::tensor({2.0f, 0.0f, 0.0f, /**/ 0.0f, 0.0f, 1.0f, /**/ 0.0f, 3.0f, 0.0f}).view({3, 3});
  const at::Tensor target = at::tensor({0, 1, 1}, at::kLong);
  const at::Tensor sums = classification_statistics(logits, target, {});
  const double expected = -std::log(std::exp(2.0) / (std::exp(2.0) + 2)) - std::log(1 / (std::exp(1.0) + 2)) -
                          std::log(std::exp(3.0) / (std::exp(3.0) + 2));
  EXPECT_EQ(sums.scalar_type(), at::kDouble);
  EXPECT_EQ(sums[0].item<double>(), 3);
  EXPECT_NEAR(sums[1].item<double>(), expected, 1e-6);
  const at::Tensor confusion = confusion_matrix(sums);  // rows are true classes
  EXPECT_TRUE(at::equal(
      confusion,
      at::tensor({1.0, 0.0, 0.0, /**/ 0.0, 1.0, 1.0, /**/ 0.0, 0.0, 0.0}, at::kDouble).view({3, 3})));

  const Metrics metrics = classification_metrics(sums);
  ASSERT_EQ(metrics.size(), 2u);
  EXPECT_EQ(metrics[0].first, "accuracy");
  EXPECT_NEAR(metrics[0].second, 2.0 / 3, 1e-12);
  EXPECT_EQ(metrics[1].first, "loss");
  EXPECT_NEAR(metrics[1].second, expected / 3, 1e-6);
}

TEST(Classification, PaddingNeverCounts) {
  at::Tensor logits = at::randn({5, 4});
  const at::Tensor target = at::tensor({0, 1, 2, 3, 0}, at::kLong);
  const at::Tensor mask = at::tensor({1, 1, 1, 0, 0}).to(at::kBool);
  const at::Tensor expected = classification_statistics(logits.slice(0, 0, 3), target.slice(0, 0, 3), {});
  logits[3].fill_(std::numeric_limits<float>::quiet_NaN());
  logits[4].fill_(std::numeric_limits<float>::infinity());
  EXPECT_TRUE(at::equal(classification_statistics(logits, target, mask), expected));
  const at::Tensor none = classification_statistics(logits, target, at::zeros({5}, at::kBool));
  EXPECT_EQ(none.sum().item<double>(), 0);
  EXPECT_EQ(classification_report(confusion_matrix(none)).weighted.f1, 0) << "nothing is divided by zero";
}

TEST(Classification, HalfPrecisionLogits) {
  const at::Tensor logits = at::randn({6, 4});
  const at::Tensor target = at::tensor({0, 1, 2, 3, 0, 1}, at::kLong);
  const at::Tensor sums = classification_statistics(logits.to(at::kBFloat16), target, {});
  const at::Tensor expected = classification_statistics(logits.to(at::kBFloat16).to(at::kFloat), target, {});
  EXPECT_TRUE(at::equal(sums, expected)) << "the loss is computed in fp32";
}

}  // namespace
}  // namespace tessera::train
