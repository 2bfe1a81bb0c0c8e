#include "train/report/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <iomanip>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/str.h"
#include "train/report/monitoring.h"

namespace tessera::train {
namespace {

StepReport step_report() {
  StepReport report;
  report.step = 50;
  report.total_steps = 1404;
  report.epoch = 0.1068;
  report.loss = 0.74213;
  report.learning_rate = 3.6e-4;
  report.gradient_norm = 1.9234;
  report.samples_per_s = 2310.4;
  return report;
}

Summary summary() {
  Summary summary;
  summary.task = "fashion_mnist";
  summary.num_steps = 1404;
  summary.num_epochs = 3;
  summary.num_samples = 179712;
  summary.train_loss = 0.3;
  summary.train_s = 44.928;
  summary.world_size = 2;
  summary.stage = 2;
  summary.folder = "runs/fashion_mnist";
  summary.files = {"config.json", "metrics.jsonl", "samples/"};
  summary.evaluation = Evaluation{10000, {{"accuracy", 0.9123}, {"loss", 0.25}}, 1.25};
  return summary;
}

TEST(Report, Counts) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(123456), "123,456");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-123456), "-123,456");
}

TEST(Report, StepLine) {
  StepReport report = step_report();
  EXPECT_EQ(format_line(report),
            "step 50/1404 | epoch 0.11 | loss 0.7421 | lr 3.6e-04 | grad norm 1.92 | 2310 samples/s");
  EXPECT_EQ(format_postfix(report), "loss=0.742, lr=3.6e-04");
  report.loss_scale = 65536;
  report.skipped_steps = 2;
  report.phase_ms = {0.5, 10, 20.25, 3};
  EXPECT_EQ(format_line(report),
            "step 50/1404 | epoch 0.11 | loss 0.7421 | lr 3.6e-04 | grad norm 1.92 | loss scale 65536 | 2310 "
            "samples/s | "
            "skipped 2\n  time (ms) | data 0.50 | forward 10.00 | backward 20.25 | step 3.00");
  EXPECT_EQ(format_postfix(report), "loss=0.742, lr=3.6e-04, skipped=2");
}

