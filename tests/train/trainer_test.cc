#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/str.h"
#include "tests/train/trainer_testing.h"
#include "train/run.h"

namespace tessera::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST_F(TrainerTest, LearnsAndCountsEverySampleOnceInEveryWorld) {
  for (int world_size : {1, 2, 3}) {
    SCOPED_TRACE(testing::Message() << world_size << " ranks");
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
  }
}

TEST_F(TrainerTest, EveryWorldTrainsOnTheSameSamplesAtEveryStep) {
  std::map<int, std::vector<std::set<int64_t>>> steps_of_world;
  for (int world_size : {1, 2, 3}) {
    const Result result = train(base_config(), world_size);
    std::vector<std::set<int64_t>> steps(30);
    for (const auto& seen : result.seen) {
      const size_t share = 48 / static_cast<size_t>(world_size);  // of both micro-steps together
      ASSERT_EQ(seen.size(), 30 * share);
      for (size_t i = 0; i < seen.size(); ++i) steps[i / share].insert(seen[i]);
    }
    for (const auto& step : steps) EXPECT_EQ(step.size(), 48u);
    steps_of_world[world_size] = steps;
  }
  EXPECT_EQ(steps_of_world[2], steps_of_world[1]);
  EXPECT_EQ(steps_of_world[3], steps_of_world[1]);
}

TEST_F(TrainerTest, ARunThatGoesOnSeesWhatAnUninterruptedOneDoes) {
  json config = base_config();
  config["trainer"]["save_every_epochs"] = 1;
  config["checkpoint"]["fsync"] = false;
  const std::vector<int64_t> whole = train(config, 1).seen[0];
  for (int64_t stop_at : {4, 10}) {  // within an epoch, at its end
    fs::remove_all(folder_);
    std::vector<int64_t> seen;
    for (bool resume : {false, true}) {
      int64_t num_asked = 0;
      comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
        BlobsTask task({});
        TrainerStart start{
            .resume = resume, .init = {}, .stop = [&] { return !resume && ++num_asked == stop_at; }};
        const Summary summary =
            Trainer(parse_run_config(config.dump(), "blobs.json", 1), task, comm, {}, {}, start).run();
        EXPECT_EQ(summary.num_steps, resume ? 30 : stop_at);
        seen.insert(seen.end(), task.seen().begin(), task.seen().end());
      });
    }
    EXPECT_TRUE(seen == whole) << "stopped after step " << stop_at;
  }
}

// The parts of a random split depend on its seed: with another one a run would
// be evaluated on what it was trained on.
TEST_F(TrainerTest, ARunThatGoesOnWithOtherDataSaysSo) {
  json config = base_config();
  config["trainer"]["save_every_epochs"] = 1;
  const BlobsOptions before{.train_size = 480, .eval_size = 40, .test_size = 0, .noise = 0.1};
  const auto go_on = [&](int epochs, const BlobsOptions& options) {
    config["trainer"]["epochs"] = epochs;
    return train(config, 2, options, false, {.resume = epochs > 1, .init = {}, .stop = {}}).log;
  };
  EXPECT_THAT(go_on(1, before), Not(HasSubstr("the data are not")));
  EXPECT_THAT(go_on(2, before), Not(HasSubstr("the data are not")));
  BlobsOptions options = before;
  options.eval_size = 39;
  EXPECT_THAT(go_on(3, options), HasSubstr("the data are not those that the run has had so far: the "
                                           "evaluation set has 39 samples, 40 before"));
  EXPECT_THAT(go_on(4, options), Not(HasSubstr("the data are not"))) << "it was said when they changed";
}

TEST_F(TrainerTest, StagesGiveTheSameNumbers) {
  std::map<int, double> losses;
  std::map<int, double> test_losses;
  for (int stage : {0, 1, 2, 3}) {
    json config = base_config(stage);
    config["gradient_accumulation_steps"] = 1;
    const Summary summary = train(config, 2).summary;
    EXPECT_EQ(summary.stage, stage);
    losses[stage] = summary.train_loss;
    test_losses[stage] = summary.evaluation->metrics[1].second;
  }
  for (int stage : {1, 2, 3}) {
    EXPECT_EQ(losses[stage], losses[0]) << "stage " << stage;
    EXPECT_EQ(test_losses[stage], test_losses[0]) << "stage " << stage;
  }
}

