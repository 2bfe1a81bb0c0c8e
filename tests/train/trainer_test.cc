// A Trainer from the first step to the last: samples, steps, evaluations, files; and what it refuses.
#include "train/trainer.h"

#include <fstream>
#include <map>
#include <set>

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(TrainerTest, LearnsFromTheSameSamplesAtEveryStepInEveryWorld) {
  std::map<int, std::vector<std::set<int64_t>>> steps_of_world;
  for (int world_size : {1, 2, 3}) {
    SCOPED_TRACE(::testing::Message() << world_size << " ranks");
    const Result result = train(base_config(), world_size);
    EXPECT_EQ(result.summary.num_steps, 30);
    EXPECT_EQ(result.summary.num_samples, 30 * 48);
    EXPECT_EQ(result.summary.num_epochs, 3);
    EXPECT_EQ(result.summary.world_size, world_size);
    ASSERT_TRUE(result.summary.evaluation);
    EXPECT_EQ(result.summary.evaluation->num_samples, 101) << "101 is divisible by none of the worlds";
    EXPECT_GT(result.summary.evaluation->metrics[0].second, 0.95);

    const auto records = json_lines(folder_ / "metrics.jsonl");
    ASSERT_GE(records.size(), 2u);
    EXPECT_LT(records[records.size() - 2].at("loss").get<double>(),
              0.5 * records[0].at("loss").get<double>());

    std::vector<std::set<int64_t>>& steps = steps_of_world[world_size];
    steps.resize(30);
    for (const auto& seen : result.seen) {
      const size_t share = 48 / static_cast<size_t>(world_size);  // of both micro-steps together
      ASSERT_EQ(seen.size(), 30 * share);
      for (size_t i = 0; i < seen.size(); ++i) steps[i / share].insert(seen[i]);
    }
    for (const auto& step : steps) EXPECT_EQ(step.size(), 48u);
    EXPECT_EQ(steps, steps_of_world[1]);
  }
}

TEST_F(TrainerTest, StagesGiveTheSameNumbers) {
  json config = base_config();
  config["gradient_accumulation_steps"] = 1;
  config["trainer"]["epochs"] = 1;
  std::vector<std::pair<double, double>> losses;
  for (int stage : {0, 1, 2, 3}) {
    config["zero_optimization"]["stage"] = stage;
    const Summary summary = train(config, 2).summary;
    EXPECT_EQ(summary.stage, stage);
    losses.emplace_back(summary.train_loss, summary.evaluation->metrics[1].second);
    EXPECT_EQ(losses.back(), losses.front()) << "stage " << stage;
  }
  config["seed"] = 43;
  EXPECT_NE(train(config, 2).summary.train_loss, losses.front().first);
}

TEST_F(TrainerTest, WritesItsFiles) {
  json config = base_config();
  config["scheduler"] = {{"type", "WarmupDecayLR"}, {"params", {{"warmup_num_steps", 5}}}};
  const Result result = train(config, 2);

  const json resolved = json::parse(read_text(folder_ / "config.json"));
  EXPECT_EQ(resolved.at("scheduler").at("params").at("total_num_steps"), 30)
      << "set from the length of the run";
  EXPECT_EQ(resolved.at("train_micro_batch_size_per_gpu"), 12);
  EXPECT_NO_THROW(parse_run_config(read_text(folder_ / "config.json"), "config.json", 2))
      << "the run can be repeated from it";

  const auto records = json_lines(folder_ / "metrics.jsonl");
  std::vector<int64_t> steps, evaluations;
  for (const json& record : records)
    (record.contains("eval_loss") ? evaluations : steps).push_back(record.at("step"));
  EXPECT_THAT(steps, ::testing::ElementsAre(4, 8, 12, 16, 20, 24, 28));
  EXPECT_THAT(evaluations, ::testing::ElementsAre(10, 20, 30));
  for (const char* key : {"epoch", "loss", "learning_rate", "grad_norm", "samples_per_second"}) {
    EXPECT_TRUE(records[0].at(key).is_number()) << key;
  }

  const json results = json::parse(read_text(folder_ / "all_results.json"));
  EXPECT_EQ(results.at("train_loss"), result.summary.train_loss);
  EXPECT_EQ(results.at("eval_accuracy"), result.summary.evaluation->metrics[0].second);
  EXPECT_EQ(results.at("eval_samples"), 101);
  EXPECT_GT(results.at("train_runtime"), 0);
}

