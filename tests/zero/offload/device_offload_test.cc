// State below a device: the same bits as on the device; and where its memory is not the host's, which copies
// there are and in which order, and memory that is not used while a copy has it. Such a device is host memory
// (host_only_transfer.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "core/async_io/spill_file_internal.h"
#include "tests/comm/memory/host_only_transfer.h"
#include "tests/zero/offload/offload_testing.h"

namespace tessera::zero::testing {
namespace {

using kernels::OptimizerKind;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Mode = comm::testing::HostOnlyTransfer::Mode;
using Direction = comm::testing::HostOnlyTransfer::Direction;

/// Unset: the device is the host, so the disk alone is below it.
using Device = std::optional<Mode>;

class EveryDevice : public OffloadTest, public ::testing::WithParamInterface<Device> {
 protected:
  Setting on_device(Tiers tiers) const {
    if (!GetParam()) return {.tiers = tiers};
    return {.tiers = tiers, .transfer = std::make_shared<comm::testing::HostOnlyTransfer>(*GetParam())};
  }
  std::vector<Tiers> tiers_at(int stage) const {
    std::vector<Tiers> all = {kOptimizerOnDisk};
    if (stage == 3) all.push_back(kAllOnDisk);
    if (!GetParam()) {
      if (stage == 3) all.push_back({.parameters = Tier::kDisk});
      return all;
    }
    all.push_back(kOptimizerOnHost);
    if (stage == 3)
      all.insert(all.end(), {kAllOnHost,
                             {.parameters = Tier::kHost, .optimizer = Tier::kDisk},
                             {.parameters = Tier::kDisk, .optimizer = Tier::kHost}});
    return all;
  }
  static comm::testing::HostOnlyTransfer& transfer_of(const Setting& setting) {
    return static_cast<comm::testing::HostOnlyTransfer&>(*setting.transfer);
  }
  static void expect_no_violations(const Setting& setting) {
    if (setting.transfer) {
      EXPECT_THAT(transfer_of(setting).violations(), IsEmpty());
    }
  }
};
class DeviceOffloadTest : public EveryDevice {};

TEST_P(EveryDevice, TheSameBitsAsOnTheDevice) {
  for (int world = 1; world <= 3; ++world)
    for (int stage = 1; stage <= 3; ++stage)
      for (const OptimizerKind kind :
           {OptimizerKind::kAdamW, OptimizerKind::kSGD, OptimizerKind::kLamb, OptimizerKind::kMuon})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
          // Every optimizer where copies are the last to come; everywhere one, in a type.
          const bool all = (!GetParam() || GetParam() == Mode::kLast) && world == 2;
          if (!all && (kind != OptimizerKind::kAdamW || (world == 3) != (dtype == DType::kFloat32))) continue;
          run_ranks(world, [&](comm::CommunicatorPtr comm) {
            const auto expected = train_once(comm, stage, with({.optimizer = kind, .dtype = dtype}));
            for (const Tiers& tiers : tiers_at(stage)) {
              Setting setting = on_device(tiers);
              setting.optimizer = kind;
              setting.dtype = dtype;
              EXPECT_TRUE(same_bits(train_once(comm, stage, with(setting)), expected))
                  << "world " << world << " stage " << stage << " optimizer " << static_cast<int>(kind)
                  << " parameters " << static_cast<int>(tiers.parameters) << " states "
                  << static_cast<int>(tiers.optimizer);
              expect_no_violations(setting);
            }
          });
        }
}

TEST_P(EveryDevice, SkippedStepsAndGradientsOfAnotherType) {
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    for (int stage = 1; stage <= 3; ++stage) {
      const auto run = [&](const Setting& setting) {
        Chain model(kNumLayers);
        Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
          with(setting)(options);
          options.reducer.accumulate_dtype = at::kFloat;
          options.reducer.communicate_dtype = at::kBFloat16;
        });
        std::vector<at::Tensor> found;
        for (int step = 0; step < 5; ++step) {
          for (const bool last : {false, true})
            rig.backward(model->forward(batch(comm->rank(), 2 * step + (last ? 1 : 0))).sum(), !last, last);
          const GradientSummary summary = rig.sharded->summarize_gradients();
          found.push_back(at::full({1}, summary.norm, at::kDouble));
          step % 2 == 1 ? rig.sharded->skip_step() : rig.sharded->step(0.5 / (1 + summary.norm));
        }
        for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
        return found;
      };
      const auto expected = run({});
      for (const Tiers& tiers : tiers_at(stage)) {
        const Setting setting = on_device(tiers);
        EXPECT_TRUE(same_bits(run(setting), expected)) << "stage " << stage;
        expect_no_violations(setting);
      }
    }
  });
}

