// Early stopping, and which weights a Trainer tests and exports at the end.
#include "train/trainer.h"

#include <fstream>
#include <thread>

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// At a learning rate of 0 the second and third evaluations are no better than the first.
TEST_F(TrainerTest, StopsEarlyAndResumesWithMorePatience) {
  json config = base_config();
  config["optimizer"]["params"]["lr"] = 0;
  config["trainer"]["epochs"] = 10;
  config["trainer"]["metric_for_best"] = "accuracy";
  config["checkpoint"]["fsync"] = false;
  for (const int world_size : {1, 2}) {
    fs::remove_all(folder_);
    config["trainer"]["early_stopping_patience"] = 2;
    const Result result = train(config, world_size);
    EXPECT_EQ(result.summary.num_steps, 30);
    EXPECT_THAT(result.output, HasSubstr("\nstopped  early: no better accuracy in 2 evaluations\n"));
    EXPECT_TRUE(result.summary.interrupted.empty()) << "an early stop is a regular end";
    EXPECT_TRUE(fs::exists(folder_ / "model.safetensors"));
    EXPECT_EQ(json::parse(read_text(folder_ / "all_results.json")).at("stopped_early"),
              "no better accuracy in 2 evaluations");

    const Result again = train(config, world_size, {}, false, {.resume = true, .init = {}, .stop = {}});
    EXPECT_TRUE(again.summary.was_finished);
    EXPECT_THAT(again.output, HasSubstr("to continue training, raise trainer.early_stopping_patience"));

    config["trainer"]["early_stopping_patience"] = 4;
    const Result more = train(config, world_size, {}, false, {.resume = true, .init = {}, .stop = {}});
    EXPECT_EQ(more.summary.num_steps, 50);
    EXPECT_EQ(more.seen[0].size(), 20u * 48u / static_cast<size_t>(world_size)) << "resumed after step 30";
  }
}

// The last evaluations of a run that does all its steps may be no better: that is no early stop.
TEST_F(TrainerTest, RunThatDoesAllStepsHasNotStoppedEarly) {
  json config = base_config();
  config["optimizer"]["params"]["lr"] = 0;
  config["trainer"]["early_stopping_patience"] = 2;
  config["checkpoint"]["fsync"] = false;
  const Result result = train(config, 1);
  EXPECT_EQ(result.summary.num_steps, 30);
  EXPECT_EQ(result.summary.stopped_early, "");
  EXPECT_FALSE(json::parse(read_text(folder_ / "all_results.json")).contains("stopped_early"));
  EXPECT_THAT(train(config, 1, {}, false, {.resume = true, .init = {}, .stop = {}}).output,
              HasSubstr("raise trainer.epochs"));
}

TEST_F(TrainerTest, EarlyStoppingNeedsItsMetric) {
  json config = base_config();
  config["trainer"]["early_stopping_patience"] = 2;
  EXPECT_THAT(
      error_of(config, 2, {.eval_size = 0}),
      AllOf(HasSubstr("trainer.early_stopping_patience: found 2"), HasSubstr("nothing is evaluated")));
  config["trainer"]["metric_for_best"] = "f2";
  config["trainer"]["overwrite_output_dir"] = true;
  EXPECT_THAT(error_of(config, 2),
              AllOf(HasSubstr("trainer.metric_for_best: found \"f2\""), HasSubstr("accuracy, loss")));
}

TEST_F(TrainerTest, LoadBestAtEndFalseExportsAndTestsTheLastWeights) {
  json config = base_config();
  config["trainer"]["best_is"] = "greatest";  // of the losses: the first evaluation's
  config["trainer"]["load_best_at_end"] = false;
  config["checkpoint"]["fsync"] = false;
  const Summary summary = train(config, 2, {.test_size = 67}).summary;
  EXPECT_EQ(summary.model_metric, "") << "the last step's weights";
  EXPECT_LT(summary.test->metrics[1].second, 1.1 * summary.evaluation->metrics[1].second);
  const json state = json::parse(read_text(folder_ / "trainer_state.json"));
  EXPECT_EQ(state.at("best_global_step"), 10) << "the best is recorded all the same";
}

