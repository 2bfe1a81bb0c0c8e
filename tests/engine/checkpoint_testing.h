// Engines to save and load: a model with tied, frozen, unused and normalised layers, dropout and buffers.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/str.h"
#include "engine/checkpointing.h"
#include "tests/support/losses.h"

namespace tessera::testing {

struct SavedNetImpl : torch::nn::Module {
  explicit SavedNetImpl(double dropout = 0) : dropout(dropout) {
    table = register_module("table", torch::nn::Embedding(19, 9));
    frozen = register_module("frozen", torch::nn::Linear(9, 9));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    middle = register_module("middle", torch::nn::Linear(9, 9));
    norm = register_module("norm", torch::nn::BatchNorm1d(9));
    sometimes = register_module("sometimes", torch::nn::Linear(9, 9));
    unused = register_module("unused", torch::nn::Linear(5, 31));
    decoder_weight = register_parameter("decoder_weight", table->weight);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target, bool with_sometimes) {
    at::Tensor h = frozen->forward(table->forward(tokens)).mean(1);
    h = norm->forward(at::dropout(at::tanh(middle->forward(h)), dropout, is_training()));
    if (with_sometimes) h = h + sometimes->forward(h);
    return at::cross_entropy_loss(at::matmul(h, decoder_weight.t()), target);
  }
  double dropout;
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear frozen{nullptr}, middle{nullptr}, sometimes{nullptr}, unused{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor decoder_weight;
};
TORCH_MODULE(SavedNet);

/// What a rank trains on at a step: samples of its own, the parameter `sometimes` at odd steps only.
inline at::Tensor saved_net_loss(SavedNetImpl& model, int64_t step, int rank) {
  const uint64_t seed = 1000 * (rank + 1) + step;
  return model.forward(randint(19, {4, 6}, seed), randint(19, {4}, seed + 500), step % 2 == 1);
}

/// Everything training goes on from, whole, on every rank. Collective.
inline Tensors whole_state(Engine& engine) {
  zero::ShardedModel& model = engine.sharded_model();
  const zero::Layout& layout = model.layout();
  Tensors all;
  for (const auto& spec : layout.parameters()) all[spec.name] = engine.full_parameter(spec.name);
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    const zero::ShardedModel::Held mine = model.shard_of(unit);
    for (size_t i = 0; i < mine.states.size(); ++i) {
      const at::Tensor whole = at::empty({layout.units()[unit].numel});
      engine.comm().all_gather(whole, mine.states[i].contiguous(), "test state")->wait();
      for (int parameter : layout.units()[unit].parameters) {
        const zero::Slot& slot = layout.slot(parameter);
        all[str(layout.parameters()[parameter].name, " ", model.optimizer().state_names()[i])] =
            whole.narrow(0, slot.offset, slot.numel).clone();
      }
    }
  }
  for (int parameter = 0; parameter < static_cast<int>(layout.parameters().size()); ++parameter)
    all[layout.parameters()[parameter].name + " steps"] = at::full({1}, model.optimizer().steps(parameter));
  return all;
}

inline Tensors buffers_of(Engine& engine) {
  Tensors all;
  for (const auto& buffer : engine.sharded_model().buffers()) all[buffer.name] = buffer.tensor.clone();
  return all;
}

/// A folder for one test, removed with it.
class TestFolder {
 public:
  explicit TestFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / str("tessera_", name, "_", ::getpid())) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string string() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::testing