TEST_P(DeviceOffloadTest, ANonFiniteGradientIsFoundAndNamed) {
  for (int stage = 1; stage <= 3; ++stage) {
    Chain model(kNumLayers);
    Rig rig(*model, alone(), stage, with(on_device(kOptimizerOnHost)));
    const at::Tensor poison = at::ones({kWidth});
    poison[2] = INFINITY;
    at::Tensor y = batch(0, 0);
    for (int layer = 0; layer < kNumLayers; ++layer)
      y = model->layers[layer]->forward(layer == 2 ? y * poison : y);
    rig.backward(y.sum());
    const GradientSummary summary = rig.sharded->summarize_gradients();
    EXPECT_GT(summary.num_nonfinite, 0);
    EXPECT_NE(summary.first_nonfinite, "") << "stage " << stage;
    rig.sharded->skip_step();
    rig.step(model->forward(batch(0, 1)).sum());
    for (const at::Tensor& weight : rig.weights()) EXPECT_TRUE(at::isfinite(weight).all().item<bool>());
  }
}

TEST_P(EveryDevice, EvaluationAndWritesAfterAStep) {
  for (int stage = 1; stage <= 3; ++stage)
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      const auto run = [&](const Setting& setting) {
        Chain model(kNumLayers);
        Rig rig(*model, comm, stage, with(setting));
        rig.step(model->forward(batch(comm->rank(), 0)).sum());
        rig.sharded->eval();
        std::vector<at::Tensor> found;
        {
          const at::NoGradGuard no_grad;
          rig.sharded->begin_forward();
          found.push_back(model->forward(batch(comm->rank(), 1)).clone());
          rig.sharded->end_forward();
        }
        rig.sharded->train();
        rig.step(model->forward(batch(comm->rank(), 2)).sum());
        {
          GatheredParameters gathered(*rig.sharded, {"fc1.weight"}, /*modifier_rank=*/0);
          const at::NoGradGuard no_grad;
          if (comm->rank() == 0) model->layers[1]->weight.fill_(0.25);
        }
        found.push_back(rig.sharded->full_parameter("fc1.weight"));
        rig.sharded->begin_replacing("the test");
        for (int unit = 0; unit < rig.sharded->layout().num_units(); ++unit) {
          ParamUnit& replaced = rig.sharded->unit(unit);
          const InMemory in_memory(replaced, replaced.local_state().weights, InMemory::Access::kReadWrite);
          replaced.local_state().weights.mul_(0.5);
        }
        rig.sharded->end_replacing();
        rig.step(model->forward(batch(comm->rank(), 3)).sum());
        for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
        return found;
      };
      const auto expected = run({});
      EXPECT_TRUE(expected[1].eq(0.25).all().item<bool>());
      for (const Tiers& tiers : tiers_at(stage)) {
        const Setting setting = on_device(tiers);
        EXPECT_TRUE(same_bits(run(setting), expected)) << "stage " << stage;
        expect_no_violations(setting);
      }
    });
}

TEST_P(DeviceOffloadTest, BytesLieWhereTheFormulaSays) {
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    for (int stage = 1; stage <= 3; ++stage)
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
        for (const Tiers& tiers : tiers_at(stage)) {
          Setting setting = on_device(tiers);
          setting.dtype = dtype;
          Chain model(kNumLayers);
          Rig rig(*model, comm, stage, with(setting));
          train(model, rig, comm->rank(), 1);
          const ShardedModel& sharded = *rig.sharded;
          int64_t shards = 0, whole = 0;
          for (int unit = 0; unit < sharded.layout().num_units(); ++unit) {
            shards += sharded.layout().shard_numel(unit);
            whole += sharded.layout().units()[unit].numel;
          }
          for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kDisk}) {
            const StateBytes found = sharded.measured_bytes(tier);
            EXPECT_EQ(found, sharded.formula_bytes(false, tier));
            EXPECT_EQ(found.optimizer, tiers.optimizer == tier ? 8 * shards : 0);
            // fp32 masters lie beside the values, unless both are below the device.
            const bool own_master = dtype != DType::kFloat32 || tiers.parameters == Tier::kDevice;
            EXPECT_EQ(found.master, tiers.optimizer == tier && own_master ? 4 * shards : 0);
            const Tier gradients = stage == 1 ? Tier::kDevice : tiers.optimizer;
            EXPECT_EQ(found.gradients, gradients == tier ? 4 * (stage == 1 ? whole : shards) : 0);
          }
          if (tiers.any_on_disk()) continue;
          // What is in the host's memory for longer, and buffers that state passes through: at most four.
          const int64_t held = sharded.measured_bytes(Tier::kHost).total();
          EXPECT_GE(setting.transfer->pinned_bytes(), held);
          EXPECT_LE(setting.transfer->pinned_bytes(), held + 4 * 4 * 2 * kLinearNumel);
        }
  });
}