TEST_F(TrainerTest, TheTestSetIsEvaluatedOnceWithTheBestWeights) {
  json config = base_config();
  config["trainer"]["best_is"] = "greatest";  // of the losses: the first evaluation's weights
  config["checkpoint"] = {{"keep_last", 1}, {"fsync", false}};
  for (int world_size : {1, 2}) {
    const Result result = train(config, world_size, {.test_size = 67});
    EXPECT_THAT(result.output, AllOf(HasSubstr("blobs: 512 training, 101 validation and 67 test samples"),
                                     HasSubstr("epoch 3.00 | eval accuracy"), Not(HasSubstr(" | test ")),
                                     HasSubstr("\nreport of 67\ntest     accuracy ")));
    ASSERT_TRUE(result.summary.test);
    EXPECT_EQ(result.summary.test->num_samples, 67);
    EXPECT_EQ(result.summary.evaluation->num_samples, 101);
    const double test_loss = result.summary.test->metrics[1].second;
    double last = 0;
    for (const json& record : json_lines(folder_ / "metrics.jsonl"))
      if (record.contains("eval_loss")) last = record.at("eval_loss");
    EXPECT_GT(test_loss, 1.2 * last) << "the weights of the first epoch are worse";

    const json results = json::parse(read_text(folder_ / "all_results.json"));
    EXPECT_EQ(results.at("test_loss"), test_loss);
    EXPECT_EQ(results.at("test_samples"), 67);
    EXPECT_EQ(results.at("eval_samples"), 101);
    EXPECT_EQ(read_text(folder_ / "classes.txt"), "four");

    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {  // the exported model gives the same loss
      BlobsTask task({.test_size = 67});
      Engine& engine = task.initialize(parse_run_config(config.dump(), "blobs.json", 1).engine, comm, {});
      engine.load_weights((folder_ / "model.safetensors").string());
      EXPECT_NEAR(evaluate(task, engine, {.eval_batch_size = 16}, {}, EvaluationSet::kTest).metrics[1].second,
                  test_loss, 1e-6);
    });
  }
}

TEST_F(TrainerTest, WithoutCheckpointsTheLastWeightsAreTested) {
  json config = base_config();
  config["trainer"]["save_every_epochs"] = 0;
  config["trainer"]["best_is"] = "greatest";
  const Summary summary = train(config, 2, {.test_size = 67}).summary;
  ASSERT_TRUE(summary.test);
  EXPECT_LT(summary.test->metrics[1].second, 2 * summary.evaluation->metrics[1].second);
}

// The best checkpoint is written in the background. If that fails, it is no longer the best.
TEST_F(TrainerTest, AsynchronousSaveThatFailsIsNotTheBest) {
  json config = base_config();
  config["checkpoint"] = {{"async", true}, {"fsync", false}};
  config["trainer"]["best_is"] = "greatest";  // of the loss: the evaluation after the first epoch
  const fs::path checkpoints = folder_ / "checkpoints";
  int64_t step = 0;
  TrainerStart start;
  start.stop = [&, done = int64_t{0}]() mutable {  // before each step, on one rank
    if (done == 5) std::ofstream(checkpoints) << "in the way";
    if (done == 15) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the save of step 10 has failed by now
      fs::remove(checkpoints);
    }
    step = ++done;
    return false;
  };
  const Result result = train(config, 1, {}, false, start);
  EXPECT_EQ(step, 30);
  EXPECT_THAT(result.log, HasSubstr("a checkpoint was not written"));
  EXPECT_THAT(result.summary.model_metric, HasSubstr("at step 20"));
  EXPECT_TRUE(fs::exists(folder_ / "model.safetensors"));
}

}  // namespace
}  // namespace tessera::train
