// Early stopping, and which weights a Trainer tests and exports at the end.
#include "train/trainer.h"

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// At a learning rate of 0 the second and third evaluations are no better than the first.
TEST_F(TrainerTest, StopsEarlyAndResumesWithMorePatience) {
  json config = base_config();
  config["optimizer"]["params"]["lr"] = 0;
  config["trainer"]["epochs"] = 10;
  config["trainer"]["metric_for_best"] = "accuracy";
  config["trainer"]["early_stopping_patience"] = 2;
  const Result result = train(config, 2);
  EXPECT_EQ(result.summary.num_steps, 30);
  EXPECT_THAT(result.output, HasSubstr("\nstopped  early: no better accuracy in 2 evaluations\n"));
  EXPECT_TRUE(result.summary.interrupted.empty()) << "an early stop is a regular end";
  EXPECT_TRUE(fs::exists(folder_ / "model.safetensors"));
  EXPECT_EQ(json::parse(read_text(folder_ / "all_results.json")).at("stopped_early"),
            "no better accuracy in 2 evaluations");

  const Result again = resume(config, 2);
  EXPECT_TRUE(again.summary.was_finished);
  EXPECT_THAT(again.output, HasSubstr("to continue training, raise trainer.early_stopping_patience"));

  config["trainer"]["early_stopping_patience"] = 4;
  const Result more = resume(config, 2);
  EXPECT_EQ(more.summary.num_steps, 50);
  EXPECT_EQ(more.seen[0].size(), 20u * 24u) << "resumed after step 30";
}

// The last evaluations of a run that does all its steps may be no better: that is no early stop.
TEST_F(TrainerTest, RunThatDoesAllStepsHasNotStoppedEarly) {
  json config = base_config();
  config["optimizer"]["params"]["lr"] = 0;
  config["trainer"]["early_stopping_patience"] = 2;
  const Result result = train(config, 1);
  EXPECT_EQ(result.summary.num_steps, 30);
  EXPECT_EQ(result.summary.stopped_early, "");
  EXPECT_FALSE(json::parse(read_text(folder_ / "all_results.json")).contains("stopped_early"));
  EXPECT_THAT(resume(config, 1).output, HasSubstr("raise trainer.epochs"));
}

TEST_F(TrainerTest, EarlyStoppingNeedsAnEvaluation) {
  json config = base_config();
  config["trainer"]["early_stopping_patience"] = 2;
  EXPECT_THAT(
      error_of(config, 2, {.eval_size = 0}),
      AllOf(HasSubstr("trainer.early_stopping_patience: found 2"), HasSubstr("nothing is evaluated")));
}

TEST_F(TrainerTest, WithoutCheckpointsTheLastWeightsAreTested) {
  json config = base_config();
  config["trainer"]["save_every_epochs"] = 0;
  config["trainer"]["best_is"] = "greatest";
  const Summary summary = train(config, 2, {.test_size = 67}).summary;
  ASSERT_TRUE(summary.test);
  EXPECT_LT(summary.test->metrics[1].second, 2 * summary.evaluation->metrics[1].second);
}

}  // namespace
}  // namespace tessera::train