/// Copies of a step of `num_micro_steps`, once the order is known.
std::vector<comm::testing::HostOnlyTransfer::Copy> copies_of_a_step(Chain& model, Rig& rig,
                                                                    comm::testing::HostOnlyTransfer& transfer,
                                                                    int num_micro_steps) {
  for (int step = 0; step < 3; ++step) {
    if (step == 2) {
      rig.sharded->finish_updates();
      transfer.forget_copies();
    }
    for (int micro_step = 0; micro_step < num_micro_steps; ++micro_step)
      rig.backward(model->forward(batch(0, micro_step)).sum(), micro_step == 0,
                   micro_step + 1 == num_micro_steps);
    rig.update();
  }
  rig.sharded->finish_updates();
  return transfer.copies();
}

TEST_P(DeviceOffloadTest, AStepMovesEachShardOnceAndInTheOrderOfUse) {
  for (int stage = 1; stage <= 3; ++stage) {
    const Setting setting = on_device(kOptimizerOnHost);
    Chain model(kNumLayers);
    Rig rig(*model, alone(), stage, with(setting));
    constexpr int kMicroSteps = 3;
    const auto copies = copies_of_a_step(model, rig, transfer_of(setting), kMicroSteps);
    std::vector<int> down, up;  // units
    int fetched = 0;
    for (const comm::testing::HostOnlyTransfer::Copy& copy : copies) {
      if (copy.direction == Direction::kDown) {
        // Gradients: their accumulator on the host, or on the device at stage 1, says whose.
        for (int unit = 0; unit < rig.sharded->layout().num_units(); ++unit) {
          const at::Tensor& accumulator = rig.sharded->unit(unit).gradient.accumulator;
          if (accumulator.const_data_ptr() == (stage == 1 ? copy.device : copy.host)) down.push_back(unit);
        }
        continue;
      }
      bool is_value = false;
      for (int unit = 0; unit < rig.sharded->layout().num_units(); ++unit) {
        if (rig.sharded->unit(unit).master.const_data_ptr() != copy.host) continue;
        up.push_back(unit);
        is_value = true;
      }
      if (!is_value) ++fetched;
    }
    const int num_units = rig.sharded->layout().num_units();
    std::vector<int> forward, backward;
    for (int unit = 0; unit < num_units; ++unit) forward.push_back(unit);
    for (const int unit : rig.sharded->order().reductions.units()) backward.push_back(unit);
    if (stage == 1) {  // the whole unit accumulates on the device
      EXPECT_EQ(down, forward);
      EXPECT_EQ(fetched, 0);
    } else {
      std::vector<int> expected;
      for (int micro_step = 0; micro_step < kMicroSteps; ++micro_step)
        expected.insert(expected.end(), backward.begin(), backward.end());
      EXPECT_EQ(down, expected);
      EXPECT_EQ(fetched, (kMicroSteps - 1) * num_units) << "to be added to";
    }
    // `extra` has no gradient, and is not updated.
    const int extra = rig.sharded->layout().slice(rig.sharded->layout().find("extra.weight")).unit;
    std::erase(forward, extra);
    EXPECT_EQ(up, forward) << "stage " << stage;
    EXPECT_THAT(transfer_of(setting).violations(), IsEmpty());
  }
}

TEST_P(DeviceOffloadTest, ShardsOnTheHostTravelUpForEachGather) {
  const Setting setting = on_device(kAllOnHost);
  Chain model(kNumLayers);
  Rig rig(*model, alone(), 3, with(setting));
  const auto copies = copies_of_a_step(model, rig, transfer_of(setting), 1);
  int gathers = 0;
  for (const comm::testing::HostOnlyTransfer::Copy& copy : copies)
    for (int unit = 0; unit < rig.sharded->layout().num_units(); ++unit)
      if (copy.direction == Direction::kUp && rig.sharded->unit(unit).shard.const_data_ptr() == copy.host)
        ++gathers;
  int counted = 0;
  for (const int unit : rig.residency().previous_counts().gathers) counted += unit;
  EXPECT_GE(gathers, counted);
  EXPECT_GE(counted, kNumLayers);
  EXPECT_EQ(
      transfer_of(setting).bytes(Direction::kDown), 4 * [&] {
        int64_t numel = 0;
        for (int unit = 0; unit < rig.sharded->layout().num_units(); ++unit)
          numel += rig.sharded->layout().shard_numel(unit);
        return numel;
      }());
}

