// The training data of a Trainer: with workers, with the last samples of an epoch, and when resuming.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/train/blobs_task.h"
#include "train/run.h"

namespace tessera::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

struct Outcome {
  Summary summary;
  std::vector<std::vector<int64_t>> seen;  // by rank
  std::vector<at::Tensor> points;          // by rank
  std::map<std::string, at::Tensor> weights;
};

const TrainerStart kResumed{.resume = true, .init = {}, .stop = {}};

class TrainingData : public ::testing::Test {
 protected:
  json config(int64_t batch, int64_t accumulation, const json& trainer) const {
    json config = {{"model", {{"type", "mlp"}}},
                   {"data", {{"type", "blobs"}}},
                   {"trainer",
                    {{"output_dir", folder_.string()},
                     {"device", "cpu"},
                     {"eval_batch_size", 16},
                     {"save_every_epochs", 0}}},
                   {"train_batch_size", batch},
                   {"gradient_accumulation_steps", accumulation},
                   {"checkpoint", {{"fsync", false}}},
                   {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.1}}}}}};
    config["trainer"].update(trainer);
    return config;
  }

  Outcome train(const json& config, int world_size, const BlobsOptions& options,
                const TrainerStart& start = {}) const {
    Outcome outcome;
    outcome.seen.resize(static_cast<size_t>(world_size));
    outcome.points.resize(static_cast<size_t>(world_size));
    comm::run_threads(world_size, {.timeout = std::chrono::seconds(60)}, [&](comm::CommunicatorPtr comm) {
      at::set_num_threads(1);
      BlobsTask task(options);
      Trainer trainer(parse_run_config(config.dump(), "blobs.json", world_size), task, comm, {}, {}, start);
      const Summary summary = trainer.run();
      const auto rank = static_cast<size_t>(comm->rank());
      outcome.seen[rank] = task.seen();
      outcome.points[rank] = task.seen_points();
      for (const char* name : {"first.weight", "first.bias", "second.weight", "second.bias"}) {
        const at::Tensor weight = task.engine().full_parameter(name);
        if (rank == 0) outcome.weights[name] = weight.clone();
      }
      if (rank == 0) outcome.summary = summary;
    });
    return outcome;
  }

  const TemporaryFolder temporary_{"training_data"};
  const fs::path folder_ = temporary_.path() / "run";
};

TEST_F(TrainingData, WorkersChangeNothing) {
  std::vector<Outcome> outcomes;
  for (const int64_t num_workers : {0, 1, 3}) {
    outcomes.push_back(train(
        config(48, 2,
               {{"epochs", 2}, {"dataloader_num_workers", num_workers}, {"overwrite_output_dir", true}}),
        2, {.noise = 0.3}));
    const Outcome &first = outcomes.front(), &last = outcomes.back();
    EXPECT_EQ(last.summary.train_loss, first.summary.train_loss);
    EXPECT_EQ(last.summary.evaluation->metrics, first.summary.evaluation->metrics);
    for (size_t rank : {0, 1}) {
      EXPECT_EQ(last.seen[rank], first.seen[rank]);
      EXPECT_TRUE(at::equal(last.points[rank], first.points[rank])) << "augmentation";
    }
  }
  const Outcome& outcome = outcomes.front();
  const auto noise_of = [&](size_t rank, int64_t begin) {
    return outcome.points[rank].slice(0, begin, begin + 12);
  };
  EXPECT_FALSE(at::equal(noise_of(0, 0), noise_of(1, 0))) << "ranks draw different numbers";
}

TEST_F(TrainingData, ARunThatGoesOnDrawsTheSameAugmentation) {
  const json three = config(48, 2, {{"epochs", 2}, {"dataloader_num_workers", 3}}),
             none = config(48, 2, {{"epochs", 2}});
  const BlobsOptions options{.noise = 0.3};
  const Outcome whole = train(three, 2, options);
  for (const int64_t stop_at : {4, 10, 13}) {  // within an epoch, at its end, within the next
    fs::remove_all(folder_);
    std::atomic<int64_t> num_asked = 0;
    TrainerStart start;
    start.stop = [&] { return num_asked++ >= 2 * (stop_at - 1); };  // once a step by each of the two ranks
    const Outcome first = train(three, 2, options, start);
    EXPECT_EQ(first.summary.num_steps, stop_at);
    const Outcome rest = train(none, 2, options, kResumed);
    EXPECT_EQ(rest.summary.num_steps, 20);
    for (size_t rank : {0, 1})
      EXPECT_TRUE(at::equal(at::cat({first.points[rank], rest.points[rank]}), whole.points[rank]))
          << "stopped after step " << stop_at;
    for (const auto& [name, weight] : whole.weights)
      EXPECT_TRUE(at::equal(rest.weights.at(name), weight)) << name;
  }
}

