// A rank's memory by use: compared with the tensors' sizes, with an allocator that counts separately, and
// simulated groups with real ones.
#include "engine/profile/memory_meter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "comm/init/self.h"
#include "core/str.h"
#include "tests/support/backend.h"
#include "tests/support/live_bytes.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

TEST(MemoryMeterTest, FilesBlocksUnderTheInnermostScope) {
  MemoryMeter meter(at::kCPU);
  const at::Tensor before = at::empty({1000}, at::kByte);
  EXPECT_EQ(meter.now()[MemoryUse::kOther], 1000);
  meter.set_default_use(MemoryUse::kActivations);
  {
    const MemoryFor outer(MemoryUse::kGradients);
    const at::Tensor gradient = at::empty({300}, at::kByte);
    {
      const MemoryFor inner(MemoryUse::kOptimizer);
      const at::Tensor state = at::empty({20}, at::kByte);
      const at::Tensor view = state.narrow(0, 0, 10);
      EXPECT_EQ(meter.now()[MemoryUse::kOptimizer], 20);
    }
    EXPECT_EQ(meter.now()[MemoryUse::kOptimizer], 0);
    const at::Tensor temporary = at::empty({1}, at::kByte);
    EXPECT_EQ(meter.now()[MemoryUse::kGradients], 301);
  }
  const at::Tensor activation = at::empty({50}, at::kByte);
  EXPECT_EQ(meter.now().total(), 1050);
  EXPECT_EQ(meter.peak().total(), 1320) << "the scope's 20 bytes were there with 300 and 1000";
  EXPECT_EQ(meter.peak()[MemoryUse::kOptimizer], 20);
  meter.reset_peak();
  EXPECT_EQ(meter.peak(), meter.now());
}

TEST(MemoryMeterTest, RecordsEveryChange) {
  MemoryMeter meter(at::kCPU);
  const at::Tensor kept = at::empty({10}, at::kByte);
  meter.record();
  {
    const at::Tensor passing = at::empty({5}, at::kByte);
  }
  const std::vector<MemorySample> record = meter.take_record().samples();
  ASSERT_EQ(record.size(), 3u);
  EXPECT_EQ(record[0].bytes.total(), 10);
  EXPECT_EQ(record[1].bytes.total(), 15);
  EXPECT_EQ(record[2].bytes.total(), 10);
  EXPECT_LE(record[0].seconds, record[1].seconds);
  EXPECT_LE(record[1].seconds, record[2].seconds);
}

/// What a record of a step says of its blocks: "use unit module operator", without those from before.
std::set<std::string> origins_in_a_step(int stage) {
  MemoryMeter meter(at::kCPU);
  Odds model;
  const auto engine =
      initialize(model, engine_config(small_units(3, stage)),
                 std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{.rank = 1, .size = 3}));
  meter.set_default_use(MemoryUse::kActivations);
  const auto step = [&](int i) {
    engine->backward(odds_loss(*model, i, 0, 2));
    engine->step();
  };
  step(0);
  meter.record(&engine->sharded_model().layout());
  step(1);
  const MemoryRecord record = meter.take_record();
  EXPECT_EQ(record.samples().back().bytes, meter.now());
  std::set<std::string> origins;
  const auto name = [&](int place) {
    return place < 0 ? std::string("-") : record.names[static_cast<size_t>(place)];
  };
  for (const MemoryBlock& block : record.blocks) {
    if (block.begin_s > 0)
      origins.insert(str(key_of(block.use), " ", name(block.module), " ", name(block.op),
                         block.in_call ? " in it" : ""));
    else
      EXPECT_EQ(block.op, -1);
    if (block.use == MemoryUse::kGradients || block.use == MemoryUse::kOptimizer) {
      EXPECT_TRUE(name(block.unit).starts_with("unit ")) << name(block.unit);
    }
  }
  return origins;
}

TEST(MemoryMeterTest, ARecordKnowsUnitModuleAndOperator) {
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    const std::set<std::string> origins = origins_in_a_step(stage);
    std::string all;
    for (const std::string& one : origins) all += one + "\n";
    const Odds model;
    int known = 0;
    for (const auto& module : model->named_children())
      for (const char* kind : {" aten::", "Backward0"})
        for (const std::string& one : origins)
          if (one.find(" " + module.key()) != std::string::npos && one.find(kind) != std::string::npos) {
            ++known;
            break;
          }
    EXPECT_GE(known, 4) << "modules in forward and in backward\n" << all;
    EXPECT_NE(all.find(" in it"), std::string::npos) << "workspace\n" << all;
  }
}

