// Loss and Dice of segmentation. segmentation_libraries_test.py compares with PyTorch.
#include "examples/segmentation/losses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera::examples {
namespace {

/// (1, H, W) classes from rows of digits.
at::Tensor classes(const std::vector<std::string>& rows) {
  at::Tensor mask =
      at::empty({1, static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size())}, at::kLong);
  for (size_t row = 0; row < rows.size(); ++row)
    for (size_t column = 0; column < rows[row].size(); ++column)
      mask[0][static_cast<int64_t>(row)][static_cast<int64_t>(column)] = rows[row][column] - '0';
  return mask;
}

double dice_of(const std::vector<std::string>& prediction, const std::vector<std::string>& target,
               int64_t num_classes) {
  return dice_of_images(classes(prediction), classes(target), num_classes)[0].item<double>();
}

TEST(Dice, OfSets) {
  EXPECT_NEAR(dice_of({"0110"}, {"0011"}, 2), 0.5, 1e-6);
  EXPECT_NEAR(dice_of({"0111"}, {"0011"}, 2), 0.8, 1e-6);
  EXPECT_NEAR(dice_of({"0111"}, {"0011"}, 1), 0.8, 1e-6) << "one logit has two classes";
  EXPECT_NEAR(dice_of({"1100"}, {"0011"}, 2), 0, 1e-6);
  EXPECT_NEAR(dice_of({"0000"}, {"0000"}, 2), 1, 1e-6) << "nothing there, nothing found";
  EXPECT_NEAR(dice_of({"0122"}, {"0112"}, 3), 2.0 / 3, 1e-6)
      << "the mean over the classes but the background";
}

TEST(Dice, EveryImageCountsOnce) {
  const at::Tensor prediction = at::cat({classes({"1111"}), classes({"1000"})}),
                   target = at::cat({classes({"1111"}), classes({"0001"})});
  EXPECT_TRUE(at::allclose(dice_of_images(prediction, target, 2), at::tensor({1.0f, 0.0f}), 0, 1e-5))
      << "4 of 5 pixels would be 0.8";
}

TEST(SegmentationLoss, IsLowForCertainAndRight) {
  const at::Tensor target = classes({"0110", "0010"});
  for (const int64_t num_classes : {1, 2}) {
    const at::Tensor logits = num_classes == 1 ? (target.unsqueeze(1) * 2 - 1) * 30.0
                                               : at::one_hot(target, 2).permute({0, 3, 1, 2}) * 30.0;
    EXPECT_LT(segmentation_loss(logits, target).item<double>(), 1e-6);
    EXPECT_GT(segmentation_loss(-logits, target).item<double>(), 15);
    EXPECT_TRUE(at::equal(predicted_mask(logits), target));
    EXPECT_TRUE(at::equal(predicted_mask(-logits), 1 - target));
  }
}

TEST(SegmentationLoss, IsFp32WhateverTheLogitsAre) {
  at::manual_seed(1);
  const at::Tensor target = at::randint(0, 3, {2, 8, 8}, at::kLong);
  const at::Tensor logits = at::randn({2, 3, 8, 8}).to(at::kBFloat16);
  const at::Tensor loss = segmentation_loss(logits, target);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_EQ(loss.item<float>(), segmentation_loss(logits.to(at::kFloat), target).item<float>());
  // Half precision cannot count the pixels of a large mask: its largest number is 65504.
  const at::Tensor large = at::ones({1, 512, 512}, at::kLong);
  const at::Tensor certain = at::one_hot(large, 2).permute({0, 3, 1, 2}).to(at::kHalf) * 20;
  EXPECT_LT(segmentation_loss(certain, large).item<double>(), 1e-5);
}

TEST(SegmentationStatistics, AddUpAndLeavePaddingOut) {
  at::manual_seed(2);
  for (const int64_t num_classes : {1, 2, 4}) {
    const at::Tensor target = at::randint(0, std::max<int64_t>(num_classes, 2), {3, 6, 5}, at::kLong);
    at::Tensor logits = at::randn({3, num_classes, 6, 5});
    at::Tensor sum = at::zeros({3}, at::kDouble);
    for (int64_t i = 0; i < 3; ++i) {
      const at::Tensor one = logits.narrow(0, i, 1), truth = target.narrow(0, i, 1);
      const at::Tensor alone = segmentation_statistics(one, truth, {});
      EXPECT_EQ(alone[0].item<double>(), 1);
      EXPECT_NEAR(alone[2].item<double>(), segmentation_loss(one, truth).item<double>(), 1e-6);
      sum += alone;
    }
    EXPECT_TRUE(at::allclose(segmentation_statistics(logits, target, {}), sum, 1e-6));

    const at::Tensor masked_sum = segmentation_statistics(logits.narrow(0, 0, 2), target.narrow(0, 0, 2), {});
    logits[2].fill_(std::numeric_limits<float>::quiet_NaN());
    const at::Tensor mask = at::tensor({1, 1, 0}, at::kLong).gt(0);
    EXPECT_TRUE(at::allclose(segmentation_statistics(logits, target, mask), masked_sum, 1e-6))
        << "whatever is in padding";
  }
}

TEST(SegmentationMetrics, AreMeans) {
  const train::Metrics metrics = segmentation_metrics(at::tensor({4.0, 3.0, 10.0}, at::kDouble));
  ASSERT_EQ(metrics.size(), 2u);
  EXPECT_EQ(metrics[0], (std::pair<std::string, double>("dice", 0.75)));
  EXPECT_EQ(metrics[1], (std::pair<std::string, double>("loss", 2.5)));
}

}  // namespace
}  // namespace tessera::examples