/// Two epochs in plain libtorch: mean loss over the samples of each step.
struct Plain {
  double loss = 0;  // of a sample, on average
  std::map<std::string, at::Tensor> weights;
};
Plain plain_training(int64_t num_samples, int64_t batch) {
  const BlobsOptions options{.train_size = num_samples, .norm = false};
  const BlobsTask task(options);
  BlobsMlp model(options.hidden, options.norm);
  BlobsTask::fill(*model, 42);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  Plain plain;
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    const std::vector<int64_t> order = shuffled_indices(num_samples, 42, epoch);
    for (int64_t first = 0; first < num_samples; first += batch) {
      const int64_t size = std::min(batch, num_samples - first);
      const Batch samples = task.train_batch({order.begin() + first, order.begin() + first + size}, {});
      const at::Tensor loss = at::cross_entropy_loss(model->forward(samples.inputs[0]), samples.target);
      plain.loss += loss.item<double>() * static_cast<double>(size) / static_cast<double>(2 * num_samples);
      sgd.zero_grad();
      loss.backward();
      sgd.step();
    }
  }
  for (const auto& item : model->named_parameters()) plain.weights[item.key()] = item.value().detach();
  return plain;
}

TEST_F(TrainingData, TheRestOfAnEpochIsTrainedLikeInPyTorch) {
  // A rest of 2 for up to 6 slices, one of 11, and less than a batch altogether.
  for (const int64_t num_samples : {50, 59, 7}) {
    const Plain plain = plain_training(num_samples, 12);
    for (const int stage : {0, 3}) {
      for (const int world_size : {1, 3}) {
        SCOPED_TRACE(::testing::Message()
                     << num_samples << " samples, stage " << stage << ", " << world_size << " ranks");
        json run = config(12, 2, {{"epochs", 2}, {"overwrite_output_dir", true}});
        run["dataloader_drop_last"] = false;
        run["zero_optimization"]["stage"] = stage;
        const Outcome outcome = train(run, world_size, {.train_size = num_samples, .norm = false});
        EXPECT_EQ(outcome.summary.num_steps, 2 * ((num_samples + 11) / 12));
        EXPECT_EQ(outcome.summary.num_samples, 2 * num_samples);
        EXPECT_NEAR(outcome.summary.train_loss, plain.loss, 1e-6);
        for (const auto& [name, weight] : plain.weights)
          EXPECT_LT((outcome.weights.at(name) - weight).abs().max().item<double>(), 2e-6) << name;
        std::multiset<int64_t> seen;
        for (const auto& rank : outcome.seen) seen.insert(rank.begin(), rank.end());
        for (int64_t i = 0; i < num_samples; ++i) EXPECT_GE(seen.count(i), 2u) << "sample " << i;
      }
    }
  }
}

TEST_F(TrainingData, AnotherBatchSizeOnResumingLeavesNoSampleOut) {
  const BlobsOptions options{.train_size = 50, .norm = false};
  int64_t num_asked = 0;
  TrainerStart start;
  start.stop = [&] { return ++num_asked == 2; };
  const json data = {{"max_steps", 9}, {"dataloader_drop_last", false}, {"dataloader_num_workers", 2}};
  std::vector<int64_t> seen = train(config(12, 1, data), 1, options, start).seen[0];
  EXPECT_EQ(seen.size(), 24u);
  json shorter = data;
  shorter["max_steps"] = 7;  // 20 and 6 samples more of this epoch, then 20, 20 and 10
  const Outcome rest = train(config(20, 1, shorter), 1, options, kResumed);
  seen.insert(seen.end(), rest.seen[0].begin(), rest.seen[0].end());
  std::vector<int64_t> expected = shuffled_indices(50, 42, 0);
  const std::vector<int64_t> second = shuffled_indices(50, 42, 1);
  expected.insert(expected.end(), second.begin(), second.end());
  EXPECT_EQ(seen, expected);
}