TEST_F(TrainerTest, WritesItsFiles) {
  json config = base_config();
  config["scheduler"] = {{"type", "WarmupDecayLR"}, {"params", {{"warmup_num_steps", 5}}}};
  const Result result = train(config, 2);

  const json resolved = json::parse(read_text(folder_ / "config.json"));
  EXPECT_EQ(resolved.at("scheduler").at("params").at("total_num_steps"), 30)
      << "filled in from the length of the run";
  EXPECT_EQ(resolved.at("train_micro_batch_size_per_gpu"), 12);
  EXPECT_NO_THROW(parse_run_config(read_text(folder_ / "config.json"), "config.json", 2))
      << "the run can be repeated from it";

  const auto records = json_lines(folder_ / "metrics.jsonl");
  std::vector<int64_t> steps, evaluations;
  for (const json& record : records)
    (record.contains("eval_loss") ? evaluations : steps).push_back(record.at("step"));
  EXPECT_THAT(steps, testing::ElementsAre(4, 8, 12, 16, 20, 24, 28));
  EXPECT_THAT(evaluations, testing::ElementsAre(10, 20, 30));
  for (const char* key : {"epoch", "loss", "learning_rate", "grad_norm", "samples_per_second"}) {
    EXPECT_TRUE(records[0].at(key).is_number()) << key;
  }

  const json results = json::parse(read_text(folder_ / "all_results.json"));
  EXPECT_EQ(results.at("train_loss"), result.summary.train_loss);
  EXPECT_EQ(results.at("eval_accuracy"), result.summary.evaluation->metrics[0].second);
  EXPECT_EQ(results.at("eval_samples"), 101);
  EXPECT_GT(results.at("train_runtime"), 0);
}

TEST_F(TrainerTest, PlainOutputIsLines) {
  const std::string output = train(base_config(), 2).output;
  EXPECT_EQ(output.find('\r'), std::string::npos);
  EXPECT_THAT(output, AllOf(HasSubstr("blobs: 512 training and 101 test samples, 30 steps\nbatch 48 = 12 x 2 "
                                      "accumulated x 2 ranks, "),
                            HasSubstr("\nstep 4/30 | epoch 0.40 | loss "),
                            HasSubstr("\nepoch 1.00 | eval accuracy "), HasSubstr(" on 101 test samples\n"),
                            HasSubstr("30 steps (3 epochs) in "), HasSubstr("\nranks    2, ZeRO stage 2\n"),
                            HasSubstr("\nfiles    " + folder_.string() +
                                      "/{config.json, metrics.jsonl, trainer_state.json, all_results.json, "
                                      "checkpoints/, samples/}\n")));
}

TEST_F(TrainerTest, TerminalHasABar) {
  const std::string output = train(base_config(), 2, {}, /*is_terminal=*/true).output;
  EXPECT_THAT(output,
              AllOf(HasSubstr("\rtrain: 100%|"), HasSubstr("| 30/30 ["), HasSubstr("samples/s, loss="),
                    HasSubstr("\repoch 1.00 | eval accuracy "), Not(HasSubstr("step 4/30 |"))));
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
  EXPECT_THAT(evaluations, testing::ElementsAre(5, 10, 13)) << "and once at the end";
}

