// ClassificationReport: precision, recall and f1 of every class, as scikit-learn's
// classification_report defines and prints them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::train {

/// Of one class, or an average over classes.
struct ClassScores {
  double precision = 0;  ///< of the samples taken for this class, how many are of it; 0 where none was
  double recall = 0;     ///< of the samples of this class, how many were taken for it; 0 where there are none
  double f1 = 0;         ///< harmonic mean of the two; 0 where both are
  int64_t support = 0;   ///< samples of this class
};

/// A value.
struct ClassificationReport {
  std::vector<ClassScores> classes;
  double accuracy = 0;   ///< of the samples that have a class, how many were taken for it
  ClassScores micro;     ///< of all classes' samples together
  ClassScores macro;     ///< means over the classes
  ClassScores weighted;  ///< means over the classes, weighted by support
};

/// By class, all of one length: samples of it that were taken for it, samples taken for it, samples of it.
/// Labels of which a sample may have several are classes too.
struct ClassCounts {
  std::vector<double> hits, predicted, support;
};

/// Local. As scikit-learn's precision_recall_fscore_support with labels=range(C), zero_division=0.
ClassificationReport classification_report(const ClassCounts& counts);

/// Local. confusion: (C, C) fp64 on the CPU, a row a true class, a column a predicted one
/// (train/classification.h). All C classes count, as with scikit-learn's labels=range(C), zero_division=0.
ClassificationReport classification_report(const at::Tensor& confusion);

/// Local. A table, without a line break at its end, with the classes under these
/// names (empty: "0", "1" …), one each.
std::string format_report(const ClassificationReport& report, const std::vector<std::string>& names = {},
                          int digits = 4);

}  // namespace tessera::train
