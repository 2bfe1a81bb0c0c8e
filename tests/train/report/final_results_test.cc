// The final results are those of the exported model; the metric that chooses
// it; numbers that are not finite.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class FinalResultsTest : public TrainerTest {
 protected:
  /// The evaluation of the exported model, loaded by another engine.
  Evaluation evaluate_export(const json& config, const BlobsOptions& options) const {
    Evaluation evaluation;
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      BlobsTask task(options);
      Engine& engine = task.initialize(parse_run_config(config.dump(), "blobs.json", 1).engine, comm, {});
      engine.load_weights((folder_ / "model.safetensors").string());
      evaluation = evaluate(task, engine, {.eval_batch_size = 16}, {});
    });
    return evaluation;
  }

  static std::string shown(const char* name, double value) {
    char text[64];
    std::snprintf(text, sizeof text, "%s %.4f", name, value);
    return text;
  }
};

TEST_F(FinalResultsTest, AreOfTheExportedModelWhereTheBestIsNotTheLast) {
  json config = base_config();
  config["trainer"]["best_is"] = "greatest";  // of the losses: the first evaluation's weights
  config["checkpoint"] = {{"keep_last", 1}, {"fsync", false}};
  for (const auto& [world_size, test_size] : {std::pair{2, 0}, {1, 67}}) {  // without and with a test set
    SCOPED_TRACE(::testing::Message() << world_size << " ranks, test set of " << test_size);
    fs::remove_all(folder_);
    BlobsOptions options;
    options.test_size = test_size;
    const Result result = train(config, world_size, options);
    const double exported = evaluate_export(config, options).find("loss").value();
    double last = 0;
    for (const json& record : json_lines(folder_ / "metrics.jsonl"))
      if (record.contains("eval_loss")) last = record.at("eval_loss");
    ASSERT_GT(exported, 1.2 * last) << "the first epoch's weights are worse";

    const json results = json::parse(read_text(folder_ / "all_results.json"));
    EXPECT_NEAR(results.at("eval_loss").get<double>(), exported, 1e-6);
    EXPECT_EQ(results.at("model_step"), 10);
    if (test_size == 0) {
      const std::string summary = result.output.substr(result.output.rfind("\ntraining "));
      const std::string results_line =
          result.output.substr(result.output.rfind("accuracy ", result.output.rfind("\ntraining ")));
      EXPECT_THAT(results_line, HasSubstr(shown("loss", exported)));
      EXPECT_THAT(summary, HasSubstr("model.safetensors (loss "));
    }

    // As if killed before the results were written: another process gets the same results.
    fs::remove(folder_ / "all_results.json");
    train(config, world_size, options, false, {.resume = true, .init = {}, .stop = {}});
    EXPECT_NEAR(json::parse(read_text(folder_ / "all_results.json")).at("eval_loss").get<double>(), exported,
                1e-6);
  }
}

TEST_F(FinalResultsTest, AreOfTheLastWeightsWhereTheseAreExported) {
  json config = base_config();
  config["trainer"]["best_is"] = "greatest";
  config["trainer"]["load_best_at_end"] = false;
  config["checkpoint"]["fsync"] = false;
  train(config, 2);
  const json results = json::parse(read_text(folder_ / "all_results.json"));
  EXPECT_EQ(results.at("model_step"), 30);
  EXPECT_NEAR(results.at("eval_loss").get<double>(), evaluate_export(config, {}).find("loss").value(), 1e-6);
}

// The values of Hugging Face's Trainer.
TEST_F(FinalResultsTest, AMetricMayHaveTheEvaluationsPrefix) {
  for (const auto& [name, plain] : std::vector<std::pair<std::string, std::string>>{
           {"eval_accuracy", "accuracy"}, {"eval_loss", "loss"}}) {
    json config = base_config();
    config["trainer"]["metric_for_best_model"] = name;
    config["trainer"]["early_stopping_patience"] = 9;
    config["checkpoint"]["fsync"] = false;
    const Result result = train(config, 2);
    EXPECT_EQ(result.log, "");
    EXPECT_THAT(result.summary.model_metric, HasSubstr(plain + " "));
    const json state = json::parse(read_text(folder_ / "trainer_state.json"));
    const double value = result.summary.evaluation->find(plain).value();
    EXPECT_NEAR(state.at("best_metric").get<double>(), value, 1e-6);
  }
}

