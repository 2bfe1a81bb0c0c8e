// The best checkpoint, and that it stays the best when other saves fail.
#include "train/run/run_checkpoints.h"

#include <cmath>
#include <limits>

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using testing::HasSubstr;

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

// Later evaluations are compared with the older best one, cleaning up keeps it,
// and it is exported.
TEST_F(RunCheckpointsTest, ASaveOfANewBestThatFailsLeavesTheOlderOneTheBest) {
  for (const bool async : {false, true}) {
    SCOPED_TRACE(async ? "async" : "sync");
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    json json_config = base_config();
    json_config["gradient_accumulation_steps"] = 1;
    json_config["checkpoint"] = {{"keep_last", 1}, {"fsync", false}, {"async", async}};
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      const RunConfig config = parse_run_config(json_config.dump(), "blobs.json", 1);
      BlobsTask task({});
      Engine& engine = task.initialize(config.engine, comm, {});
      RunCheckpoints run(config.trainer, engine, {});
      int64_t steps = 0;
      const auto step = [&] {
        engine.backward(task.loss(task.train_batch({0, 1, 2, 3}, at::Generator())));
        engine.step();
        return Position{.steps_done = ++steps, .data = {}, .totals = {}, .early_stopping = {}, .digest = {}};
      };
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
      ASSERT_TRUE(run.best());
      EXPECT_EQ(*run.best(), (Best{0.5, 1, "global_step1"}));
      EXPECT_TRUE(saved(third));  // only the last one and the best are kept
      const Position fourth = step();
      EXPECT_TRUE(run.save(fourth, /*must_succeed=*/true));
      run.finish();
      EXPECT_TRUE(fs::exists(checkpoints() / "global_step1"));
      EXPECT_FALSE(fs::exists(checkpoints() / "global_step3"));

      run.export_model(folder_);
      BlobsTask other({});
      Engine& exported = other.initialize(config.engine, comm, {});
      exported.load_weights((folder_ / "model.safetensors").string());
      EXPECT_TRUE(at::equal(exported.full_parameter("second.weight"), best_weights));

      step();
      EXPECT_TRUE(run.is_best(with_loss(0.45), 5)) << "the lost one was better";
    });
  }
}

// What is exported, kept, recorded and resumed follows the save that has succeeded at last.
TEST_F(RunCheckpointsTest, ASaveOfANewBestThatSucceedsWhenItIsRetriedIsTheBest) {
  for (const bool async : {false, true}) {
    SCOPED_TRACE(async ? "async" : "sync");
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    json json_config = base_config();
    json_config["gradient_accumulation_steps"] = 1;
    json_config["checkpoint"] = {{"keep_last", 1}, {"fsync", false}, {"async", async}};
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      const RunConfig config = parse_run_config(json_config.dump(), "blobs.json", 1);
      BlobsTask task({});
      Engine& engine = task.initialize(config.engine, comm, {});
      RunCheckpoints run(config.trainer, engine, {});
      auto step = [&, steps = int64_t{0}]() mutable {
        engine.backward(task.loss(task.train_batch({0, 1, 2, 3}, at::Generator())));
        engine.step();
        return Position{.steps_done = ++steps, .data = {}, .totals = {}, .early_stopping = {}, .digest = {}};
      };
      const auto on_rank_0 = [&](const std::function<void()>& body) {
        if (comm->rank() == 0) body();
        comm->barrier("files");
      };

      const Position first = step();
      ASSERT_TRUE(run.is_best(with_loss(0.5), 1));
      ASSERT_TRUE(run.save(first, /*must_succeed=*/false));
      engine.last_save_failed();  // waits

      const Position second = step();
      on_rank_0([&] { hide(); });
      EXPECT_TRUE(run.is_best(with_loss(0.4), 2));
      run.save(second, /*must_succeed=*/false);
      EXPECT_EQ(engine.last_save_failed(), async);
      on_rank_0([&] { show(); });

      EXPECT_TRUE(run.save(second, /*must_succeed=*/true)) << "as at the end of a run";
      run.finish();
      const Best best{0.4, 2, "global_step2"};
      ASSERT_TRUE(run.best());
      EXPECT_EQ(*run.best(), best);
      EXPECT_TRUE(fs::exists(checkpoints() / "global_step2"));
      const at::Tensor weights = engine.full_parameter("second.weight").clone();

      run.export_model(folder_);
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
