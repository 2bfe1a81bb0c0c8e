// A Trainer that resumes a run.
#include "train/trainer.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "core/str.h"
#include "engine/checkpoint/checkpoint_writer_internal.h"
#include "engine/checkpoint/host_folders.h"
#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The parts of a random split depend on its seed: with a different seed the resumed run would be evaluated on
// samples it was trained on.
TEST_F(TrainerTest, WarnsWhenTheDataOfAResumedRunHaveChanged) {
  json config = base_config();
  config["trainer"]["save_every_epochs"] = 1;
  const BlobsOptions before{.train_size = 480, .eval_size = 40, .test_size = 0, .noise = 0.1};
  const auto train_epochs = [&](int epochs, const BlobsOptions& options) {
    config["trainer"]["epochs"] = epochs;
    return train(config, 2, options, false, {.resume = epochs > 1, .init = {}, .stop = {}}).log;
  };
  EXPECT_THAT(train_epochs(1, before), Not(HasSubstr("the data have changed")));
  EXPECT_THAT(train_epochs(2, before), Not(HasSubstr("the data have changed")));
  BlobsOptions options = before;
  options.eval_size = 39;
  EXPECT_THAT(train_epochs(3, options), HasSubstr("the data have changed since the checkpoint: the "
                                                  "evaluation set has 39 samples, 40 before"));
  EXPECT_THAT(train_epochs(4, options), Not(HasSubstr("the data have changed"))) << "only once";
}

TEST_F(TrainerTest, ResultsOfAResumedRunAreOfTheWholeRun) {
  const json config = base_config();
  train(config, 2);
  const json whole = json::parse(read_text(folder_ / "all_results.json"));
  fs::remove_all(folder_);
  double seconds = 0, earlier = 0;
  int64_t begun = 0;
  for (const int64_t stop_at : {7, 16, 30}) {  // between reports
    std::atomic<int64_t> num_asked = stop_at < 30 ? 0 : -1000;
    TrainerStart start{
        .resume = begun > 0, .init = {}, .stop = [&] { return ++num_asked > (stop_at - begun - 1) * 2; }};
    const Summary summary = train(config, 2, {}, false, start).summary;
    EXPECT_EQ(summary.num_steps, stop_at);
    EXPECT_EQ(summary.num_samples, stop_at * 48);
    EXPECT_GT(summary.train_s, seconds);
    begun = stop_at;
    earlier = std::exchange(seconds, summary.train_s);
  }
  EXPECT_EQ(result("train_runtime"), seconds);
  // As if killed after the last step, before the results were written.
  for (const bool again : {false, true}) {
    if (again) {
      fs::remove(folder_ / "all_results.json");
      resume(config, 2);
    }
    EXPECT_EQ(result("train_samples"), whole.at("train_samples"));
    EXPECT_NEAR(result("train_loss"), whole.at("train_loss").get<double>(), 1e-6);
    EXPECT_GT(result("train_runtime"), earlier);
    EXPECT_EQ(result("eval_loss"), whole.at("eval_loss"));
  }
}

// So that "the same command and --resume" works for every command.
TEST_F(TrainerTest, ResumedRunDoesNotReadTheInitialWeights) {
  json config = base_config();
  train(config, 1);
  config["trainer"]["epochs"] = 4;
  EXPECT_EQ(train(config, 2, {}, false, {.resume = true, .init = "is not there.safetensors", .stop = {}})
                .summary.num_steps,
            40);
}

TEST_F(TrainerTest, BestOfAnotherMetricIsDropped) {
  json config = base_config();
  config["trainer"]["metric_for_best"] = "loss";
  config["trainer"]["best_is"] = "greatest";  // no accuracy is above it
  config["trainer"]["early_stopping_patience"] = 9;
  train(config, 1);
  EXPECT_EQ(json::parse(read_text(folder_ / "trainer_state.json")).at("best_global_step"), 10);
  config["trainer"]["metric_for_best"] = "accuracy";
  config["trainer"]["epochs"] = 4;
  resume(config, 1);
  const json state = json::parse(read_text(folder_ / "trainer_state.json"));
  EXPECT_EQ(state.at("best_global_step"), 40);
  EXPECT_LE(state.at("best_metric"), 1);
}