// At a learning rate of 0 the second evaluation is no better than the first, nor is the third.
TEST_F(TrainerTest, StopsEarlyAndGoesOnWithMorePatience) {
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
    EXPECT_TRUE(result.summary.interrupted.empty()) << "it has come to its end";
    EXPECT_TRUE(fs::exists(folder_ / "model.safetensors"));
    EXPECT_EQ(json::parse(read_text(folder_ / "all_results.json")).at("stopped_early"),
              "no better accuracy in 2 evaluations");

    const Result again = train(config, world_size, {}, false, {.resume = true, .init = {}, .stop = {}});
    EXPECT_TRUE(again.summary.was_finished);
    EXPECT_THAT(again.output, HasSubstr("to train on, raise trainer.early_stopping_patience"));

    config["trainer"]["early_stopping_patience"] = 4;
    const Result more = train(config, world_size, {}, false, {.resume = true, .init = {}, .stop = {}});
    EXPECT_EQ(more.summary.num_steps, 50);
    EXPECT_EQ(more.seen[0].size(), 20u * 48u / static_cast<size_t>(world_size)) << "it goes on where it was";
  }
}

// The last evaluations of a run that does all its steps may well be no better.
TEST_F(TrainerTest, TrainingTimeEndsWithTheLastStep) {
  json config = base_config();
  config["trainer"]["max_steps"] = 2;
  config["trainer"].erase("epochs");
  BlobsOptions slow;
  slow.test_size = 32;
  slow.test_delay_s = 0.5;  // a batch, of which there are two
  const Summary summary = train(config, 1, slow).summary;
  EXPECT_GT(summary.test->seconds, 0.9);
  EXPECT_LT(summary.train_s, 0.9) << "the final test is none of it";
}

TEST_F(TrainerTest, WhoHasDoneAllStepsHasNotStoppedEarly) {
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

TEST_F(TrainerTest, ResultsAreOfTheWholeRunHoweverOftenItWasResumed) {
  for (const int world_size : {1, 2}) {
    json config = base_config();
    config["checkpoint"]["fsync"] = false;
    fs::remove_all(folder_);
    train(config, world_size);
    const json whole = json::parse(read_text(folder_ / "all_results.json"));
    fs::remove_all(folder_);
    double seconds = 0;
    for (const int64_t stop_at : {7, 16, 30}) {  // between reports
      int64_t num_asked = stop_at < 30 ? 0 : -1000, begun = stop_at == 7 ? 0 : 7;
      if (stop_at == 30) begun = 16;
      std::mutex mutex;
      TrainerStart start{.resume = begun > 0, .init = {}, .stop = [&] {
                           const std::lock_guard lock(mutex);
                           return ++num_asked > (stop_at - begun - 1) * world_size;
                         }};
      const Summary summary = train(config, world_size, {}, false, start).summary;
      EXPECT_EQ(summary.num_steps, stop_at);
      EXPECT_EQ(summary.num_samples, stop_at * 48);
      EXPECT_GT(summary.train_s, seconds);
      seconds = summary.train_s;
    }
    // Killed before the results were written, with nothing left to train.
    for (const bool again : {false, true}) {
      if (again) {
        fs::remove(folder_ / "all_results.json");
        train(config, world_size, {}, false, {.resume = true, .init = {}, .stop = {}});
      }
      const json results = json::parse(read_text(folder_ / "all_results.json"));
      EXPECT_EQ(results.at("train_samples"), whole.at("train_samples"));
      EXPECT_NEAR(results.at("train_loss").get<double>(), whole.at("train_loss").get<double>(), 1e-6);
      EXPECT_NEAR(results.at("train_runtime").get<double>(), seconds, 0.2 * seconds);
      EXPECT_EQ(results.at("eval_loss"), whole.at("eval_loss"));
    }
  }
}

// So that "the same command and --resume" works whatever the command.
TEST_F(TrainerTest, WeightsToStartFromAreNotReadByARunThatGoesOn) {
  json config = base_config();
  config["checkpoint"]["fsync"] = false;
  train(config, 1);
  config["trainer"]["epochs"] = 4;
  EXPECT_EQ(train(config, 2, {}, false, {.resume = true, .init = "is not there.safetensors", .stop = {}})
                .summary.num_steps,
            40);
}

TEST_F(TrainerTest, TheBestOfAnotherMetricIsForgotten) {
  json config = base_config();
  config["trainer"]["metric_for_best"] = "loss";
  config["trainer"]["best_is"] = "greatest";  // no accuracy is above it
  config["trainer"]["early_stopping_patience"] = 9;
  config["checkpoint"]["fsync"] = false;
  train(config, 1);
  EXPECT_EQ(json::parse(read_text(folder_ / "trainer_state.json")).at("best_global_step"), 10);
  config["trainer"]["metric_for_best"] = "accuracy";
  config["trainer"]["epochs"] = 4;
  train(config, 1, {}, false, {.resume = true, .init = {}, .stop = {}});
  const json state = json::parse(read_text(folder_ / "trainer_state.json"));
  EXPECT_EQ(state.at("best_global_step"), 40);
  EXPECT_LE(state.at("best_metric"), 1);
}

TEST_F(TrainerTest, AStateThatCannotBeWrittenIsAWarning) {
  const fs::path state = folder_ / "trainer_state.json";
  TrainerStart start;
  start.stop = [&] { return fs::create_directories(state / "in the way"), false; };
  const Result result = train(base_config(), 2, {}, false, start);
  EXPECT_THAT(result.log, HasSubstr(state.string()));
  EXPECT_EQ(result.summary.num_steps, 30);
  EXPECT_TRUE(fs::exists(folder_ / "all_results.json"));
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

TEST_F(TrainerTest, TheLastWeightsAreExportedAndTestedOnRequest) {
  json config = base_config();
  config["trainer"]["best_is"] = "greatest";  // of the losses: the first evaluation's
  config["trainer"]["load_best_at_end"] = false;
  config["checkpoint"]["fsync"] = false;
  const Summary summary = train(config, 2, {.test_size = 67}).summary;
  EXPECT_EQ(summary.model_metric, "") << "it is the last";
  EXPECT_LT(summary.test->metrics[1].second, 1.1 * summary.evaluation->metrics[1].second);
  const json state = json::parse(read_text(folder_ / "trainer_state.json"));
  EXPECT_EQ(state.at("best_global_step"), 10) << "which is known all the same";
}

// Under the names of transformers' TrainerState.
TEST_F(TrainerTest, TrainerState) {
  json config = base_config();
  config["trainer"]["early_stopping_patience"] = 5;
  config["checkpoint"]["fsync"] = false;
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
              str(folder_.string(), "/checkpoints/global_step", state.at("best_global_step").get<int>()));
    EXPECT_EQ(state.at("stateful_callbacks")
                  .at("EarlyStoppingCallback")
                  .at("attributes")
                  .at("early_stopping_patience_counter"),
              0);
  }
}

