// Fixture for tests of whole runs: a Trainer on ranks that are threads, with its output and its samples.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"
#include "tests/train/blobs_task.h"
#include "train/trainer.h"

namespace tessera::train {

using nlohmann::json;
namespace fs = std::filesystem;

inline std::vector<json> json_lines(const fs::path& path) {
  std::vector<json> records;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) records.push_back(json::parse(line));
  return records;
}

class TrainerTest : public ::testing::Test {
 protected:
  // 48 samples per step, 10 steps per epoch.
  json base_config(int stage = 2) const {
    return {{"model", {{"type", "mlp"}}},
            {"data", {{"type", "blobs"}}},
            {"trainer",
             {{"epochs", 3}, {"output_dir", folder_.string()}, {"device", "cpu"}, {"eval_batch_size", 16}}},
            {"train_batch_size", 48},
            {"gradient_accumulation_steps", 2},
            {"steps_per_print", 4},
            {"checkpoint", {{"fsync", false}}},
            {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
            {"zero_optimization", {{"stage", stage}}}};
  }

  struct Result {
    Summary summary;
    std::vector<std::vector<int64_t>> seen;  // by rank
    std::string output;
    std::string log;
  };

  Result train(const json& config, int world_size, const BlobsOptions& options = {}, bool is_terminal = false,
               const TrainerStart& start = {}) const {
    Result result;
    result.seen.resize(static_cast<size_t>(world_size));
    std::ostringstream out;
    fs::create_directories(folder_.parent_path());
    const fs::path log = folder_.parent_path() / "log";
    fs::remove(log);
    const Logger logger(LogOptions{.terminal = false, .file = log.string()});
    const Display display{.out = &out, .is_terminal = is_terminal, .width = [] { return 120; }, .now_s = {}};
    comm::JoinOptions comm_options;
    comm_options.timeout = std::chrono::seconds(60);
    comm::run_threads(world_size, comm_options, [&](comm::CommunicatorPtr comm) {
      BlobsTask task(options);
      Trainer trainer(parse_run_config(config.dump(), "blobs.json", world_size), task, comm, {},
                      {display, logger}, start);
      const Summary summary = trainer.run();
      if (comm->rank() == 0) result.summary = summary;
      result.seen[static_cast<size_t>(comm->rank())] = task.seen();
    });
    result.output = out.str();
    result.log = read_text(log);
    return result;
  }

  Result resume(const json& config, int world_size, const BlobsOptions& options = {}) const {
    return train(config, world_size, options, false, {.resume = true, .init = {}, .stop = {}});
  }

  /// A number of the run's results.
  double result(const char* name) const {
    return json::parse(read_text(folder_ / "all_results.json")).at(name).get<double>();
  }

  /// The loss of the run's last evaluation of the validation set.
  double last_eval_loss() const {
    double last = 0;
    for (const json& record : json_lines(folder_ / "metrics.jsonl"))
      if (record.contains("eval_loss")) last = record.at("eval_loss");
    return last;
  }

  std::string error_of(const json& config, int world_size, const BlobsOptions& options = {}) const {
    return tessera::testing::error_of<ConfigError>([&] { train(config, world_size, options); });
  }

  const TemporaryFolder temporary_{"trainer"};
  const fs::path folder_ = temporary_.path() / "run";
};

}  // namespace tessera::train
