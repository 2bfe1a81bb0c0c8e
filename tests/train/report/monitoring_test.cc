// What a training run sends to its monitors: names, values, and its final status.
#include "train/report/monitoring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/train/blobs_task.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::Pair;
namespace fs = std::filesystem;

TEST(Monitoring, NamesAreHuggingFaces) {
  const auto training =
      ordered_json::parse(R"({"step": 10, "epoch": 0.5, "loss": 0.25, "learning_rate": 1e-3, "note": "x",
      "memory_peak_bytes": {"parameters": 64, "total": 128}})");
  EXPECT_THAT(scalars_of(training),
              ElementsAre(Pair("train/epoch", 0.5), Pair("train/loss", 0.25),
                          Pair("train/learning_rate", 1e-3), Pair("train/memory_peak_bytes/parameters", 64),
                          Pair("train/memory_peak_bytes/total", 128)));
  const auto evaluation =
      ordered_json::parse(R"({"step": 10, "epoch": 1.0, "eval_accuracy": 0.75, "eval_samples": 101})");
  EXPECT_THAT(scalars_of(evaluation),
              ElementsAre(Pair("eval/epoch", 1.0), Pair("eval/accuracy", 0.75), Pair("eval/samples", 101)));
  const auto test = ordered_json::parse(R"({"step": 10, "epoch": 1.0, "test_accuracy": 0.75})");
  EXPECT_THAT(scalars_of(test), ElementsAre(Pair("test/epoch", 1.0), Pair("test/accuracy", 0.75)));
}

TEST(Monitoring, NoneAreEnabledByDefault) {
  EXPECT_TRUE(open_monitors(MonitorConfig{}, MonitoredRun{}).empty());
}

class MonitoredRunTest : public ::testing::Test {
 protected:
  json config() const {
    return {{"model", {{"type", "mlp"}}},
            {"data", {{"type", "blobs"}}},
            {"trainer", {{"max_steps", 6}, {"output_dir", folder_.string()}, {"device", "cpu"}}},
            {"checkpoint", {{"fsync", false}}},
            {"train_batch_size", 48},
            {"steps_per_print", 2},
            {"jsonl_monitor", {{"enabled", true}}}};
  }

  /// The lines the monitor wrote.
  std::vector<json> train(const json& config, const BlobsOptions& options = {},
                          const TrainerStart& start = {}, int world_size = 2) const {
    try {
      comm::run_threads(world_size, {}, [&](comm::CommunicatorPtr comm) {
        BlobsTask task(options);
        Trainer(parse_run_config(config.dump(), "blobs.json", world_size), task, comm, {}, {}, start).run();
      });
    } catch (const Error&) {  // the run is meant to fail
    }
    std::vector<json> lines;
    std::ifstream file(folder_ / "jsonl_monitor" / "events.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
  }

  const TemporaryFolder temporary_{"monitored"};
  const fs::path folder_ = temporary_.path() / "run";
};

TEST_F(MonitoredRunTest, EverythingInMetricsAndTheConfigurationAndTheResults) {
  std::vector<json> lines = train(config(), {.test_size = 67});
  ASSERT_EQ(lines.size(), 9u);
  const auto sample = lines.begin() + 4;  // before its evaluation's numbers
  EXPECT_EQ(sample->at("text"), "samples/words");
  EXPECT_EQ(sample->at("content"), "samples");
  EXPECT_EQ(sample->at("step"), 6);
  lines.erase(sample);
  json resolved;
  std::ifstream(folder_ / "config.json") >> resolved;
  EXPECT_EQ(lines.front().at("params"), resolved);
  std::ifstream metrics(folder_ / "metrics.jsonl");
  size_t at = 1;
  for (std::string line; std::getline(metrics, line); ++at) {
    const auto record = ordered_json::parse(line);
    EXPECT_EQ(lines.at(at).at("step"), record.at("step"));
    json expected = json::object();
    for (const auto& [name, value] : scalars_of(record)) expected[name] = value;
    EXPECT_EQ(lines.at(at).at("scalars"), expected);
  }
  EXPECT_EQ(at, 6u) << "three reports, an evaluation and the test";
  json results;
  std::ifstream(folder_ / "all_results.json") >> results;
  const json& test = lines.at(5).at("scalars");
  for (const char* name : {"accuracy", "loss", "samples", "runtime", "samples_per_second"})
    EXPECT_EQ(test.at(std::string("test/") + name), results.at(std::string("test_") + name)) << name;
  EXPECT_EQ(test.at("test/samples"), 67);
  EXPECT_EQ(lines.at(6).at("artifact"), (folder_ / "all_results.json").string());
  EXPECT_EQ(lines.at(7).at("status"), "FINISHED");
}

// Results exist only for a finished run. Without them --resume only runs the final test.
TEST_F(MonitoredRunTest, AFailedTestIsDoneAgainByAResumedRun) {
  EXPECT_EQ(
      train(config(), {.test_size = 67, .test_error = "test.csv:3: damaged"}, {}, 1).back().at("status"),
      "FAILED");
  EXPECT_FALSE(fs::exists(folder_ / "all_results.json"));
  EXPECT_TRUE(fs::exists(folder_ / "model.safetensors")) << "the model does not depend on the test";
  TrainerStart start;
  start.resume = true;
  EXPECT_EQ(train(config(), {.test_size = 67}, start, 1).back().at("status"), "FINISHED");
  json results;
  std::ifstream(folder_ / "all_results.json") >> results;
  EXPECT_EQ(results.at("test_samples"), 67);
  EXPECT_EQ(results.at("eval_samples"), 101);
}

TEST_F(MonitoredRunTest, AnInterruptedRunIsKilledAndGoesOn) {
  int64_t num_asked = 0;
  TrainerStart start;
  start.stop = [&] { return ++num_asked == 3; };
  std::vector<json> lines = train(config(), {}, start, 1);
  EXPECT_EQ(lines.back().at("status"), "KILLED");
  start = {};
  start.resume = true;
  lines = train(config(), {}, start, 1);
  EXPECT_EQ(lines.back().at("status"), "FINISHED");
  std::vector<int64_t> steps;
  for (const json& line : lines)
    if (line.contains("scalars") && line["scalars"].contains("train/loss")) steps.push_back(line["step"]);
  EXPECT_THAT(steps, ElementsAre(2, 4, 6));
  const size_t num_lines = lines.size();
  EXPECT_EQ(train(config(), {}, start, 1).size(), num_lines)
      << "a finished run that is resumed sends nothing";
}

TEST_F(MonitoredRunTest, ARunThatAnErrorEndsHasFailed) {
  const std::vector<json> lines = train(config(), {.greedy_from_step = 3});
  EXPECT_EQ(lines.back().at("status"), "FAILED");
}

TEST_F(MonitoredRunTest, AMonitorThatCannotBeOpenedStopsNothing) {
  json config = this->config();
  config["csv_monitor"] = {{"enabled", true}, {"output_path", (folder_ / "config.json").string()}};  // a file
  EXPECT_EQ(train(config).back().at("status"), "FINISHED");
}

}  // namespace
}  // namespace tessera::train
