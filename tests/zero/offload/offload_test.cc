// State on disk: in bounded memory, updated late; and disks that fail. Bits: device_offload_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <optional>

#include "core/async_io/spill_file_internal.h"
#include "tests/zero/offload/offload_testing.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(OffloadTest, FewBuffersGiveTheSameBits) {
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto expected = train_once(comm, 3, with({}));
    for (const int num_buffers : {1, 2, 5})
      EXPECT_TRUE(
          same_bits(train_once(comm, 3, with({.tiers = kAllOnDisk, .num_buffers = num_buffers})), expected))
          << num_buffers << " buffers";
  });
}

TEST_F(OffloadTest, WhatIsOnDiskIsNotInMemory) {
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (const Tiers& tiers : {kInMemoryTiers, kOptimizerOnDisk, kAllOnDisk}) {
        Chain model(kNumLayers);
        Rig rig(*model, comm, 3, with({.tiers = tiers, .dtype = dtype}));
        train(model, rig, comm->rank(), 1);
        const ShardedModel& sharded = *rig.sharded;
        const StateBytes memory = sharded.measured_bytes(), disk = sharded.measured_bytes(Tier::kDisk);
        EXPECT_EQ(memory, sharded.formula_bytes());
        EXPECT_EQ(disk, sharded.formula_bytes(false, Tier::kDisk));
        int64_t numel = 0;
        for (int unit = 0; unit < sharded.layout().num_units(); ++unit)
          numel += sharded.layout().shard_numel(unit);
        const int64_t element = size_bytes(dtype);
        const bool parameters = tiers.parameters == Tier::kDisk, optimizer = tiers.optimizer == Tier::kDisk;
        // On hosts of one rank each, that rank has all of its host's copy of the parameters.
        const int64_t others_shard =
            tessera::testing::default_backend() == "hybrid" && !parameters ? numel * element : 0;
        EXPECT_EQ(memory.total() + disk.total(), numel * (dtype == DType::kFloat32 ? 16 : 18) + others_shard);
        EXPECT_EQ(disk.parameters, parameters ? numel * element : 0);
        EXPECT_EQ(disk.optimizer, optimizer ? numel * 8 : 0);
        EXPECT_EQ(disk.gradients, optimizer ? numel * 4 : 0);
        EXPECT_EQ(memory.gradients, optimizer ? 0 : numel * 4);
        if (!tiers.any_on_disk()) continue;
        EXPECT_LE(sharded.offload_store()->peak_buffer_bytes(), sharded.offload_store()->budget());
        EXPECT_GE(sharded.offload_store()->bytes_on_disk(), disk.total());
      }
  });
}

TEST_F(OffloadTest, UnitsAreUpdatedWhenTheyAreUsed) {
  Chain model(kNumLayers);
  Rig rig(*model, alone(), 1, with({.tiers = kOptimizerOnDisk}));
  rig.step(model->forward(batch(0, 0)).sum());
  rig.sharded->finish_updates();
  OffloadStore& store = *rig.sharded->offload_store();
  store.flush();
  const int64_t before = store.bytes_written();
  rig.step(model->forward(batch(0, 1)).sum());
  EXPECT_EQ(store.bytes_written(), before) << "step() updates nothing at once";
  model->through({0, 1}, batch(0, 2));
  rig.sharded->finish_updates();
  store.flush();
  // exp_avg and exp_avg_sq of each unit that had a gradient, and of one that had none, written once.
  const int64_t page = SpillFile::kAlignment;
  EXPECT_GE(store.bytes_written() - before, 2 * kNumLayers * page);
  EXPECT_LE(store.bytes_written() - before, 2 * (kNumLayers + 1) * page);
}

/// Bytes read and written in a step, once the order is known.
std::pair<int64_t, int64_t> traffic_of_a_step(const Change& change) {
  Chain model(kNumLayers);
  Rig rig(*model, alone(), 3, change);
  train(model, rig, 0, 4);
  const OffloadStore& store = *rig.sharded->offload_store();
  const std::pair before(store.bytes_read(), store.bytes_written());
  train(model, rig, 0, 2);
  return {(store.bytes_read() - before.first) / 2, (store.bytes_written() - before.second) / 2};
}

TEST_F(OffloadTest, WhatHasRoomStaysInMemory) {
  const int num_tensors = 4 * (kNumLayers + 1);
  const auto [all_read, all_written] =
      traffic_of_a_step(with({.tiers = kAllOnDisk, .num_buffers = num_tensors}));
  EXPECT_EQ(all_read, 0);
  const auto [half_read, half_written] =
      traffic_of_a_step(with({.tiers = kAllOnDisk, .num_buffers = num_tensors / 2}));
  const auto [few_read, few_written] = traffic_of_a_step(with({.tiers = kAllOnDisk, .num_buffers = 4}));
  EXPECT_GT(half_read, 0);
  EXPECT_LT(half_read, few_read);
  // The unit that some steps leave out is not expected, and so written.
  EXPECT_LT(all_written, few_written / 4);
  EXPECT_LT(half_written, few_written);
}