TEST(MemoryMeterTest, HearsNothingOnceItIsGone) {
  std::optional<MemoryMeter> outer(at::kCPU);
  {
    const MemoryMeter inner(at::kCPU);
    const at::Tensor tensor = at::empty({10}, at::kByte);
    EXPECT_EQ(inner.now().total(), 10);
    EXPECT_EQ(outer->now().total(), 0);
  }
  outer.reset();
  EXPECT_FALSE(c10::memoryProfilingEnabled());
}

Case small_model(int world, int stage, bool bf16, const std::string& backend) {
  Case c = small_units(world, stage);
  c.backend = backend;
  c.optimizer = "AdamW";
  c.config.bf16 = bf16;
  return c;
}

/// A rank's memory between steps, and at the peak of the third.
struct Measured {
  MemoryBytes held, peak;
  zero::StateBytes state;
};

Measured train_measured(const Case& c, comm::CommunicatorPtr comm) {
  LiveBytes live;
  MemoryMeter meter(at::kCPU);
  Odds model;
  const auto engine = initialize(model, engine_config(c), comm);
  meter.set_default_use(MemoryUse::kActivations);
  for (int step = 0; step < 4; ++step) {
    if (step == 3) {
      meter.reset_peak();
      live.reset_peak();
    }
    engine->backward(odds_loss(*model, step, 0, 2));
    engine->step();
  }
  EXPECT_EQ(engine->skipped_steps(), 0);
  EXPECT_TRUE(std::isfinite(engine->gradient_norm()));
  Measured measured{meter.now(), meter.peak(), engine->measured_bytes()};
  if (c.backend == "gloo") {
    // Gloo's threads may not have freed a buffer yet, and the two measurements are not at the same moment.
    const auto start = std::chrono::steady_clock::now();
    while (meter.now().total() != live.now() && seconds_since(start) < 5) std::this_thread::yield();
    EXPECT_EQ(meter.now().total(), live.now());
    measured.held = meter.now();
    EXPECT_NEAR(static_cast<double>(measured.peak.total()), static_cast<double>(live.peak()), 4096);
  }
  return measured;
}

void expect_state(const Measured& measured) {
  EXPECT_EQ(measured.held[MemoryUse::kParameters], measured.state.parameters);
  EXPECT_EQ(measured.held[MemoryUse::kGradients], measured.state.gradients);
  EXPECT_EQ(measured.held[MemoryUse::kMaster], measured.state.master);
  EXPECT_EQ(measured.held[MemoryUse::kOptimizer], measured.state.optimizer);
}

class MeteredTraining : public ::testing::TestWithParam<std::tuple<int, std::string>> {};

TEST_P(MeteredTraining, UsesAreWhatTheTensorsSayAndSimulatedRanksHoldTheSame) {
  TESSERA_ON_ONE_BACKEND();
  const auto& [world, backend] = GetParam();
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(str("stage ", stage, bf16 ? " bf16" : " fp32"));
      const Case c = small_model(world, stage, bf16, backend);
      std::vector<Measured> real(world);
      on_ranks(
          world, [&](comm::CommunicatorPtr comm) { real[comm->rank()] = train_measured(c, comm); }, backend);
      for (int rank = 0; rank < world; ++rank) {
        SCOPED_TRACE(str("rank ", rank));
        expect_state(real[rank]);
        const Measured simulated = train_measured(
            c, std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{rank, world, backend == "shm"}));
        expect_state(simulated);
        EXPECT_EQ(simulated.state, real[rank].state);
        EXPECT_EQ(simulated.held[MemoryUse::kCommunication], real[rank].held[MemoryUse::kCommunication]);
        const auto total = static_cast<double>(real[rank].peak.total());
        // The model is tiny, and Gloo's threads free temporaries of 1 or 2 KiB later.
        EXPECT_NEAR(static_cast<double>(simulated.peak.total()), total, 0.01 * total + 4096);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, MeteredTraining,
                         ::testing::Combine(::testing::Values(2, 3), ::testing::Values("gloo", "shm")),
                         [](const auto& info) {
                           return str(std::get<1>(info.param), std::get<0>(info.param));
                         });

}  // namespace
}  // namespace tessera::testing