/// As a stream writes it, whose buffer has no end.
std::string fixed(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

TEST(Report, LargeNumbersOfARunThatDiverges) {
  StepReport report = step_report();
  report.loss = 1e35;
  report.gradient_norm = 3e38;
  EXPECT_EQ(format_line(report), "step 50/1404 | epoch 0.11 | loss " + fixed(1e35, 4) +
                                     " | lr 3.6e-04 | grad norm " + fixed(3e38, 2) + " | 2310 samples/s");
  report.loss = std::numeric_limits<double>::max();
  EXPECT_EQ(format_postfix(report), "loss=" + fixed(report.loss, 3) + ", lr=3.6e-04");
  const Evaluation evaluation{10, {{"perplexity", 1e122}, {"loss", 2}}, 1};
  EXPECT_EQ(format_line(evaluation, 3),
            "epoch 3.00 | eval perplexity " + fixed(1e122, 4) + " | eval loss 2.0000 | 10 samples in 1.0 s");
  EXPECT_EQ(format_result(evaluation),
            "eval     perplexity " + fixed(1e122, 4) + ", loss 2.0000, on 10 test samples");
}

TEST(Report, EvaluationLine) {
  EXPECT_EQ(format_line(*summary().evaluation, 3),
            "epoch 3.00 | eval accuracy 0.9123 | eval loss 0.2500 | 10,000 samples in 1.2 s");
}

TEST(Report, SummaryText) {
  EXPECT_EQ(format_summary(summary()),
            "eval     accuracy 0.9123, loss 0.2500, on 10,000 test samples\n"
            "training loss 0.3000 over 1,404 steps (3 epochs) in 44.9 s\n"
            "speed    4,000 samples/s (2,000 a rank)\n"
            "ranks    2, ZeRO stage 2\n"
            "files    runs/fashion_mnist/{config.json, metrics.jsonl, samples/}");
  Summary alone = summary();
  alone.world_size = 1;
  EXPECT_NE(format_summary(alone).find("\nspeed    4,000 samples/s\nranks    1,"), std::string::npos);
}

TEST(Report, OneIsNotMany) {
  Summary one = summary();
  one.num_steps = 1;
  one.num_epochs = 1;
  one.evaluation->num_samples = 1;
  EXPECT_TRUE(
      format_summary(one).starts_with("eval     accuracy 0.9123, loss 0.2500, on 1 test sample\ntraining "
                                      "loss 0.3000 over 1 step (1 epoch) in "))
      << format_summary(one);
  EXPECT_NE(format_line(*one.evaluation, 1).find("| 1 sample in "), std::string::npos);
  one.was_finished = true;
  EXPECT_NE(format_summary(one).find("already finished after 1 step (1 epoch); "), std::string::npos);
  one.num_epochs = 0.5;
  EXPECT_NE(format_summary(one).find("1 step (0.5 epochs)"), std::string::npos);
}

// Scalars and images have the same prefix in TensorBoard.
TEST(Report, ASetHasOneName) {
  Evaluation evaluation = *summary().evaluation;
  for (const EvaluationSet of : {EvaluationSet::kEval, EvaluationSet::kTest}) {
    evaluation.of = of;
    const std::string name = of == EvaluationSet::kTest ? "test" : "eval";
    EXPECT_NE(format_line(evaluation, 1).find("| " + name + " accuracy "), std::string::npos);
    EXPECT_TRUE(format_result(evaluation).starts_with(name + "     accuracy "));
    EXPECT_TRUE(to_json(evaluation, 1, 1).contains(name + "_accuracy"));
    EXPECT_EQ(scalars_of(to_json(evaluation, 1, 1))[1].first, name + "/accuracy");
  }
}

TEST(Report, ATestSetStandsInPlaceOfTheValidation) {
  Summary tested = summary();
  tested.evaluation->set = "validation";
  EXPECT_EQ(format_line(*tested.evaluation, 3),
            "epoch 3.00 | eval accuracy 0.9123 | eval loss 0.2500 | 10,000 samples in 1.2 s");
  EXPECT_TRUE(format_summary(tested).starts_with(
      "eval     accuracy 0.9123, loss 0.2500, on 10,000 validation samples\n"))
      << format_summary(tested);
  tested.test =
      Evaluation{500, {{"accuracy", 0.5}}, 0.5, EvaluationSet::kTest, "test", "a table\nof two lines"};
  EXPECT_EQ(format_summary(tested).rfind(
                "a table\nof two lines\ntest     accuracy 0.5000, on 500 test samples\ntraining ", 0),
            0u)
      << format_summary(tested);
  const auto results = to_json(tested);
  EXPECT_EQ(results.at("test_accuracy"), 0.5);
  EXPECT_EQ(results.at("test_samples"), 500);
  EXPECT_EQ(results.at("eval_accuracy"), 0.9123);
}

TEST(Report, JsonUsesHuggingFacesNames) {
  const auto results = to_json(summary());
  EXPECT_EQ(results.at("eval_accuracy"), 0.9123);
  EXPECT_EQ(results.at("eval_loss"), 0.25);
  EXPECT_EQ(results.at("eval_samples"), 10000);
  EXPECT_EQ(results.at("eval_samples_per_second"), 8000);
  EXPECT_EQ(results.at("train_runtime"), 44.928);
  EXPECT_DOUBLE_EQ(results.at("train_samples_per_second"), 4000);
  EXPECT_DOUBLE_EQ(results.at("train_samples_per_second_per_rank"), 2000);
  EXPECT_DOUBLE_EQ(results.at("train_steps_per_second"), 31.25);
  EXPECT_EQ(results.at("train_loss"), 0.3);
  EXPECT_EQ(results.at("epoch"), 3);

  StepReport report = step_report();
  EXPECT_EQ(to_json(report).at("grad_norm"), 1.9234);
  EXPECT_FALSE(to_json(report).contains("loss_scale"));
  EXPECT_FALSE(to_json(report).contains("forward_ms"));
  report.loss_scale = 1024;
  report.phase_ms = {1, 2, 3, 4};
  report.loss = std::nan("");
  EXPECT_EQ(to_json(report).at("loss_scale"), 1024);
  EXPECT_EQ(to_json(report).at("backward_ms"), 3);
  EXPECT_NE(to_json(report).dump().find("\"loss\":null"), std::string::npos) << "JSON has no NaN";
}

}  // namespace
}  // namespace tessera::train
