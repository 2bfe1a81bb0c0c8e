#include "train/report/classification_report.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "core/check.h"
#include "core/utf8.h"

namespace tessera::train {
namespace {

double ratio(double part, double whole) { return whole > 0 ? part / whole : 0.0; }

ClassScores average(const std::vector<ClassScores>& classes, const std::vector<double>& weights) {
  ClassScores mean;
  double sum = 0;
  for (size_t i = 0; i < classes.size(); ++i) {
    mean.precision += weights[i] * classes[i].precision;
    mean.recall += weights[i] * classes[i].recall;
    mean.f1 += weights[i] * classes[i].f1;
    mean.support += classes[i].support;
    sum += weights[i];
  }
  mean.precision = ratio(mean.precision, sum);
  mean.recall = ratio(mean.recall, sum);
  mean.f1 = ratio(mean.f1, sum);
  return mean;
}

std::string right_aligned(const std::string& text, size_t width) {
  return std::string(width - std::min(width, num_characters(text)), ' ') + text;
}

}  // namespace

ClassificationReport classification_report(const ClassCounts& counts) {
  const size_t size = counts.support.size();
  TESSERA_CHECK(counts.hits.size() == size && counts.predicted.size() == size);
  const auto scores = [](double hits, double predicted, double support) {
    return ClassScores{.precision = ratio(hits, predicted),
                       .recall = ratio(hits, support),
                       .f1 = ratio(2 * hits, predicted + support),
                       .support = std::llround(support)};
  };
  ClassificationReport report;
  double hits = 0, predicted = 0, support = 0;
  for (size_t i = 0; i < size; ++i) {
    report.classes.push_back(scores(counts.hits[i], counts.predicted[i], counts.support[i]));
    hits += counts.hits[i], predicted += counts.predicted[i], support += counts.support[i];
  }
  report.accuracy = ratio(hits, support);
  report.micro = scores(hits, predicted, support);
  report.macro = average(report.classes, std::vector<double>(size, 1.0));
  report.weighted = average(report.classes, counts.support);
  return report;
}

ClassificationReport classification_report(const at::Tensor& confusion) {
  TESSERA_CHECK(confusion.dim() == 2 && confusion.size(0) == confusion.size(1) &&
                confusion.scalar_type() == at::kDouble && confusion.is_cpu());
  const auto values = [](const at::Tensor& tensor) {
    const at::Tensor row = tensor.contiguous();
    return std::vector<double>(row.const_data_ptr<double>(), row.const_data_ptr<double>() + row.numel());
  };
  return classification_report({.hits = values(confusion.diagonal()),
                                .predicted = values(confusion.sum(0)),
                                .support = values(confusion.sum(1))});
}

std::string format_report(const ClassificationReport& report, const std::vector<std::string>& names,
                          int digits) {
  TESSERA_CHECK(names.empty() || names.size() == report.classes.size(), names.size(), " names for ",
                report.classes.size(), " classes");
  const auto name_of = [&](size_t i) { return names.empty() ? std::to_string(i) : names[i]; };
  auto width = std::max<size_t>(std::string_view("weighted avg").size(), static_cast<size_t>(digits));
  for (size_t i = 0; i < report.classes.size(); ++i) width = std::max(width, num_characters(name_of(i)));

  std::ostringstream out;
  out << std::fixed << std::setprecision(digits);
  const auto line = [&](const std::string& name, const ClassScores& scores) {
    out << right_aligned(name, width) << ' ' << std::setw(10) << scores.precision << std::setw(10)
        << scores.recall << std::setw(10) << scores.f1 << std::setw(10) << scores.support << '\n';
  };
  const char* const heads[] = {"precision", "recall", "f1-score", "support"};
  out << std::string(width, ' ') << ' ';
  for (const char* head : heads) out << std::setw(10) << head;
  out << "\n\n";
  for (size_t i = 0; i < report.classes.size(); ++i) line(name_of(i), report.classes[i]);
  out << '\n'
      << right_aligned("accuracy", width) << ' ' << std::string(20, ' ') << std::setw(10) << report.accuracy
      << std::setw(10) << report.macro.support << '\n';
  line("macro avg", report.macro);
  line("weighted avg", report.weighted);
  std::string text = out.str();
  text.pop_back();
  return text;
}

}  // namespace tessera::train