TEST_F(OffloadTest, NothingIsLeftInTheDirectory) {
  {
    Chain model(kNumLayers);
    Rig rig(*model, alone(), 3, with({.tiers = kAllOnDisk}));
    rig.step(model->forward(batch(0, 0)).sum());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

// The file has no name: it stays for the process that has it open.
TEST_F(OffloadTest, TheDirectoryMayVanish) {
  const std::filesystem::path folder = folder_.path() / "removed";
  Chain model(kNumLayers);
  Rig rig(*model, alone(), 3, [&](ShardedModelOptions& options) {
    with({.tiers = kAllOnDisk})(options);
    options.offload.directory = folder.string();
  });
  std::filesystem::remove_all(folder);
  const std::vector<at::Tensor> found = train(model, rig, 0);
  EXPECT_TRUE(same_bits(found, train_once(alone(), 3, with({}))));
}

TEST_F(OffloadTest, NoRoomOnTheDiskIsAnErrorOnAllRanksAtTheStart) {
  const SpillFileProbe full = [](std::string_view operation, int64_t, int64_t) {
    return operation == "reserve" ? ENOSPC : 0;
  };
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    Chain model(kNumLayers);
    const ScopedSpillFileProbe probe(comm->rank() == 1 ? full : SpillFileProbe{});
    const std::string error = error_of([&] { Rig rig(*model, comm, 3, with({.tiers = kAllOnDisk})); });
    EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr(folder_.path().string())));
  });
}

/// Fails the n-th operation of a kind.
SpillFileProbe fails(std::string_view kind, int at, int error) {
  return [=, count = std::make_shared<std::atomic<int>>(0)](std::string_view operation, int64_t, int64_t) {
    return operation == kind && count->fetch_add(1) == at ? error : 0;
  };
}

TEST_F(OffloadTest, AFailingDiskIsSaidOnceAndLeavesTheModelUnusable) {
  const std::tuple<const char*, int, const char*> kinds[] = {{"read", EIO, "Input/output error"},
                                                             {"write", EIO, "Input/output error"},
                                                             {"write", ENOSPC, "No space left on device"}};
  for (const auto& [kind, code, reason] : kinds)
    for (const int at : {0, 1, 5, 12, 25, 40}) {
      Chain model(kNumLayers);
      std::optional<Rig> rig;
      const ScopedSpillFileProbe probe(fails(kind, at, code));
      const std::string error = error_of([&] {
        rig.emplace(*model, alone(), 3, with({.tiers = kAllOnDisk}));
        train(model, *rig, 0);
        rig->sharded->check_usable();
      });
      EXPECT_THAT(error, AllOf(HasSubstr("model state of rank 0"), HasSubstr(folder_.path().string()),
                               HasSubstr(reason)))
          << kind << " " << at;
      if (rig) {
        EXPECT_NE(error_of([&] { rig->sharded->check_usable(); }), "") << kind << " " << at;
        // All of the state is replaced, as a checkpoint does it.
        rig->sharded->begin_replacing("the test");
        for (int unit = 0; unit < rig->sharded->layout().num_units(); ++unit) {
          const at::NoGradGuard no_grad;
          const PauseListening as_the_loader;
          const InMemory in_memory(rig->sharded->unit(unit), kUpdated, InMemory::Access::kOverwrite);
          const LocalState state = rig->sharded->unit(unit).local_state();
          state.weights.fill_(0.125);
          for (const at::Tensor& moment : state.states) moment.zero_();
        }
        rig->sharded->end_replacing();
        EXPECT_TRUE(rig->sharded->full_parameter("fc1.weight").eq(0.125).all().item<bool>());
        train(model, *rig, 0, 1);
        EXPECT_EQ(error_of([&] { rig->sharded->check_usable(); }), "") << "and it trains again";
      }
    }
}

TEST_F(OffloadTest, AFailedWriteLosesNothingWhereTheErrorIsCaught) {
  using Access = OffloadedTensor::Access;
  constexpr int kNumTensors = 6;
  constexpr int64_t kNumel = 4096;
  for (const int num_buffers : {1, 2, 4})
    for (int at = 0; at < 12; ++at) {
      const ScopedSpillFileProbe probe(fails("write", at, EIO));
      OffloadStore store({.directory = folder_.path().string(), .num_buffers = num_buffers},
                         std::vector<int64_t>(kNumTensors, kNumel * 4), "test");
      std::vector<std::unique_ptr<OffloadedTensor>> tensors;
      for (int i = 0; i < kNumTensors; ++i)
        tensors.push_back(std::make_unique<OffloadedTensor>(store, kNumel, at::kFloat, "test"));
      std::vector<int> expected(kNumTensors, 0);
      int num_errors = 0;
      for (int turn = 0; turn < 4 * kNumTensors; ++turn) {
        const int i = turn * 5 % kNumTensors;
        const Access access = std::array{Access::kReadWrite, Access::kRead, Access::kOverwrite}[turn % 3];
        const std::string error = error_of([&] {
          tensors[i]->acquire(access);
          if (access != Access::kOverwrite) {
            EXPECT_TRUE(tensors[i]->tensor().eq(expected[i]).all().item<bool>()) << num_buffers << " " << at;
          }
          if (access != Access::kRead) tensors[i]->tensor().fill_(expected[i] = turn + 1);
          tensors[i]->release();
        });
        EXPECT_THAT(error, AnyOf("", HasSubstr("Input/output error")));
        num_errors += !error.empty();
      }
      num_errors += !error_of([&] { store.flush(); }).empty();
      EXPECT_EQ(num_errors, 1) << num_buffers << " " << at;
      store.flush();  // it writes what has failed
      for (int i = 0; i < kNumTensors; ++i) {
        tensors[i]->acquire(Access::kRead);
        EXPECT_TRUE(tensors[i]->tensor().eq(expected[i]).all().item<bool>()) << num_buffers << " " << at;
        tensors[i]->release();
      }
    }
}

}  // namespace
}  // namespace tessera::zero::testing
