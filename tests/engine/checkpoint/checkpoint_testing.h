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

#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "tests/support/losses.h"

namespace tessera::testing {

struct SavedNetImpl : torch::nn::Module {
  explicit SavedNetImpl(double dropout = 0);
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target, bool with_sometimes);
  double dropout;
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear frozen{nullptr}, middle{nullptr}, sometimes{nullptr}, unused{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor decoder_weight;
};
TORCH_MODULE(SavedNet);

/// What a rank trains on at a step: samples of its own, the parameter `sometimes` at odd steps only.
at::Tensor saved_net_loss(SavedNetImpl& model, int64_t step, int rank);

/// Which model and engine to train.
struct Job {
  int world = 1, stage = 0;
  std::string optimizer = "AdamW";
  std::string precision = "fp32";
  int64_t unit_numel = 150;
  double dropout = 0;
  uint64_t seed = 1;
  CheckpointConfig checkpoint{.async = false, .keep_last = 0, .fsync = false};
  std::string offload_to = {};  ///< a folder: all state is on disk (parameters at stage 3)
  int mics_shard_size = -1, hpz_partition_size = 1;
  /// To a device whose memory is not the host's: state that is not on disk is in the host's memory.
  std::shared_ptr<comm::HostTransfer> transfer = nullptr;
  bool state_on_device = false;  ///< there all the same: only checkpoints are copied
};

/// A model and its engine on one rank.
struct Trained {
  Trained(const Job& setup, comm::CommunicatorPtr comm, Logger log = {});
  double step();

  SavedNet model;
  std::unique_ptr<Engine> engine;
};

/// Everything training goes on from, whole, on every rank. Collective.
Tensors whole_state(Engine& engine);

Tensors buffers_of(Engine& engine);

/// A folder for one test, removed with it.
class TestFolder {
 public:
  explicit TestFolder(const std::string& name) : folder_("tessera_" + name) {}
  std::string operator/(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string string() const { return folder_.path().string(); }

 private:
  TemporaryFolder folder_;
};

}  // namespace tessera::testing
