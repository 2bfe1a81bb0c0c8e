#include "examples/torchscript/metrics.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "train/report/classification_report.h"

namespace tessera::examples {
namespace {

using train::ClassificationReport;
using train::ClassScores;

const std::vector<std::string> kScores = {"f1",
                                          "f1_macro",
                                          "f1_weighted",
                                          "f1_micro",
                                          "precision_macro",
                                          "precision_weighted",
                                          "precision_micro",
                                          "recall_macro",
                                          "recall_weighted",
                                          "recall_micro"};

constexpr const char* kReport = "classification_report";

train::ClassCounts counts_of(const at::Tensor& sums, int64_t begin) {
  const int64_t size = (sums.numel() - begin) / 3;
  const double* at = sums.const_data_ptr<double>() + begin;
  const auto row = [&](int64_t i) { return std::vector<double>(at + i * size, at + (i + 1) * size); };
  return {.hits = row(0), .predicted = row(1), .support = row(2)};
}

/// The value of "f1_macro" … in a report.
double score_of(const ClassificationReport& report, const std::string& name) {
  const size_t split = name.find('_');
  const std::string score = name.substr(0, split),
                    average = split == std::string::npos ? "macro" : name.substr(split + 1);
  const ClassScores& scores = average == "micro"      ? report.micro
                              : average == "weighted" ? report.weighted
                                                      : report.macro;
  return score == "f1" ? scores.f1 : score == "precision" ? scores.precision : scores.recall;
}

/// The mean over the elements of a row, as scikit-learn's r2_score with
/// multioutput="uniform_average": of a constant target 1 or 0.
double r2_of(const at::Tensor& sums) {
  const double* at = sums.const_data_ptr<double>();
  const int64_t size = (sums.numel() - 3) / 3;
  const double num_rows = at[0] / static_cast<double>(size);
  if (num_rows < 2) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double apart = at[3 + i], variation = at[3 + size + i] - apart * apart / num_rows,
                 errors = at[3 + 2 * size + i];
    sum += variation > 0 ? 1 - errors / variation : errors == 0 ? 1 : 0;
  }
  return sum / static_cast<double>(size);
}

}  // namespace

std::vector<std::string> metric_names(Loss loss) {
  std::vector<std::string> names;
  if (loss == Loss::kModel) return names;
  if (loss == Loss::kCausalLm) names = {"perplexity"};
  if (!counts_classes(loss) && loss != Loss::kBceWithLogits) return {"mse", "rmse", "mae", "r2"};
  names.push_back("accuracy");
  if (loss == Loss::kBceWithLogits) names.push_back("hamming_loss");
  names.insert(names.end(), kScores.begin(), kScores.end());
  if (counts_classes(loss)) names.push_back(kReport);
  return names;
}

std::vector<std::string> default_metrics(Loss loss) {
  if (loss == Loss::kCausalLm) return {"perplexity"};
  return counts_classes(loss) ? std::vector<std::string>{"accuracy"} : std::vector<std::string>{};
}

MetricSet::MetricSet(Loss loss, std::vector<std::string> names)
    : kind_(Kind::kNone), names_(std::move(names)) {
  const auto any = [&](const auto& test) { return std::any_of(names_.begin(), names_.end(), test); };
  if (!any([](const std::string& name) { return name != "perplexity"; }))
    return;  // perplexity follows from the loss
  kind_ = counts_classes(loss)           ? Kind::kClasses
          : loss == Loss::kBceWithLogits ? Kind::kLabels
                                         : Kind::kNumbers;
  by_class_ = any([](const std::string& name) { return name != "perplexity" && name != "accuracy"; });
}

bool MetricSet::wants(const std::string& name) const {
  return std::find(names_.begin(), names_.end(), name) != names_.end();
}

void MetricSet::set_center(const at::Tensor& target) { center_ = target.to(at::kDouble).flatten(); }

at::Tensor MetricSet::statistics(const at::Tensor& output, const at::Tensor& target,
                                 const at::Tensor& counted) const {
  switch (kind_) {
    case Kind::kNone: break;
    case Kind::kClasses: return of_classes(output, target, counted);
    case Kind::kLabels: return of_labels(output, target, counted);
    case Kind::kNumbers: return of_numbers(output, target, counted);
  }
  return at::zeros({0}, output.options().dtype(at::kDouble).requires_grad(false));
}