// What offloading would mean there: advice when memory runs out is computed from it.
TEST(HostApart, IsKnownWhereNothingIsOffloaded) {
  for (const bool apart : {false, true}) {
    Chain model(2);
    Rig rig(*model, alone(), 3, [&](ShardedModelOptions& options) {
      options.tiers.device_memory_is_separate = apart;
      if (apart) options.transfer = std::make_shared<comm::testing::HostOnlyTransfer>(Mode::kAtOnce);
    });
    EXPECT_EQ(rig.sharded->state_model().tiers.device_memory_is_separate, apart);
  }
}

TEST_P(DeviceOffloadTest, AFailureOnTheHostThreadIsTheCallersAndStays) {
  for (int at = 0; at < 52; at += 7) {  // of 13 copies a step
    const Setting setting = on_device(kOptimizerOnHost);
    Chain model(kNumLayers);
    Rig rig(*model, alone(), 1, with(setting));
    rig.step(model->forward(batch(0, 0)).sum());
    rig.sharded->finish_updates();
    transfer_of(setting).fail_at(at);
    const std::string error = error_of([&] {
      for (int step = 0; step < 4; ++step) {
        rig.step(model->forward(batch(0, step)).sum());
        rig.sharded->check_usable();
      }
      rig.sharded->finish_updates();
    });
    EXPECT_THAT(error, ::testing::StartsWith("the device has failed")) << at;
    EXPECT_NE(error_of([&] { rig.sharded->check_usable(); }), "") << at;
  }
}

TEST_P(DeviceOffloadTest, AFailingDiskBehindTheHostIsOneLine) {
  for (const char* kind : {"read", "write"})
    for (const int at : {0, 3, 12, 30}) {
      const Setting setting = on_device(kAllOnDisk);
      const ScopedSpillFileProbe probe(
          [=, count = std::make_shared<std::atomic<int>>(0)](std::string_view operation, int64_t, int64_t) {
            return operation == kind && count->fetch_add(1) == at ? EIO : 0;
          });
      Chain model(kNumLayers);
      std::optional<Rig> rig;
      const std::string error = error_of([&] {
        rig.emplace(*model, alone(), 3, with(setting));
        train(model, *rig, 0);
        rig->sharded->check_usable();
      });
      EXPECT_THAT(error, HasSubstr("Input/output error")) << kind << " " << at;
      EXPECT_THAT(error, HasSubstr(folder_.path().string())) << kind << " " << at;
    }
}

TEST_P(DeviceOffloadTest, AnEngineThatGoesLeavesItsModelReadable) {
  std::vector<at::Tensor> expected, found;
  for (const bool offloads : {false, true}) {
    Chain model(kNumLayers);
    {
      Rig rig(*model, alone(), 1, with(offloads ? on_device(kOptimizerOnHost) : Setting{}));
      rig.step(model->forward(batch(0, 0)).sum());
    }
    for (const at::Tensor& parameter : model->parameters())
      (offloads ? found : expected).push_back(parameter.detach().clone());
  }
  EXPECT_TRUE(same_bits(found, expected));
}

const auto kNameOfDevice = [](const ::testing::TestParamInfo<Device>& info) {
  constexpr const char* kNames[] = {"AtOnce", "Last", "OnThreads"};
  return std::string(info.param ? kNames[static_cast<int>(*info.param)] : "TheHost");
};
const auto kModes = ::testing::Values(Mode::kAtOnce, Mode::kLast, Mode::kOnThreads);
INSTANTIATE_TEST_SUITE_P(Modes, DeviceOffloadTest, kModes, kNameOfDevice);
INSTANTIATE_TEST_SUITE_P(Modes, EveryDevice, kModes, kNameOfDevice);
INSTANTIATE_TEST_SUITE_P(WithoutOne, EveryDevice, ::testing::Values(std::nullopt), kNameOfDevice);

}  // namespace
}  // namespace tessera::zero::testing