TEST_F(TrainerTest, MaxStepsAndEvaluationBySteps) {
  json config = base_config();
  config["trainer"].erase("epochs");
  config["trainer"]["max_steps"] = 13;
  config["trainer"]["eval_every_epochs"] = 0;
  config["trainer"]["eval_every_steps"] = 5;
  const Summary summary = train(config, 1).summary;
  EXPECT_EQ(summary.num_steps, 13);
  EXPECT_DOUBLE_EQ(summary.num_epochs, 1.3);
  std::vector<int64_t> evaluations;
  for (const json& record : json_lines(folder_ / "metrics.jsonl")) {
    if (record.contains("eval_loss")) evaluations.push_back(record.at("step"));
  }
  EXPECT_THAT(evaluations, ::testing::ElementsAre(5, 10, 13)) << "also after the last step";
}

TEST_F(TrainerTest, TrainingTimeEndsWithTheLastStep) {
  json config = base_config();
  config["trainer"]["max_steps"] = 2;
  config["trainer"].erase("epochs");
  BlobsOptions slow;
  slow.test_size = 32;
  slow.test_delay_s = 0.3;  // per batch; there are two
  const auto start = std::chrono::steady_clock::now();
  const Summary summary = train(config, 1, slow).summary;
  const std::chrono::duration<double> whole = std::chrono::steady_clock::now() - start;
  EXPECT_GE(summary.test->seconds, 0.6);
  EXPECT_LE(summary.train_s + summary.test->seconds, whole.count()) << "the test is not training time";
}

TEST_F(TrainerTest, WithoutATestSet) {
  const Result result = train(base_config(), 2, {.eval_size = 0});
  EXPECT_FALSE(result.summary.evaluation);
  EXPECT_FALSE(json::parse(read_text(folder_ / "all_results.json")).contains("eval_loss"));
}

TEST_F(TrainerTest, EvaluationPadsShortRanks) {
  // 3 ranks and 7 samples in batches of 2: two rounds, in the second of which
  // ranks 1 and 2 have only padding.
  comm::run_threads(3, {}, [](comm::CommunicatorPtr comm) {
    BlobsTask task({.eval_size = 7});
    EngineConfig config;
    config.train_batch_size = 3;
    config.train_micro_batch_size_per_gpu = 1;
    config.zero.stage = 3;
    Engine& engine = task.initialize(config, comm, {});
    const Evaluation evaluation = evaluate(task, engine, {.eval_batch_size = 2}, {});
    EXPECT_EQ(evaluation.num_samples, 7);
    EXPECT_EQ(task.num_evaluated_rows(), 4) << "every rank calls forward equally often";
  });
}

TEST_F(TrainerTest, AnEvaluationBatchIsNotLargerThanTheData) {
  comm::run_threads(2, {}, [](comm::CommunicatorPtr comm) {
    BlobsTask task({.eval_size = 7});
    EngineConfig config;
    config.train_batch_size = 2;
    config.train_micro_batch_size_per_gpu = 1;
    Engine& engine = task.initialize(config, comm, {});
    const Evaluation whole = evaluate(task, engine, {.eval_batch_size = 1'000'000'000'000}, {});
    EXPECT_EQ(whole.num_samples, 7);
    EXPECT_EQ(task.num_evaluated_rows(), 4) << "half of the data, rounded up";
    const Evaluation parts = evaluate(task, engine, {.eval_batch_size = 3}, {});
    for (size_t i = 0; i < whole.metrics.size(); ++i)
      EXPECT_NEAR(whole.metrics[i].second, parts.metrics[i].second, 1e-6) << whole.metrics[i].first;
  });
}

TEST_F(TrainerTest, UnwritableFolderStopsEveryRankBeforeTraining) {
  fs::create_directories(folder_.parent_path());
  std::ofstream(folder_) << "a file where the folder should be";
  EXPECT_THAT(error_of(base_config(), 3),
              AllOf(HasSubstr("trainer.output_dir: " + folder_.string()), Not(HasSubstr("\n"))));
  fs::remove(folder_);
}

}  // namespace
}  // namespace tessera::train