TEST_F(TrainerTest, SamplesAreWrittenAtEachEvaluation) {
  train(base_config(), 2);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_ / "samples"))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"step_00000010.txt", "step_00000020.txt", "step_00000030.txt"}));
  std::ofstream(folder_ / "samples" / "step_by_step.txt") << "somebody's own";
  json shorter = base_config();
  shorter["trainer"]["epochs"] = 1;
  train(shorter, 2);
  EXPECT_TRUE(fs::exists(folder_ / "samples" / "step_by_step.txt"));
  EXPECT_FALSE(fs::exists(folder_ / "samples" / "step_00000030.txt")) << "those of an earlier run";
  EXPECT_TRUE(fs::exists(folder_ / "samples" / "step_00000010.txt"));
}

TEST_F(TrainerTest, SamplesThatCannotBeWrittenAreAWarning) {
  const Result result = train(base_config(), 2, {.samples_error = "samples/10.png: the disk is full"});
  EXPECT_THAT(result.log, HasSubstr("samples/10.png: the disk is full"));
  EXPECT_EQ(result.summary.num_steps, 30);
}

TEST_F(TrainerTest, WithoutATestSet) {
  const Result result = train(base_config(), 2, {.eval_size = 0});
  EXPECT_FALSE(result.summary.evaluation);
  EXPECT_FALSE(json::parse(read_text(folder_ / "all_results.json")).contains("eval_loss"));
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
    EXPECT_GT(test_loss, 1.2 * last) << "those of the first epoch are the worse ones";

    const json results = json::parse(read_text(folder_ / "all_results.json"));
    EXPECT_EQ(results.at("test_loss"), test_loss);
    EXPECT_EQ(results.at("test_samples"), 67);
    EXPECT_EQ(results.at("eval_samples"), 101);
    EXPECT_EQ(read_text(folder_ / "classes.txt"), "four");

    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {  // the exported model gives the same
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

TEST_F(TrainerTest, RunsAreReproducible) {
  const double loss = train(base_config(), 2).summary.train_loss;
  EXPECT_EQ(train(base_config(), 2).summary.train_loss, loss);
  json other = base_config();
  other["seed"] = 43;
  EXPECT_NE(train(other, 2).summary.train_loss, loss);
}

TEST_F(TrainerTest, WarnsOnceOfALossThatIsNotFinite) {
  const Result result = train(base_config(), 2, {.nan_from_step = 20});
  const std::string words = "the training loss is nan at step 11 on rank 0";
  ASSERT_THAT(result.log, HasSubstr(words));
  EXPECT_THAT(result.log.substr(result.log.find(words) + 1), Not(HasSubstr("the training loss is")));
  EXPECT_EQ(result.summary.skipped_steps, 20) << "from step 11 on no gradient is finite";
  EXPECT_THAT(result.output, HasSubstr("| skipped 2\n"));
  EXPECT_THAT(result.output, HasSubstr(" s, 20 skipped\n"));
  EXPECT_TRUE(std::isfinite(result.summary.evaluation->metrics[1].second))
      << "the weights stayed as they were";
}

TEST_F(TrainerTest, Fp16ShowsTheLossScale) {
  json config = base_config();
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 10}};
  const Result result = train(config, 2);
  EXPECT_THAT(result.output, HasSubstr("| loss scale 1024 |"));
  EXPECT_EQ(json_lines(folder_ / "metrics.jsonl")[0].at("loss_scale"), 1024);
  EXPECT_GT(result.summary.evaluation->metrics[0].second, 0.9);
}

