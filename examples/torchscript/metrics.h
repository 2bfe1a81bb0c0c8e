// Metrics under scikit-learn's names, computed as sums (train/task/task.h), so that they are exact on any
// number of ranks.
//
// The available metrics depend on the loss:
//   class numbers (cross_entropy, nll, causal_lm): accuracy; precision, recall and f1, each _macro, _weighted
//   or _micro; classification_report labels, of which a sample may have several (bce_with_logits): accuracy,
//   which is that of all of a sample's labels together; hamming_loss;
//     precision, recall and f1 as above
//   numbers (mse, l1, smooth_l1): mse, rmse, mae, r2
// causal_lm also has perplexity.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "examples/torchscript/loss.h"
#include "train/task/task.h"

namespace tessera::examples {

/// All metrics available with a loss, in the order of the documentation; and the default ones. Empty
/// for kModel.
std::vector<std::string> metric_names(Loss loss);
std::vector<std::string> default_metrics(Loss loss);

/// The metrics of one task. A value type.
class MetricSet {
 public:
  /// `names`: of metric_names(loss).
  MetricSet(Loss loss, std::vector<std::string> names);

  /// Fp64, on the output's device: sums of one batch, always equally many. output, target: as the
  /// loss takes them; of class numbers LossFunction::positions(). counted: bool in the labels' shape
  /// (classes), else (B): what is to be counted.
  at::Tensor statistics(const at::Tensor& output, const at::Tensor& target, const at::Tensor& counted) const;
  /// Computes the metrics by name, in the order of `names`, from the sum of all statistics, fp64 on the CPU,
  /// and the mean loss.
  train::Metrics metrics(const at::Tensor& sums, double loss) const;
  /// Scikit-learn's classification_report if it is among the names; else empty.
  std::string report(const at::Tensor& sums) const;

  /// The names in metrics(): all except the report.
  std::vector<std::string> names() const;
  bool wants(const std::string& name) const;
  /// (…) one sample's target: r2's sums of squares are taken around it, so that few digits cancel. The
  /// same on all ranks, and on the device of the outputs. Needed for r2 alone.
  void set_center(const at::Tensor& target);

 private:
  enum class Kind { kNone, kClasses, kLabels, kNumbers };
  at::Tensor of_classes(const at::Tensor& scores, const at::Tensor& labels, const at::Tensor& counted) const;
  at::Tensor of_labels(const at::Tensor& output, const at::Tensor& target, const at::Tensor& counted) const;
  at::Tensor of_numbers(const at::Tensor& output, const at::Tensor& target, const at::Tensor& counted) const;
  double value_of(const std::string& name, const at::Tensor& sums, double loss) const;

  Kind kind_;
  std::vector<std::string> names_;
  bool by_class_ = false;  ///< hits, predictions and support of each class are counted
  at::Tensor center_;      ///< (D) fp64, of r2
};

}  // namespace tessera::examples
