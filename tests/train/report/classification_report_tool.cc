// For scikit_learn_test.py. Reads {"logits": [[…]], "target": […], "names": […], "digits": 4}
// from stdin and writes {"text": …, "classes": [[precision, recall, f1, support], …],
// "accuracy": …, "macro": […], "weighted": […]}.
#include <ATen/ATen.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "train/report/classification.h"
#include "train/report/classification_report.h"

namespace {

using namespace tessera::train;
using nlohmann::json;

json scores(const ClassScores& scores) {
  return {scores.precision, scores.recall, scores.f1, scores.support};
}

}  // namespace

int main() {
  const json request = json::parse(std::cin);
  const auto target = at::tensor(request.at("target").get<std::vector<int64_t>>(), at::kLong);
  std::vector<float> logits;
  for (const json& row : request.at("logits"))
    for (const json& value : row) logits.push_back(value.get<float>());
  // As a sum of parts, as over batches and ranks.
  at::Tensor total;
  const at::Tensor rows = at::tensor(logits, at::kFloat).view({target.size(0), -1});
  for (const auto& [some_rows, some_targets] : {std::pair(rows.slice(0, 0, 7), target.slice(0, 0, 7)),
                                                std::pair(rows.slice(0, 7), target.slice(0, 7))}) {
    const at::Tensor sums = classification_statistics(some_rows, some_targets, {});
    total = total.defined() ? total + sums : sums;
  }
  const ClassificationReport report = classification_report(confusion_matrix(total));
  json answer = {
      {"accuracy", report.accuracy}, {"macro", scores(report.macro)}, {"weighted", scores(report.weighted)}};
  for (const ClassScores& one : report.classes) answer["classes"].push_back(scores(one));
  answer["text"] = format_report(report, request.at("names").get<std::vector<std::string>>(),
                                 request.at("digits").get<int>());
  std::cout << answer << '\n';
}