// The number of epochs stays the same, and the schedule ends with them.
TEST_F(TrainingData, AnotherBatchSizeOnResumingCountsEpochsOfData) {
  for (const int64_t batch : {5, 24}) {
    for (const int64_t stop_at : {3, 5, 7}) {  // of 2 x 5 steps
      SCOPED_TRACE(::testing::Message() << "batch " << batch << " after step " << stop_at);
      fs::remove_all(folder_);
      int64_t num_asked = 0;
      TrainerStart start;
      start.stop = [&] { return ++num_asked == stop_at; };
      json run = config(12, 1, {{"epochs", 2}, {"dataloader_drop_last", false}, {"save_every_epochs", 1}});
      run["scheduler"] = {{"type", "WarmupDecayLR"},
                          {"params", {{"warmup_num_steps", 2}, {"warmup_max_lr", 0.1}}}};
      const BlobsOptions options{.train_size = 50, .norm = false};
      std::vector<int64_t> seen = train(run, 1, options, start).seen[0];
      run["train_batch_size"] = batch;
      const Outcome rest = train(run, 1, options, kResumed);
      seen.insert(seen.end(), rest.seen[0].begin(), rest.seen[0].end());
      std::sort(seen.begin(), seen.end());
      ASSERT_EQ(seen.size(), 100u);
      for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(seen[static_cast<size_t>(i)], i / 2);
      EXPECT_EQ(rest.summary.num_epochs, 2);
      const auto left = [&](int64_t samples) { return (samples + batch - 1) / batch; };
      EXPECT_EQ(rest.summary.num_steps,
                stop_at + (stop_at > 5 ? left(50 - 12 * (stop_at - 5))
                                       : left(std::max<int64_t>(50 - 12 * stop_at, 0)) + left(50)));
      const json written = json::parse(std::ifstream(folder_ / "config.json"));
      EXPECT_EQ(written.at("scheduler").at("params").at("total_num_steps"), rest.summary.num_steps);
      EXPECT_TRUE(train(run, 1, options, kResumed).summary.was_finished);
    }
  }
}

TEST_F(TrainingData, AnotherBatchSizeOnResumingEvaluatesAtTheEndsOfEpochs) {
  TrainerStart start;
  int64_t num_asked = 0;
  start.stop = [&] { return ++num_asked == 5; };
  json run = config(12, 1, {{"epochs", 3}});  // 4 steps an epoch
  const BlobsOptions options{.train_size = 50, .norm = false};
  train(run, 1, options, start);
  run["train_batch_size"] = 6;  // 38 samples left: 6 steps, then 8 an epoch
  const Outcome rest = train(run, 1, options, kResumed);
  EXPECT_EQ(rest.summary.num_steps, 5 + 6 + 8);
  std::vector<int64_t> evaluations;
  std::ifstream file(folder_ / "metrics.jsonl");
  for (std::string line; std::getline(file, line);)
    if (const json record = json::parse(line); record.contains("eval_loss"))
      evaluations.push_back(record.at("step"));
  EXPECT_EQ(evaluations, (std::vector<int64_t>{4, 11, 19}));
}

TEST_F(TrainingData, ARecordThatCannotBeReadEndsTheRunWhereItIsNeeded) {
  const std::vector<int64_t> order = shuffled_indices(60, 42, 0);
  for (const int64_t num_workers : {0, 2}) {
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      BlobsTask task({.train_size = 60, .broken_record = order[40]});  // in the fourth batch
      const json run =
          config(12, 1, {{"dataloader_num_workers", num_workers}, {"overwrite_output_dir", true}});
      Trainer trainer(parse_run_config(run.dump(), "blobs.json", 1), task, comm, {}, {}, {});
      try {
        trainer.run();
        ADD_FAILURE() << "trained on it";
      } catch (const DataError& error) {
        EXPECT_EQ(error.what(), "blobs: record " + std::to_string(order[40]) + " is broken");
      }
      EXPECT_EQ(task.seen().size(), 36u) << "three batches before it";
    });
  }
}

}  // namespace
}  // namespace tessera::train
