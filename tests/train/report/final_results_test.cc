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
  Evaluation evaluate_export(const json& config, const BlobsOptions& options,
                             EvaluationSet of = EvaluationSet::kEval) const {
    Evaluation evaluation;
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      BlobsTask task(options);
      Engine& engine = task.initialize(parse_run_config(config.dump(), "blobs.json", 1).engine, comm, {});
      engine.load_weights((folder_ / "model.safetensors").string());
      evaluation = evaluate(task, engine, {.eval_batch_size = 16}, {}, of);
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
  config["checkpoint"]["keep_last"] = 1;
  for (const auto& [world_size, test_size] : {std::pair{2, 0}, {1, 67}}) {  // without and with a test set
    SCOPED_TRACE(::testing::Message() << world_size << " ranks, test set of " << test_size);
    fs::remove_all(folder_);
    BlobsOptions options;
    options.test_size = test_size;
    const Result trained = train(config, world_size, options);
    const double exported = evaluate_export(config, options).find("loss").value();
    ASSERT_GT(exported, 1.2 * last_eval_loss()) << "the first epoch's weights are worse";
    EXPECT_NEAR(result("eval_loss"), exported, 1e-6);
    EXPECT_EQ(result("eval_samples"), 101);
    EXPECT_EQ(result("model_step"), 10);
    if (test_size == 0) {
      const size_t begin = trained.output.rfind("\ntraining ");
      EXPECT_THAT(trained.output.substr(trained.output.rfind("accuracy ", begin)),
                  HasSubstr(shown("loss", exported)));
      EXPECT_THAT(trained.output.substr(begin), HasSubstr("model.safetensors (loss "));
    } else {
      EXPECT_THAT(trained.output, AllOf(HasSubstr("blobs: 512 training, 101 validation and 67 test samples"),
                                        HasSubstr("epoch 3.00 | eval accuracy"), Not(HasSubstr(" | test ")),
                                        HasSubstr("\nreport of 67\ntest     accuracy ")));
      EXPECT_NEAR(result("test_loss"),
                  evaluate_export(config, options, EvaluationSet::kTest).find("loss").value(), 1e-6);
      EXPECT_EQ(result("test_loss"), trained.summary.test->find("loss").value());
      EXPECT_EQ(result("test_samples"), 67);
      EXPECT_EQ(read_text(folder_ / "classes.txt"), "four");
    }

    // As if killed before the results were written: another process gets the same results.
    fs::remove(folder_ / "all_results.json");
    resume(config, world_size, options);
    EXPECT_NEAR(result("eval_loss"), exported, 1e-6);
  }
}

TEST_F(FinalResultsTest, AreOfTheLastWeightsWhereTheseAreExported) {
  json config = base_config();
  config["trainer"]["best_is"] = "greatest";
  config["trainer"]["load_best_at_end"] = false;
  const Summary summary = train(config, 2, {.test_size = 67}).summary;
  EXPECT_EQ(summary.model_metric, "") << "the last step's weights";
  EXPECT_LT(result("test_loss"), 1.1 * last_eval_loss());
  EXPECT_EQ(result("model_step"), 30);
  EXPECT_NEAR(result("eval_loss"), evaluate_export(config, {}).find("loss").value(), 1e-6);
  const json state = json::parse(read_text(folder_ / "trainer_state.json"));
  EXPECT_EQ(state.at("best_global_step"), 10) << "the best is recorded all the same";
}

// The values of Hugging Face's Trainer.
TEST_F(FinalResultsTest, AMetricMayHaveTheEvaluationsPrefix) {
  for (const auto& [name, plain] : std::vector<std::pair<std::string, std::string>>{
           {"eval_accuracy", "accuracy"}, {"eval_loss", "loss"}}) {
    json config = base_config();
    config["trainer"]["metric_for_best_model"] = name;
    config["trainer"]["epochs"] = 1;
    config["trainer"]["early_stopping_patience"] = 9;
    const Result result = train(config, 1);
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
    EXPECT_THAT(error_of(config, 2),
                AllOf(HasSubstr("trainer.metric_for_best: found \""),
                      HasSubstr("expected one of accuracy, loss"), Not(HasSubstr("\n"))));
    EXPECT_FALSE(fs::exists(folder_));
  }
  json config = base_config();
  config["trainer"]["metric_for_best"] = "f2";
  EXPECT_EQ(error_of(config, 1, {.eval_size = 0}), "") << "nothing is evaluated";
}

TEST_F(FinalResultsTest, AnEvaluationThatIsNoNumberIsWarnedOf) {
  const auto spoil = [](at::Tensor& x, at::Tensor&) { x[5][0] = std::numeric_limits<float>::quiet_NaN(); };
  json config = base_config();
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

TEST_F(FinalResultsTest, ALossThatIsNotFiniteOnFiniteDataNamesTheMicroBatchOnce) {
  const Result result = train(base_config(), 2, {.nan_from_step = 20});
  const std::vector<int64_t>& seen = result.seen[0];
  std::string words = "the training loss is nan at step 11 on rank 0, of samples ";
  for (size_t i = 20 * 12; i < 20 * 12 + 8; ++i) words += (i == 240 ? "" : ", ") + std::to_string(seen[i]);
  ASSERT_THAT(result.log, AllOf(HasSubstr(words), Not(HasSubstr("holds a value"))));
  EXPECT_THAT(result.log.substr(result.log.find(words) + 1), Not(HasSubstr("the training loss is")));
  EXPECT_EQ(result.summary.skipped_steps, 20) << "from step 11 on no gradient is finite";
  EXPECT_THAT(result.output, AllOf(HasSubstr("| skipped 2\n"), HasSubstr(" s, 20 skipped\n")));
  EXPECT_TRUE(std::isfinite(result.summary.evaluation->metrics[1].second))
      << "the weights stayed as they were";
}

}  // namespace
}  // namespace tessera::train
