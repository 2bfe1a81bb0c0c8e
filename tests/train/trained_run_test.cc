// Reading a run's folder: with other numbers of ranks and stages, the exported model or a checkpoint.
#include "train/trained_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/sharded/catalog.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "tests/support/errors.h"
#include "tests/train/blobs_task.h"

namespace tessera::train {
namespace {

using nlohmann::json;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

class TrainedRunTest : public ::testing::Test {
 protected:
  void SetUp() override { register_blobs(registry_); }

  Summary train(bool export_model = true, const json& more = json::object()) {
    json config = {
        {"model", {{"type", "mlp"}}},
        {"data", {{"type", "blobs"}}},
        {"trainer",
         {{"epochs", 3},
          {"output_dir", folder_.string()},
          {"device", "cpu"},
          {"export_model", export_model}}},
        {"train_batch_size", 48},
        {"gradient_accumulation_steps", 2},
        {"optimizer",
         {{"type", "AdamW"},
          {"params", {{"lr", 0.01}}},
          {"param_groups", {{{"match", {"*.bias"}}, {"weight_decay", 0.0}}}}}},
        {"scheduler",
         {{"type", "WarmupDecayLR"}, {"params", {{"warmup_max_lr", 0.02}, {"warmup_num_steps", 3}}}}},
        {"zero_optimization", {{"stage", 2}}},
        {"checkpoint", {{"fsync", false}}}};
    config.merge_patch(more);
    return run(parse_run_config(config.dump(), "blobs.json", 1), registry_, comm::Environment{}, {});
  }

  std::vector<Evaluation> evaluate(const TrainedRun& run) {
    out_.str("");
    return evaluate_run(run, registry_, comm::Environment{}, {{.out = &out_, .now_s = {}}, Logger()});
  }

  const TemporaryFolder temporary_{"trained_run"};
  const fs::path folder_ = temporary_.path() / "run";
  Registry registry_;
  std::ostringstream out_;
};

TEST_F(TrainedRunTest, GivesWhatTheRunHadAtItsEnd) {
  const Summary summary = train();
  const auto expected = summary.evaluation->metrics;
  for (const char* stage : {"zero_optimization.stage=0", "zero_optimization.stage=3"}) {
    const std::vector<Evaluation> found = evaluate(open_run(folder_, 1, {stage}));
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].num_samples, 101);
    EXPECT_NEAR(found[0].metrics[1].second, expected[1].second, 1e-6) << stage;
    EXPECT_EQ(found[0].metrics[0].second, expected[0].second) << stage;
  }
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("eval     accuracy "), HasSubstr("on 101 test samples\n")));
  const json results = json::parse(std::ifstream(folder_ / "eval_results.json"));
  EXPECT_EQ(results.at("eval_samples"), 101);
  EXPECT_NEAR(results.at("eval_loss"), expected[1].second, 1e-6);
  EXPECT_EQ(results.at("model"), (folder_ / "model.safetensors").string());
}

TEST_F(TrainedRunTest, EvaluatesCheckpointsToo) {
  train(/*export_model=*/false);
  const double last =
      evaluate(open_run(folder_, 1))[0].metrics[1].second;  // the latest checkpoint, without a model
  const double first = evaluate(open_run(folder_, 1, {}, "global_step10"))[0].metrics[1].second;
  EXPECT_GT(first, 1.1 * last);
  EXPECT_THAT(error_of<CheckpointError>([&] { evaluate(open_run(folder_, 1, {}, "global_step11")); }),
              HasSubstr("global_step11"));
}

TEST_F(TrainedRunTest, ACopyOfTheCheckpointsIsReadItself) {
  train(/*export_model=*/false, {{"trainer", {{"epochs", 1}}}});
  const fs::path copy = folder_ / "copy";
  fs::copy(folder_ / "checkpoints", copy, fs::copy_options::recursive);
  const double before = evaluate(open_run(copy, 1))[0].metrics[1].second;
  train(/*export_model=*/false);
  const double after = evaluate(open_run(folder_, 1))[0].metrics[1].second;
  EXPECT_NE(after, before);
  EXPECT_EQ(evaluate(open_run(copy, 1))[0].metrics[1].second, before);
  const std::string tag = *checkpoint::read_latest(copy);
  EXPECT_EQ(evaluate(open_run(copy, 1, {}, tag))[0].metrics[1].second, before);
  EXPECT_EQ(evaluate(open_run(copy / tag, 1))[0].metrics[1].second, before);
  EXPECT_THAT(out_.str(), HasSubstr(str("model    ", copy / tag, "\n")));
}

TEST_F(TrainedRunTest, AnotherNumberOfRanksKeepsTheMicroBatchAndOverridesCount) {
  train();
  const TrainedRun run = open_run(folder_, 5);
  EXPECT_EQ(run.config.engine.train_micro_batch_size_per_gpu, 24);
  EXPECT_EQ(run.config.engine.train_batch_size, 5 * 24);
  EXPECT_EQ(type_of(run.config.engine.optimizer.options), "SGD") << "without moments";
  EXPECT_TRUE(run.config.engine.optimizer.param_groups.empty());
  EXPECT_FALSE(run.config.engine.checkpoint.async);
  // config.json has every key under its own name; an override may use another one.
  EXPECT_EQ(open_run(folder_, 1, {"trainer.num_workers=2"}).config.trainer.dataloader_num_workers, 2);
}

TEST_F(TrainedRunTest, ANewRunTakesTheOldResultsAway) {
  train();
  evaluate(open_run(folder_, 1));
  train();
  EXPECT_FALSE(fs::exists(folder_ / "eval_results.json"));
  train(/*export_model=*/false);
  const TrainedRun run = open_run(folder_, 1);
  EXPECT_TRUE(run.weights.empty()) << "not the model of the earlier run";
  EXPECT_EQ(run.tag, "") << "the latest checkpoint";
}

TEST_F(TrainedRunTest, Mistakes) {
  EXPECT_THAT(error_of<ConfigError>([&] { open_run(folder_, 1); }),
              AllOf(HasSubstr(folder_.string()), HasSubstr("has no config.json"), Not(HasSubstr("\n"))));
  train(true, {{"trainer", {{"save_every_epochs", 0}}}});
  EXPECT_THAT(error_of<ConfigError>([&] { open_run(folder_, 1); }),
              HasSubstr("has neither model.safetensors nor checkpoints"));
  train();
  EXPECT_THAT(error_of<ConfigError>([&] { open_run(folder_, 1, {"zero_optimization.stage=4"}); }),
              HasSubstr("zero_optimization.stage"));
  EXPECT_THAT(error_of<ConfigError>([&] { load_predictor(open_run(folder_, 1), registry_, {}); }),
              HasSubstr("to predict with"));
  EXPECT_THAT(error_of<ConfigError>([&] { evaluate(open_run(folder_, 1, {"data.eval_size=0"})); }),
              HasSubstr("has no samples to evaluate"));
}

}  // namespace
}  // namespace tessera::train
