// Models trained with state below the device: settings of tiers, and what is compared between them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/files/temporary_folder.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {

constexpr Tiers kInMemoryTiers{};
constexpr Tiers kOptimizerOnHost{.optimizer = Tier::kHost};
constexpr Tiers kAllOnHost{.parameters = Tier::kHost, .optimizer = Tier::kHost};
constexpr Tiers kOptimizerOnDisk{.optimizer = Tier::kDisk};
constexpr Tiers kAllOnDisk{.parameters = Tier::kDisk, .optimizer = Tier::kDisk};
constexpr int kNumLayers = 6;

struct Setting {
  Tiers tiers = kInMemoryTiers;
  kernels::OptimizerKind optimizer = kernels::OptimizerKind::kAdamW;
  DType dtype = DType::kFloat32;
  int num_buffers = 13;
  std::shared_ptr<comm::HostTransfer> transfer = nullptr;
};

class OffloadTest : public ::testing::Test {
 protected:
  Change with(const Setting& setting) const {
    return [=, this](ShardedModelOptions& options) {
      options.tiers = setting.tiers;
      options.transfer = setting.transfer;
      options.offload = {.directory = folder_.path().string(), .num_buffers = setting.num_buffers};
      options.optimizer.kind = setting.optimizer;
      options.optimizer.groups = {kernels::Hyper{}};
      options.optimizer.groups[0].lr = 0.05;
      options.optimizer.groups[0].weight_decay = 0.1;
      options.optimizer.groups[0].momentum = 0.9;
      options.compute_dtype = setting.dtype;
      options.unit_numel = kLinearNumel;
      options.residency.persistence_numel = 0;
    };
  }

  TemporaryFolder folder_{"tessera_offload"};
};

/// Weights and last gradients after steps of two micro-steps; the last layer is used in some of them only,
/// and the rates change.
inline std::vector<at::Tensor> train(Chain& model, Rig& rig, int rank, int num_steps = 4) {
  std::vector<at::Tensor> found;
  for (int step = 0; step < num_steps; ++step) {
    rig.sharded->optimizer().groups()[0].lr = 0.05 / (step + 1);
    for (const bool last : {false, true}) {
      at::Tensor y =
          model->forward(batch(rank, 2 * step + (last ? 1 : 0)).to(model->layers[0]->weight.scalar_type()));
      if (step % 2 == 1) y = model->extra->forward(y);
      rig.backward(y.to(at::kFloat).square().sum(), !last, last);
    }
    const GradientSummary summary = rig.sharded->summarize_gradients();
    rig.sharded->step(0.5 / (1 + summary.norm));
    if (step == 1)
      for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
  }
  for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
  for (const at::Tensor& gradient : rig.gradients()) found.push_back(gradient);
  return found;
}

inline std::vector<at::Tensor> train_once(const comm::CommunicatorPtr& comm, int stage,
                                          const Change& change) {
  Chain model(kNumLayers);
  Rig rig(*model, comm, stage, change);
  return train(model, rig, comm->rank());
}

}  // namespace tessera::zero::testing
