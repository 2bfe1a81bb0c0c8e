// BlobsTask: a small task for tests. Classifies points around four centres in the plane by a tiny
// network with batch norm (which has buffers).
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "train/report/classification.h"
#include "train/run/run_directory.h"
#include "train/task/registry.h"
#include "train/task/sampler.h"
#include "train/task/task.h"

namespace tessera::train {

struct BlobsMlpImpl : torch::nn::Module {
  explicit BlobsMlpImpl(int64_t hidden, bool with_norm = true)
      : first(register_module("first", torch::nn::Linear(2, hidden))),
        second(register_module("second", torch::nn::Linear(hidden, 4))) {
    if (with_norm) norm = register_module("norm", torch::nn::BatchNorm1d(hidden));
  }
  at::Tensor forward(at::Tensor x) {
    x = first(x);
    return second(at::relu(norm ? norm(x) : x));
  }

  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear second;
};
TORCH_MODULE(BlobsMlp);

struct BlobsOptions {
  int64_t hidden = 16;
  int64_t train_size = 512;
  int64_t eval_size = 101;
  int64_t test_size = 0;
  double nan_from_step =
      std::numeric_limits<double>::infinity();  ///< the loss is NaN from this micro-step on
  int64_t greedy_from_step = std::numeric_limits<int64_t>::max();  ///< from this micro-step on the loss
                                                                   ///< allocates too much memory
  double test_delay_s = 0;                                         ///< duration of test_batch()
  std::string test_error = {};  ///< what test_batch() throws for record 3, which is none of those compared at
                                ///< the start; empty: nothing
  bool norm = true;  ///< without batch norm a sample's gradient does not depend on the others of its batch
  double noise = 0;  ///< of training points, different at each use
  int64_t broken_record = -1;  ///< training sample that cannot be read
  std::function<void(at::Tensor& x, at::Tensor& y)> change_training = {}, change_evaluation = {},
                                                    change_test = {};  ///< of the sets
  std::string samples_error =
      {};  ///< what write_samples() throws on rank 0; empty: it writes the step's number
};

class BlobsTask final : public Task {
 public:
  explicit BlobsTask(const BlobsOptions& options) : options_(options) {
    std::tie(train_x_, train_y_) = points(options.train_size, 1);
    std::tie(eval_x_, eval_y_) = points(options.eval_size, 2);
    std::tie(test_x_, test_y_) = points(options.test_size, 3);
    if (options.change_training) options.change_training(train_x_, train_y_);
    if (options.change_evaluation) options.change_evaluation(eval_x_, eval_y_);
    if (options.change_test) options.change_test(test_x_, test_y_);
  }

  std::string_view name() const override { return "blobs"; }
  int64_t train_size() const override { return options_.train_size; }
  int64_t eval_size() const override { return options_.eval_size; }
  int64_t test_size() const override { return options_.test_size; }

  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& init) override {
    BlobsMlp model(options_.hidden, options_.norm);
    fill(*model, static_cast<uint64_t>(config.seed));
    engine_ = tessera::initialize(model, config, std::move(comm), init);
    return *engine_;
  }
  Batch train_batch(const std::vector<int64_t>& indices, at::Generator generator) const override {
    for (const int64_t index : indices)
      if (index == options_.broken_record)
        throw DataError("blobs: record " + std::to_string(index) + " is broken");
    Batch batch = rows(train_x_, train_y_, indices);
    if (options_.noise > 0)
      batch.inputs[0] = batch.inputs[0] +
                        options_.noise * at::randn(batch.inputs[0].sizes(), generator, at::TensorOptions());
    batch.inputs.push_back(at::tensor(indices, at::kLong));  // for seen()
    return batch;
  }
  Batch eval_batch(const std::vector<int64_t>& indices) const override {
    return rows(eval_x_, eval_y_, indices);
  }
  Batch test_batch(const std::vector<int64_t>& indices) const override {
    if (!options_.test_error.empty() && std::find(indices.begin(), indices.end(), 3) != indices.end())
      throw DataError(options_.test_error);
    std::this_thread::sleep_for(std::chrono::duration<double>(options_.test_delay_s));
    return rows(test_x_, test_y_, indices);
  }

