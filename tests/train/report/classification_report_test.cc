// Classification reports and their format. scikit_learn_test.py compares them with scikit-learn.
#include "train/report/classification_report.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::train {
namespace {

at::Tensor matrix(const std::vector<double>& cells, int64_t size) {
  return at::tensor(cells, at::kDouble).view({size, size});
}

TEST(ClassificationReport, FollowsItsDefinitions) {
  const ClassificationReport report = classification_report(matrix({8, 2, 5, 35}, 2));
  EXPECT_DOUBLE_EQ(report.classes[0].precision, 8.0 / 13);
  EXPECT_DOUBLE_EQ(report.classes[0].recall, 0.8);
  EXPECT_DOUBLE_EQ(report.classes[0].f1, 16.0 / 23);
  EXPECT_EQ(report.classes[0].support, 10);
  EXPECT_DOUBLE_EQ(report.classes[1].recall, 0.875);
  EXPECT_DOUBLE_EQ(report.accuracy, 43.0 / 50);
  EXPECT_DOUBLE_EQ(report.macro.recall, (0.8 + 0.875) / 2);
  EXPECT_DOUBLE_EQ(report.weighted.recall, report.accuracy) << "equal by definition";
  EXPECT_EQ(report.macro.support, 50);
}

TEST(ClassificationReport, NothingIsDividedByZero) {
  const ClassificationReport report = classification_report(matrix({3, 0, 0, 0, 0, 0, 1, 0, 0}, 3));
  EXPECT_EQ(report.classes[1].f1, 0);
  EXPECT_EQ(report.classes[2].precision, 0);
  EXPECT_DOUBLE_EQ(report.macro.precision, 0.25);
  const ClassificationReport empty = classification_report(at::zeros({2, 2}, at::kDouble));
  EXPECT_EQ(empty.accuracy, 0);
  EXPECT_EQ(empty.weighted.f1, 0);
}

TEST(ClassificationReport, IsPrintedAsScikitLearnDoes) {
  const ClassificationReport report = classification_report(matrix({1, 0, 1, 1}, 2));
  EXPECT_EQ(format_report(report, {"neg", "a long class name"}),
            "                   precision    recall  f1-score   support\n\n"
            "              neg     0.5000    1.0000    0.6667         1\n"
            "a long class name     1.0000    0.5000    0.6667         2\n\n"
            "         accuracy                         0.6667         3\n"
            "        macro avg     0.7500    0.7500    0.6667         3\n"
            "     weighted avg     0.8333    0.6667    0.6667         3");
  EXPECT_NE(format_report(report, {"坏", "好"}).find("\n           坏     0.5000"), std::string::npos)
      << "aligned by characters";
}

}  // namespace
}  // namespace tessera::train