TEST_F(TrainerTest, BreakdownOfTime) {
  json config = base_config();
  config["wall_clock_breakdown"] = true;
  const Result result = train(config, 1);
  EXPECT_THAT(result.output, HasSubstr("\n  time (ms) | data "));
  const json record = json_lines(folder_ / "metrics.jsonl")[0];
  for (const char* phase : {"data_ms", "forward_ms", "backward_ms", "step_ms"})
    EXPECT_GT(record.at(phase), 0) << phase;
}

TEST_F(TrainerTest, BreakdownOfMemory) {
  json config = base_config();
  config["memory_breakdown"] = true;
  config["zero_optimization"]["stage"] = 2;
  const Result result = train(config, 2);
  EXPECT_THAT(result.output, HasSubstr("\n  memory at the peak (MB) | parameters "));
  const json bytes = json_lines(folder_ / "metrics.jsonl")[0].at("memory_peak_bytes");
  // AdamW in fp32: two states a parameter, and the gradient's shard is as large as one of them.
  EXPECT_GT(bytes.at("gradients"), 0);
  EXPECT_EQ(bytes.at("optimizer"), 2 * bytes.at("gradients").get<int64_t>());
  EXPECT_GT(bytes.at("activations"), 0);
  int64_t sum = 0;
  for (const auto& [use, value] : bytes.items())
    if (use != "total") sum += value.get<int64_t>();
  EXPECT_EQ(bytes.at("total"), sum);
}

TEST_F(TrainerTest, OutOfMemorySaysWhatWasHeldAndWhatToChange) {
  for (const bool breakdown : {false, true}) {
    json config = base_config();
    config["memory_breakdown"] = breakdown;
    std::string error;
    try {
      train(config, 2, {.greedy_from_step = 5});
    } catch (const Error& caught) {
      error = caught.what();
    }
    EXPECT_THAT(
        error,
        AllOf(HasSubstr("out of memory in step "),
              HasSubstr(
                  "to change: raise zero_optimization.stage (2), or lower train_micro_batch_size_per_gpu ("),
              Not(HasSubstr("\n"))));
    EXPECT_THAT(error, HasSubstr(breakdown ? "; held then (MB): parameters 0.0 | "
                                           : "; memory_breakdown: true would say what it was for; "));
    if (breakdown) {
      EXPECT_THAT(error, HasSubstr("activations and temporaries 3.0 | "))
          << "what was held then, not what is left now";
    }
  }
}