TEST_F(FinalResultsTest, AnUnknownMetricIsRefusedBeforeTraining) {
  for (const char* name : {"f2", "eval_acuracy", "eval_"}) {
    json config = base_config();
    config["trainer"]["metric_for_best"] = name;
    for (const int world_size : {1, 2}) {
      EXPECT_THAT(error_of(config, world_size),
                  AllOf(HasSubstr("trainer.metric_for_best: found \""),
                        HasSubstr("expected one of accuracy, loss"), Not(HasSubstr("\n"))));
      EXPECT_FALSE(fs::exists(folder_));
    }
  }
  json config = base_config();
  config["trainer"]["metric_for_best"] = "f2";
  EXPECT_EQ(error_of(config, 1, {.eval_size = 0}), "no ConfigError") << "nothing is evaluated";
}

TEST_F(FinalResultsTest, AnEvaluationThatIsNoNumberIsWarnedOf) {
  const auto spoil = [](at::Tensor& x, at::Tensor&) { x[5][0] = std::numeric_limits<float>::quiet_NaN(); };
  json config = base_config();
  config["checkpoint"]["fsync"] = false;
  const Result on_the_way = train(config, 2, {.change_evaluation = spoil});
  EXPECT_THAT(on_the_way.log, HasSubstr("the eval loss is nan at step 10"));
  EXPECT_THAT(on_the_way.log.substr(on_the_way.log.find("the eval loss is nan") + 1),
              Not(HasSubstr("the eval loss is nan")))
      << "once";
  const Result at_the_end = train(config, 2, {.test_size = 67, .change_test = spoil});
  EXPECT_THAT(at_the_end.log, AllOf(HasSubstr("the test loss is nan"), Not(HasSubstr("the eval loss"))));
}

// 1,000 steps between reports: the warning still names the step.
TEST_F(FinalResultsTest, ATrainingLossThatIsNotFiniteNamesTheSamples) {
  constexpr int64_t kBad = 123;
  const auto spoil = [](at::Tensor& x, at::Tensor&) { x[kBad][1] = std::numeric_limits<float>::infinity(); };
  for (const int64_t steps_per_print : {4, 1000}) {
    for (const int world_size : {1, 2}) {
      json config = base_config();
      config["trainer"]["epochs"] = 1;
      config["steps_per_print"] = steps_per_print;
      config["checkpoint"]["fsync"] = false;
      fs::remove_all(folder_);
      const Result result = train(config, world_size, {.norm = false, .change_training = spoil});
      int64_t step = 0, rank = 0;  // in which the sample is trained on first: 48 a step, over the ranks
      for (int r = 0; r < world_size; ++r) {
        const auto& seen = result.seen[static_cast<size_t>(r)];
        const int64_t found =
            (std::find(seen.begin(), seen.end(), kBad) - seen.begin()) / (48 / world_size) + 1;
        if (step == 0 || found < step) step = found, rank = r;
      }
      EXPECT_THAT(result.log, HasSubstr("the training loss is nan at step " + std::to_string(step) +
                                        " on rank " + std::to_string(rank)));
      EXPECT_THAT(result.log,
                  HasSubstr(" of the training data: sample 123 holds a value that is not finite"));
    }
  }
}

TEST_F(FinalResultsTest, ALossThatIsNotFiniteOnFiniteDataNamesTheMicroBatch) {
  const Result result = train(base_config(), 2, {.nan_from_step = 20});
  const std::vector<int64_t>& seen = result.seen[0];
  std::string numbers;
  for (size_t i = 20 * 12; i < 20 * 12 + 8; ++i)
    numbers += (numbers.empty() ? "" : ", ") + std::to_string(seen[i]);
  EXPECT_THAT(result.log, HasSubstr("the training loss is nan at step 11 on rank 0, of samples " + numbers));
  EXPECT_THAT(result.log, Not(HasSubstr("holds a value")));
}

}  // namespace
}  // namespace tessera::train
