// The best checkpoint, and that it stays the best when other saves fail.
#include "train/run/run_checkpoints.h"

#include <cmath>
#include <functional>
#include <limits>

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

class RunCheckpointsTest : public TrainerTest {
 protected:
  fs::path checkpoints() const { return folder_ / "checkpoints"; }
  /// While the checkpoints are hidden every save fails.
  void hide() const {
    fs::rename(checkpoints(), folder_ / "aside");
    std::ofstream(checkpoints()) << "in the way";
  }
  void show() const {
    fs::remove(checkpoints());
    fs::rename(folder_ / "aside", checkpoints());
  }
  static Evaluation with_loss(double loss) { return {.num_samples = 1, .metrics = {{"loss", loss}}}; }
};

class SavesOfTheBest : public RunCheckpointsTest, public ::testing::WithParamInterface<bool> {  // async
 protected:
  using Step = std::function<Position()>;
  using Body = std::function<void(const RunConfig&, Engine&, RunCheckpoints&, const Step&)>;

  void with_run(const Body& body) const {
    fs::create_directories(folder_);
    json json_config = base_config();
    json_config["gradient_accumulation_steps"] = 1;
    json_config["checkpoint"].update({{"keep_last", 1}, {"async", GetParam()}});
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      const RunConfig config = parse_run_config(json_config.dump(), "blobs.json", 1);
      BlobsTask task({});
      Engine& engine = task.initialize(config.engine, comm, {});
      RunCheckpoints run(config.trainer, engine, {});
      body(config, engine, run, [&, steps = int64_t{0}]() mutable {
        engine.backward(task.loss(task.train_batch({0, 1, 2, 3}, at::Generator())));
        engine.step();
        return Position{.steps_done = ++steps, .data = {}, .totals = {}, .early_stopping = {}, .digest = {}};
      });
    });
  }

  /// `best` is what is exported, and what another process resumes with.
  void expect_exported(const RunConfig& config, RunCheckpoints& run, const at::Tensor& weights,
                       const Best& best) const {
    ASSERT_TRUE(run.best());
    EXPECT_EQ(*run.best(), best);
    run.export_model(folder_);
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      BlobsTask other({});
      Engine& exported = other.initialize(config.engine, comm, {});
      exported.load_weights((folder_ / "model.safetensors").string());
      EXPECT_TRUE(at::equal(exported.full_parameter("second.weight"), weights));
      RunCheckpoints resumed(config.trainer, exported, {});
      resumed.resume("");
      ASSERT_TRUE(resumed.best());
      EXPECT_EQ(*resumed.best(), best);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(All, SavesOfTheBest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Async" : "Sync"; });

// Later evaluations are compared with the older best one, cleaning up keeps it, and it is exported.
TEST_P(SavesOfTheBest, OneThatFailsLeavesTheOlderOneTheBest) {
  with_run([&](const RunConfig& config, Engine& engine, RunCheckpoints& run, const auto& step) {
    const auto saved = [&](const Position& position) {
      const bool begun = run.save(position, /*must_succeed=*/false);
      return begun && !engine.last_save_failed();
    };
    const Position first = step();
    ASSERT_TRUE(run.is_best(with_loss(0.5), 1));
    ASSERT_TRUE(saved(first));
    const at::Tensor best_weights = engine.full_parameter("second.weight").clone();

    const Position second = step();
    hide();
    EXPECT_TRUE(run.is_best(with_loss(0.4), 2));
    EXPECT_FALSE(saved(second));
    show();

    const Position third = step();
    EXPECT_FALSE(run.is_best(with_loss(0.6), 3)) << "0.5 is still the best";
    EXPECT_TRUE(saved(third));  // only the last one and the best are kept
    EXPECT_TRUE(run.save(step(), /*must_succeed=*/true));
    run.finish();
    EXPECT_TRUE(fs::exists(checkpoints() / "global_step1"));
    EXPECT_FALSE(fs::exists(checkpoints() / "global_step3"));
    expect_exported(config, run, best_weights, {0.5, 1, "global_step1"});
    step();
    EXPECT_TRUE(run.is_best(with_loss(0.45), 5)) << "the lost one was better";
  });
}

// What is exported, kept, recorded and resumed follows the save that has succeeded at last.
TEST_P(SavesOfTheBest, OneThatSucceedsWhenItIsRetriedIsTheBest) {
  with_run([&](const RunConfig& config, Engine& engine, RunCheckpoints& run, const auto& step) {
    const Position first = step();
    ASSERT_TRUE(run.is_best(with_loss(0.5), 1));
    ASSERT_TRUE(run.save(first, /*must_succeed=*/false));
    engine.last_save_failed();  // waits

    const Position second = step();
    hide();
    EXPECT_TRUE(run.is_best(with_loss(0.4), 2));
    run.save(second, /*must_succeed=*/false);
    EXPECT_EQ(engine.last_save_failed(), GetParam());
    show();

    EXPECT_TRUE(run.save(second, /*must_succeed=*/true)) << "as at the end of a run";
    run.finish();
    EXPECT_TRUE(fs::exists(checkpoints() / "global_step2"));
    expect_exported(config, run, engine.full_parameter("second.weight").clone(), {0.4, 2, "global_step2"});
  });
}

TEST_F(RunCheckpointsTest, WhatIsNoNumberIsNotTheBest) {
  for (const char* metric : {"loss", "accuracy"}) {  // the least, the greatest
    SCOPED_TRACE(metric);
    json json_config = base_config();
    json_config["trainer"]["metric_for_best"] = metric;
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      const RunConfig config = parse_run_config(json_config.dump(), "blobs.json", 1);
      BlobsTask task({});
      RunCheckpoints run(config.trainer, task.initialize(config.engine, comm, {}), {});
      const auto is_best = [&](double value) {
        return run.is_best({.num_samples = 1, .metrics = {{metric, value}}}, 1);
      };
      constexpr double kInfinity = std::numeric_limits<double>::infinity();
      for (const double value : {std::nan(""), kInfinity, -kInfinity})
        EXPECT_FALSE(is_best(value)) << value << " first";
      EXPECT_TRUE(is_best(0.5));
      for (const double value : {std::nan(""), kInfinity, -kInfinity})
        EXPECT_FALSE(is_best(value)) << value << " later";
      EXPECT_TRUE(is_best(metric == std::string("loss") ? 0.4 : 0.6));
    });
  }
}

}  // namespace
}  // namespace tessera::train
