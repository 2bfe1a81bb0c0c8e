// ClassificationReport: precision, recall and f1 of every class, as scikit-learn's
// classification_report defines and prints them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::train {

/// Scores of one class, or their average over classes.
struct ClassScores {
  double precision = 0;  ///< true positives / samples predicted as this class; 0 without any
  double recall = 0;     ///< true positives / samples of this class; 0 without any
  double f1 = 0;         ///< harmonic mean of the two; 0 if both are 0
  int64_t support = 0;   ///< samples of this class
};

struct ClassificationReport {
  std::vector<ClassScores> classes;
  double accuracy = 0;   ///< true positives of all classes / all samples
  ClassScores micro;     ///< from the counts summed over all classes
  ClassScores macro;     ///< means over the classes
  ClassScores weighted;  ///< means over the classes, weighted by support
};

/// Counts by class, all of length C: true positives (`hits`), samples predicted as the class, samples of the
/// class. For multi-label data each label counts as a class.
struct ClassCounts {
  std::vector<double> hits, predicted, support;
};

/// Equals scikit-learn's precision_recall_fscore_support with labels=range(C), zero_division=0.
ClassificationReport classification_report(const ClassCounts& counts);

/// Confusion: (C, C) fp64 on the CPU, rows are true classes, columns predicted classes
/// (train/report/classification.h). All C classes count, as with scikit-learn's labels=range(C),
/// zero_division=0.
ClassificationReport classification_report(const at::Tensor& confusion);

/// The report as a table, without a newline at its end. names: one for each class; empty: "0", "1" …
std::string format_report(const ClassificationReport& report, const std::vector<std::string>& names = {},
                          int digits = 4);

}  // namespace tessera::train
