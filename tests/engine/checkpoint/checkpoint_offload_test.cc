// Checkpoints of state that is on disk: saved and loaded as if it were in memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "core/str.h"
#include "engine/engine_internal.h"
#include "tests/comm/memory/host_only_transfer.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/errors.h"

namespace tessera::testing {
namespace {

class OffloadedCheckpoint : public ::testing::TestWithParam<int> {};  // stage

// Each way of the two is saved by one and loaded by the other, on another number of ranks, and resumed.
TEST_P(OffloadedCheckpoint, IsThatOfStateInMemory) {
  const TestFolder folder(str("offloaded", GetParam()));
  const Job in_memory{.world = 2, .stage = GetParam()};
  Job on_disk = in_memory;
  on_disk.offload_to = folder / "disk";
  std::vector<Tensors> saved;
  for (const Job& job : {in_memory, on_disk})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      Trained trained(job, comm);
      for (int i = 0; i < 3; ++i) trained.step();
      trained.engine->save_checkpoint(folder.string(), str("by", job.offload_to.empty() ? "memory" : "disk"));
      Tensors state = whole_state(*trained.engine);
      if (comm->rank() == 0) saved.push_back(std::move(state));
    });
  EXPECT_TRUE(bit_equal(saved[0], saved[1]));
  for (const int world : {1, 2, 3})
    for (const char* tag : {"bymemory", "bydisk"}) {
      std::vector<Tensors> resumed;
      for (Job job : {in_memory, on_disk}) {
        job.unit_numel = 400;
        job.seed = 9;
        on_ranks(world, [&](comm::CommunicatorPtr comm) {
          Trained trained(job, comm);
          trained.step();  // something to be overwritten
          trained.engine->load_checkpoint(folder.string(), tag);
          EXPECT_TRUE(bit_equal(whole_state(*trained.engine), saved[0])) << tag << " on " << world;
          trained.step();
          Tensors state = whole_state(*trained.engine);
          if (comm->rank() == 0) resumed.push_back(std::move(state));
        });
      }
      EXPECT_TRUE(bit_equal(resumed[0], resumed[1])) << tag << " on " << world;
    }
  EXPECT_TRUE(std::filesystem::is_empty(folder / "disk")) << "a file of state has no name";
}

TEST_P(OffloadedCheckpoint, AnAsynchronousOneIsWrittenAtOnce) {
  const TestFolder folder(str("offloaded_async", GetParam()));
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const Job job{.stage = GetParam(),
                  .checkpoint = {.async = true, .keep_last = 0, .fsync = false},
                  .offload_to = folder / "disk"};
    Trained trained(job, comm);
    trained.step();
    const std::string path = trained.engine->save_checkpoint(folder.string(), "a");
    comm->barrier("saved");
    EXPECT_TRUE(std::filesystem::exists(path));
    EXPECT_EQ(trained.engine->measured_bytes().snapshot, 0) << "no second copy in memory";
    EXPECT_EQ(trained.engine->measured_bytes(), trained.engine->formula_bytes());
  });
}