  at::Tensor loss(const Batch& batch) override {
    const at::Tensor& numbers = batch.inputs[1];
    seen_.insert(seen_.end(), numbers.const_data_ptr<int64_t>(),
                 numbers.const_data_ptr<int64_t>() + numbers.numel());
    seen_points_.push_back(batch.inputs[0]);
    const at::Tensor loss =
        at::cross_entropy_loss(engine_->forward(batch.inputs[0]).to(at::kFloat), batch.target);
    if (num_losses_ >= options_.greedy_from_step) {
      const at::Tensor activation = at::zeros({3'000'000}, at::kByte);
      at::empty({int64_t{1} << 50}, at::kByte);
    }
    return static_cast<double>(num_losses_++) >= options_.nan_from_step
               ? loss * std::numeric_limits<float>::quiet_NaN()
               : loss;
  }
  at::Tensor statistics(const Batch& batch) override {
    num_evaluated_rows_ += batch.target.size(0);
    return classification_statistics(engine_->forward(batch.inputs[0]), batch.target, batch.mask);
  }
  std::vector<std::string> metric_names() const override { return {"accuracy", "loss"}; }
  Metrics metrics(const at::Tensor& total) const override { return classification_metrics(total); }
  std::string report(const at::Tensor& total) const override {
    return options_.test_size > 0 ? "report of " + std::to_string(total[0].item<int64_t>()) : "";
  }
  std::vector<std::pair<std::string, std::string>> files() const override {
    if (options_.test_size == 0) return {};
    return {{"classes.txt", "four"}};
  }

  std::vector<SampleFile> write_samples(const std::filesystem::path& folder, int64_t step) override {
    engine_->forward(train_x_.narrow(0, 0, 1));  // a collective at stage 3
    if (engine_->rank() != 0) return {};
    if (!options_.samples_error.empty()) throw DataError(options_.samples_error);
    const std::filesystem::path path = sample_path(folder, step, ".txt");
    std::ofstream(path) << "samples";
    return {{"words", path}};
  }

  const std::vector<int64_t>& seen() const { return seen_; }  ///< training samples of this rank, in order
  at::Tensor seen_points() const {
    return seen_points_.empty() ? at::empty({0, 2}) : at::cat(seen_points_);
  }  ///< these samples after augmentation, (N, 2)
  int64_t num_evaluated_rows() const { return num_evaluated_rows_; }
  TypedEngine<BlobsMlpImpl>& engine() { return *engine_; }

  // The values depend on the seed only. Ranks that are threads would share torch's generator.
  static void fill(torch::nn::Module& model, uint64_t seed) {
    const at::NoGradGuard no_grad;
    for (auto& item : model.named_parameters()) {
      at::Tensor& parameter = item.value();
      if (parameter.dim() == 2) {
        const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(++seed);
        parameter.copy_(at::randn(parameter.sizes(), generator, at::TensorOptions()) * 0.5);
      } else if (item.key() != "norm.weight") {
        parameter.zero_();
      }
    }
  }

 private:
  // Points and their classes, without torch's generator for the same reason.
  static std::pair<at::Tensor, at::Tensor> points(int64_t count, uint64_t seed) {
    const std::vector<int64_t> noise = shuffled_indices(2 * count, seed, 0);
    at::Tensor x = at::empty({count, 2});
    at::Tensor y = at::empty({count}, at::kLong);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t label = i % 4;
      const auto offset = [&](int64_t axis) {
        return static_cast<double>(noise[static_cast<size_t>(2 * i + axis)]) /
                   static_cast<double>(2 * count) -
               0.5;
      };
      x[i][0] = (label % 2 == 0 ? 1.0 : -1.0) + offset(0);
      x[i][1] = (label / 2 == 0 ? 1.0 : -1.0) + offset(1);
      y[i] = label;
    }
    return {x, y};
  }

  static Batch rows(const at::Tensor& x, const at::Tensor& y, const std::vector<int64_t>& indices) {
    const at::Tensor rows = at::tensor(indices, at::kLong);
    Batch batch;
    batch.inputs = {x.index_select(0, rows)};
    batch.target = y.index_select(0, rows);
    return batch;
  }

  BlobsOptions options_;
  at::Tensor train_x_, train_y_, eval_x_, eval_y_, test_x_, test_y_;  // (N, 2) fp32, (N) int64
  std::vector<int64_t> seen_;
  std::vector<at::Tensor> seen_points_;
  int64_t num_losses_ = 0;
  int64_t num_evaluated_rows_ = 0;
  std::unique_ptr<TypedEngine<BlobsMlpImpl>> engine_;
};

inline void register_blobs(Registry& registry) {
  registry.add("blobs", "mlp",
               [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
                 BlobsOptions options;
                 options.hidden = model.integer("hidden", options.hidden, 1, 1024);
                 options.train_size = data.integer("train_size", options.train_size, 1, 1'000'000);
                 options.eval_size = data.integer("eval_size", options.eval_size, 0, 1'000'000);
                 model.finish();
                 data.finish();
                 return std::make_unique<BlobsTask>(options);
               });
}

}  // namespace tessera::train