// Under the names of transformers' TrainerState.
TEST_F(TrainerTest, TrainerState) {
  json config = base_config();
  config["trainer"]["early_stopping_patience"] = 5;
  int64_t num_asked = 0;
  for (const bool resume : {false, true}) {
    TrainerStart start{.resume = resume, .init = {}, .stop = [&] { return !resume && ++num_asked == 14; }};
    train(config, 1, {}, false, start);
    const json state = json::parse(read_text(folder_ / "trainer_state.json"));
    EXPECT_EQ(state.at("global_step"), resume ? 30 : 14);
    EXPECT_EQ(state.at("max_steps"), 30);
    EXPECT_EQ(state.at("num_train_epochs"), 3);
    EXPECT_DOUBLE_EQ(state.at("epoch"), resume ? 3 : 1.4);
    const json& history = state.at("log_history");
    const auto records = json_lines(folder_ / "metrics.jsonl");
    ASSERT_EQ(history.size(), records.size());
    EXPECT_TRUE(std::equal(history.begin(), history.end(), records.begin()));
    double best = 1e9;
    for (const json& record : records)
      if (record.contains("eval_loss")) best = std::min(best, record.at("eval_loss").get<double>());
    EXPECT_EQ(state.at("best_metric"), best);
    EXPECT_EQ(state.at("best_model_checkpoint"),
              str(folder_, "/checkpoints/global_step", state.at("best_global_step").get<int>()));
    EXPECT_EQ(state.at("stateful_callbacks")
                  .at("EarlyStoppingCallback")
                  .at("attributes")
                  .at("early_stopping_patience_counter"),
              0);
  }
}

// Of four hosts, partners two by two, each is to be sent two files, which one of them has no room for.
TEST_F(TrainerTest, CheckpointInMemoryThatCannotBeLoadedIsNotUsed) {
  json config = base_config();
  config["trainer"]["epochs"] = 1;
  train(config, 4);
  const json calm = json::parse(read_text(folder_ / "all_results.json"));
  config["trainer"]["save_in_memory_every_steps"] = 1;
  config["trainer"]["save_every_steps"] = 4;
  const auto in_memory = [&](int rank) { return temporary_.path() / str("memory_", rank); };
  const fs::path log = temporary_.path() / "log";
  const auto run = [&](bool restarted, bool or_from_folder) {
    fs::remove(log);
    const Logger logger(LogOptions{.terminal = false, .file = log.string()});
    comm::run_threads(4, {}, [&](comm::CommunicatorPtr comm) {
      const bool is_full = restarted && comm->rank() == 2;  // has the files of ranks 2 and 3
      TrainerStart start{.resume = restarted, .init = {}, .stop = {}};
      const ScopedHostFoldersProbe probe([=](std::string_view done, const fs::path& path) {
        if (is_full && done == "write" && str(path.filename()).find("rank_0000") != std::string::npos)
          throw DiskError("no space left (injected)");
      });
      start.memory = HostFolders::join(comm, in_memory(comm->rank()));
      if (restarted) {
        const auto found = start.memory->find([](const json& state) {
          return std::optional(state.at("client_state").at("trainer").at("steps_done").get<int64_t>());
        });
        EXPECT_EQ(found.tag, "global_step6");
        start.restart_from.sources = {{true, found.tag}};
        if (or_from_folder) start.restart_from.sources.push_back({false, "global_step4"});
      }
      int64_t num_asked = 0;
      start.stop = [&]() -> bool {
        if (!restarted && ++num_asked == 7) throw std::runtime_error("killed");
        return false;
      };
      BlobsTask task({});
      Trainer(parse_run_config(config.dump(), "blobs.json", 4), task, comm, {}, {{}, logger}, start).run();
    });
  };
  const auto begin = [&] {
    fs::remove_all(folder_);
    for (int rank = 0; rank < 4; ++rank) {
      fs::remove_all(in_memory(rank));
      fs::create_directory(in_memory(rank));
    }
    EXPECT_THROW(run(false, false), std::runtime_error);
  };
  begin();
  EXPECT_THROW(run(true, /*or_from_folder=*/false), Error);
  for (int rank = 0; rank < 4; ++rank) EXPECT_FALSE(fs::exists(in_memory(rank) / "global_step6"));
  begin();
  run(true, /*or_from_folder=*/true);
  EXPECT_THAT(read_text(log), AllOf(HasSubstr("the checkpoint in memory is not used: "),
                                    HasSubstr("no space left (injected)")));
  EXPECT_EQ(json::parse(read_text(folder_ / "all_results.json")).at("eval_loss"), calm.at("eval_loss"));
}

}  // namespace
}  // namespace tessera::train