// The device is host memory (tests/comm/memory/host_only_transfer.h). In fp16 the first steps overflow and
// are skipped.
TEST_P(OffloadedCheckpoint, OfADeviceWhoseMemoryIsNotTheHosts) {
  using comm::testing::HostOnlyTransfer;
  const TestFolder folder(str("device", GetParam()));
  const struct {
    const char* precision;
    bool async, on_disk;
  } cases[] = {{"fp32", false, true}, {"fp32", true, false}, {"fp16", false, false}, {"fp16", true, true}};
  for (const auto& one : cases) {
    Job on_device{.stage = GetParam(), .precision = one.precision};
    on_device.checkpoint.async = one.async;
    Job offloaded = on_device;
    const auto transfer = std::make_shared<HostOnlyTransfer>(HostOnlyTransfer::Mode::kLast);
    offloaded.transfer = transfer;
    if (one.on_disk) offloaded.offload_to = folder / "disk";
    std::vector<Tensors> states;
    std::vector<int64_t> skipped;
    for (const Job& job : {on_device, offloaded})
      on_ranks(2, [&](comm::CommunicatorPtr comm) {
        Trained trained(job, comm);
        for (int i = 0; i < 6; ++i) trained.step();
        const char* const tag = job.transfer ? "by_host" : "by_device";
        trained.engine->save_checkpoint(folder.string(), tag);
        trained.step();  // while it is written, or right after
        trained.engine->finish_checkpoint();
        EXPECT_EQ(trained.engine->measured_bytes(zero::Tier::kHost),
                  trained.engine->formula_bytes(zero::Tier::kHost));
        EXPECT_EQ(trained.engine->measured_bytes(zero::Tier::kHost).total() > 0,
                  job.transfer && !one.on_disk);
        comm->barrier("saved");
        trained.engine->load_checkpoint(folder.string(), tag);
        trained.step();
        Tensors state = whole_state(*trained.engine);
        if (comm->rank() != 0) return;
        states.push_back(std::move(state));
        skipped.push_back(trained.engine->skipped_steps());
      });
    EXPECT_TRUE(bit_equal(states[0], states[1])) << one.precision << (one.async ? " async" : "");
    EXPECT_EQ(skipped[0], skipped[1]);
    EXPECT_EQ(skipped[0] > 0, std::string(one.precision) == "fp16");
    // Each loads the other's.
    std::vector<Tensors> loaded;
    for (const Job& job : {on_device, offloaded})
      on_ranks(1, [&](comm::CommunicatorPtr comm) {
        Trained trained(job, comm);
        trained.step();
        trained.engine->load_checkpoint(folder.string(), job.transfer ? "by_device" : "by_host");
        trained.step();
        loaded.push_back(whole_state(*trained.engine));
      });
    EXPECT_TRUE(bit_equal(loaded[0], loaded[1]));
    EXPECT_THAT(transfer->violations(), ::testing::IsEmpty());
  }
}

std::string error_of_offload(int stage, const OffloadConfig& optimizer, const OffloadConfig& parameters,
                             int world = 1) {
  std::string error;
  on_ranks(world, [&](comm::CommunicatorPtr comm) {
    SavedNet model;
    Case c = small_units(world, stage);
    c.config.zero.offload_optimizer = optimizer;
    c.config.zero.offload_param = parameters;
    const ScopedHostTransfer transfer(
        std::make_shared<comm::testing::HostOnlyTransfer>(comm::testing::HostOnlyTransfer::Mode::kAtOnce));
    const std::string mine = error_of([&] { initialize(model, engine_config(c), comm); });
    if (comm->rank() == 0) error = mine;
  });
  return error;
}

TEST(OffloadOfADevice, TheSameBitsAtStage0OnOneRank) {
  std::vector<Tensors> states;
  for (const bool offloads : {false, true})
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Job job{.stage = 0, .precision = "bf16"};
      if (offloads)
        job.transfer =
            std::make_shared<comm::testing::HostOnlyTransfer>(comm::testing::HostOnlyTransfer::Mode::kLast);
      Trained trained(job, comm);
      for (int i = 0; i < 4; ++i) trained.step();
      states.push_back(whole_state(*trained.engine));
      EXPECT_EQ(trained.engine->measured_bytes(zero::Tier::kHost).optimizer > 0, offloads);
    });
  EXPECT_TRUE(bit_equal(states[0], states[1]));
}

TEST(OffloadOfADevice, SaysWhatItDoesNotTake) {
  const OffloadConfig none;
  OffloadConfig host;
  host.device = "cpu";
  EXPECT_EQ(
      error_of_offload(3, none, host),
      "zero_optimization.offload_param.device: found \"cpu\" on a GPU whose optimizer states are not "
      "offloaded; expected offload_optimizer with device \"cpu\" or \"nvme\" beside it: values on the host "
      "are updated there");
  EXPECT_EQ(
      error_of_offload(2, host, host),
      "zero_optimization.offload_param.device: found \"cpu\" at a stage that does not shard parameters; "
      "expected stage 3");
  EXPECT_EQ(error_of_offload(0, host, none, /*world=*/2),
            "zero_optimization.offload_optimizer.device: found \"cpu\" at stage 0 with several ranks, each "
            "of which "
            "keeps all states; expected stage 1, 2 or 3");
  EXPECT_EQ(error_of_offload(0, host, none), "");
  EXPECT_EQ(error_of_offload(3, host, host), "");
}

INSTANTIATE_TEST_SUITE_P(Stages, OffloadedCheckpoint, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

}  // namespace
}  // namespace tessera::testing