// {hits, counted}, or by class {hits, predicted, support}
at::Tensor MetricSet::of_classes(const at::Tensor& scores, const at::Tensor& labels,
                                 const at::Tensor& counted) const {
  const at::Tensor predicted = scores.argmax(1), is_hit = predicted.eq(labels).logical_and(counted);
  if (!by_class_) return at::stack({is_hit.sum(), counted.sum()}).to(at::kDouble);
  const at::Tensor of_class = at::where(counted, labels, 0).flatten(),
                   weight = counted.to(at::kDouble).flatten();
  const at::Tensor zeros = at::zeros({scores.size(1)}, weight.options());
  return at::cat({zeros.index_add(0, of_class, is_hit.to(at::kDouble).flatten()),
                  zeros.index_add(0, predicted.flatten(), weight), zeros.index_add(0, of_class, weight)});
}

// {rows with all labels right, rows, and by label: hits, predicted, support}. Labels are dimension 1, as
// classes are; without one there is one label.
at::Tensor MetricSet::of_labels(const at::Tensor& output, const at::Tensor& target,
                                const at::Tensor& counted) const {
  const auto by_row = [](const at::Tensor& tensor) {  // (B, L, …) to (rows, L)
    return tensor.dim() < 2 ? tensor.reshape({-1, 1}) : tensor.movedim(1, -1).reshape({-1, tensor.size(1)});
  };
  const at::Tensor predicted = by_row(output.gt(0)), wanted = by_row(target.gt(0.5));
  const at::Tensor rows = counted.repeat_interleave(predicted.size(0) / counted.size(0));
  const auto sums = [&](const at::Tensor& cells) {
    return cells.logical_and(rows.unsqueeze(1)).sum(0).to(at::kDouble);
  };
  const at::Tensor right = predicted.eq(wanted).all(1).logical_and(rows);
  return at::cat({at::stack({right.sum(), rows.sum()}).to(at::kDouble), sums(predicted.logical_and(wanted)),
                  sums(predicted), sums(wanted)});
}

// {rows, squared errors, absolute errors}, of all D elements of a row together; for r2 also, by element:
// targets, their squares (both around the center) and squared errors.
at::Tensor MetricSet::of_numbers(const at::Tensor& output, const at::Tensor& target,
                                 const at::Tensor& counted) const {
  const int64_t num_rows = counted.size(0);
  const at::Tensor rows = counted.unsqueeze(1);
  const at::Tensor wanted = target.to(at::kDouble).reshape({num_rows, -1});
  const at::Tensor error = at::where(rows, output.to(at::kDouble).reshape({num_rows, -1}) - wanted, 0.0);
  const at::Tensor squares = error.square();
  at::Tensor sums = at::stack(
      {counted.sum().to(at::kDouble) * static_cast<double>(error.size(1)), squares.sum(), error.abs().sum()});
  if (!wants("r2")) return sums;
  TESSERA_CHECK(center_.defined() && center_.numel() == error.size(1));
  const at::Tensor apart = at::where(rows, wanted - center_, 0.0);
  return at::cat({sums, apart.sum(0), apart.square().sum(0), squares.sum(0)});
}

double MetricSet::value_of(const std::string& name, const at::Tensor& sums, double loss) const {
  if (name == "perplexity") return std::exp(loss);
  const double* at = sums.const_data_ptr<double>();
  if (kind_ == Kind::kNumbers) {
    if (name == "r2") return r2_of(sums);
    const double mse = at[1] / at[0];
    return name == "mae" ? at[2] / at[0] : name == "rmse" ? std::sqrt(mse) : mse;
  }
  if (name == "accuracy" && (kind_ == Kind::kLabels || !by_class_)) return at[0] / at[1];
  const train::ClassCounts counts = counts_of(sums, kind_ == Kind::kLabels ? 2 : 0);
  if (name == "hamming_loss") {
    double wrong = 0;
    for (size_t i = 0; i < counts.hits.size(); ++i)
      wrong += counts.predicted[i] + counts.support[i] - 2 * counts.hits[i];
    return wrong / (at[1] * static_cast<double>(counts.hits.size()));
  }
  const ClassificationReport report = train::classification_report(counts);
  return name == "accuracy" ? report.accuracy : score_of(report, name);
}

std::vector<std::string> MetricSet::names() const {
  std::vector<std::string> names = names_;
  std::erase(names, kReport);
  return names;
}

train::Metrics MetricSet::metrics(const at::Tensor& sums, double loss) const {
  train::Metrics metrics;
  for (const std::string& name : names_)
    if (name != kReport) metrics.emplace_back(name, value_of(name, sums, loss));
  return metrics;
}

std::string MetricSet::report(const at::Tensor& sums) const {
  return wants(kReport) ? train::format_report(train::classification_report(counts_of(sums, 0))) : "";
}

}  // namespace tessera::examples