TEST_F(TrainerTest, UnwritableFolderStopsEveryRankBeforeTraining) {
  fs::create_directories(folder_.parent_path());
  std::ofstream(folder_) << "a file where the folder should be";
  for (int world_size : {1, 3}) {
    EXPECT_THAT(error_of(base_config(), world_size),
                AllOf(HasSubstr("trainer.output_dir: " + folder_.string()), Not(HasSubstr("\n"))));
  }
  fs::remove(folder_);
}

TEST_F(TrainerTest, TooFewSamplesForOneBatch) {
  EXPECT_THAT(error_of(base_config(), 2, {.train_size = 47}), HasSubstr("train_batch_size: 48"));
}

TEST_F(TrainerTest, MoreEpochsThanCanBeCounted) {
  json config = base_config();
  config["trainer"]["epochs"] = 9e15;
  config["train_batch_size"] = 1;
  config["gradient_accumulation_steps"] = 1;
  EXPECT_THAT(error_of(config, 1, {.train_size = 100'000}),
              HasSubstr("trainer.epochs: found 9000000000000000"));
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

// The best checkpoint is written in the background, and fails there: then it is not the best any more.
TEST_F(TrainerTest, AnAsynchronousSaveThatFailsIsForgotten) {
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

TEST_F(TrainerTest, RunJoinsLoadsAndTrains) {
  Registry registry;
  register_blobs(registry);
  std::ostringstream out;
  const TrainerOutput output{{.out = &out, .now_s = {}}, Logger()};
  const json config = base_config();
  const Summary summary =
      run(parse_run_config(config.dump(), "blobs.json", 1), registry, comm::Environment{}, output);
  EXPECT_EQ(summary.evaluation->num_samples, 101);
  EXPECT_THAT(out.str(), HasSubstr("on 101 test samples"));
  EXPECT_EQ(json::parse(read_text(folder_ / "config.json")).at("model").at("hidden"), 16)
      << "defaults are written out";

  json unknown = config;
  unknown["data"]["type"] = "blob";
  EXPECT_THROW(run(parse_run_config(unknown.dump(), "blobs.json", 1), registry, comm::Environment{}, output),
               ConfigError);
}

// As torch.use_deterministic_algorithms(True): put_ without accumulation has no deterministic form.
TEST(MakeDeterministic, RefusesWhatIsNot) {
  at::Tensor values = at::zeros({4});
  const auto put = [&] { values.put_(at::tensor({1, 1}, at::kLong), at::tensor({1.0f, 2.0f})); };
  EXPECT_NO_THROW(put());
  make_deterministic();
  EXPECT_THROW(put(), c10::Error);
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST(ChooseDevice, Cpu) {
  TrainerConfig trainer;
  trainer.device = "cpu";
  EXPECT_TRUE(choose_device(trainer, {}).is_cpu());
  trainer.device = "auto";
  comm::Environment crowded;
  crowded.local_world_size = 4096;  // more ranks than any host has devices
  EXPECT_TRUE(choose_device(trainer, crowded).is_cpu());
  trainer.device = "cuda";
  try {
    choose_device(trainer, crowded);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("trainer.device"), Not(HasSubstr("\n"))));
  }
}

TEST(ChooseNumThreads, SharesTheCores) {
  TrainerConfig trainer;
  trainer.num_threads = 3;
  EXPECT_EQ(choose_num_threads(trainer, {}), 3);
  trainer.num_threads = 0;
  comm::Environment crowded;
  crowded.local_world_size = 4096;
  EXPECT_EQ(choose_num_threads(trainer, crowded), 1);
  EXPECT_GE(choose_num_threads(trainer, {}), 1);
}

}  // namespace
}  // namespace tessera::train
