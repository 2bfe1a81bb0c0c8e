// mics_shard_size and zero_hpz_partition_size through the engine: against a plain loop, and in checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>

#include "core/str.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"
#include "tests/support/same_runs.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;

/// Which groups of ranks.
struct Groups {
  int world, mics, hpz;
};
std::ostream& operator<<(std::ostream& out, const Groups& groups) {
  return out << "world " << groups.world << " mics " << groups.mics << " hpz " << groups.hpz;
}
constexpr Groups kGroups[] = {{2, 1, 1}, {4, 2, 1}, {4, -1, 2}, {6, 2, 1}, {6, 3, 1}, {6, -1, 3}};

Job job_of(const Groups& groups, const std::string& precision = "fp32") {
  Job job{.world = groups.world, .stage = 3, .precision = precision};
  job.mics_shard_size = groups.mics;
  job.hpz_partition_size = groups.hpz;
  return job;
}

Case case_of(const Groups& groups) {
  Case c = small_units(groups.world, 3);
  c.config.zero.mics_shard_size = groups.mics;
  c.config.zero.hpz_partition_size = groups.hpz;
  return c;
}

TEST(HybridSharding, TrainsAsAPlainLoopDoes) {
  for (const Groups& groups : kGroups) {
    SCOPED_TRACE(groups);
    Case c = case_of(groups);
    expect_close(engine_run<Odds>(c, odds_loss), plain_run<Odds>(c, odds_loss));
    c.accumulation = 2;
    c.clipping = 0.05;
    const TrainingRun plain = plain_run<Mlp>(c, mlp_loss);
    EXPECT_GT(plain.norms.front(), c.clipping) << "the case must clip";
    expect_close(engine_run<Mlp>(c, mlp_loss), plain);
  }
}

// ------------------------------------------------------------------------------------------ checkpoints

/// By name.
std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".h5") files[entry.path().filename()] = read_text(entry.path());
  return files;
}

TEST(HybridSharding, FilesAreThoseOfARunWithoutIt) {
  for (const Groups& groups : kGroups) {
    SCOPED_TRACE(groups);
    const TestFolder saved("rows"), saved_again("no_rows");
    on_ranks(groups.world, [&](comm::CommunicatorPtr comm) {
      Trained trained(job_of(groups), comm);
      for (int i = 0; i < 3; ++i) trained.step();
      const std::string path = trained.engine->save_checkpoint(saved.string(), "step3");
      const std::string twice = trained.engine->save_checkpoint(saved.string(), "again");
      Trained plain({.world = groups.world, .stage = 3, .seed = 9}, comm);
      plain.engine->load_checkpoint(saved.string(), "step3");
      EXPECT_TRUE(bit_equal(whole_state(*plain.engine), whole_state(*trained.engine)));
      const std::string plain_path = plain.engine->save_checkpoint(saved_again.string(), "step3");
      comm->barrier("saved");
      if (comm->rank() != 0) return;
      const auto files = files_of(path);
      EXPECT_EQ(files.size(), static_cast<size_t>(groups.world) + 1) << "a file a rank, and the model's";
      EXPECT_TRUE(files == files_of(plain_path)) << "every byte";
    });
  }
}

TEST(HybridSharding, AnyGroupsLoadAnyOther) {
  const TestFolder folder("groups");
  std::map<std::string, Tensors> states;
  const std::vector<Groups> plain{{1, -1, 1}, {3, -1, 1}};
  std::vector<Groups> all(std::begin(kGroups), std::end(kGroups));
  all.insert(all.end(), plain.begin(), plain.end());
  for (const Groups& groups : all) {
    const std::string tag = str("world", groups.world, "mics", groups.mics, "hpz", groups.hpz);
    on_ranks(groups.world, [&](comm::CommunicatorPtr comm) {
      Trained trained(job_of(groups), comm);
      for (int i = 0; i < 3; ++i) trained.step();
      trained.engine->save_checkpoint(folder.string(), tag);
      Tensors state = whole_state(*trained.engine);
      if (comm->rank() == 0) states[tag] = std::move(state);
    });
  }
  for (const Groups& groups : all) {
    SCOPED_TRACE(groups);
    on_ranks(groups.world, [&](comm::CommunicatorPtr comm) {
      Job job = job_of(groups);
      job.unit_numel = 400;
      job.seed = 9;
      Trained trained(job, comm);
      trained.step();  // something to be overwritten
      for (const auto& [tag, expected] : states) {
        EXPECT_THAT(trained.engine->load_checkpoint(folder.string(), tag).not_loaded, IsEmpty());
        EXPECT_TRUE(bit_equal(whole_state(*trained.engine), expected)) << tag;
        EXPECT_TRUE(std::isfinite(trained.step())) << "training goes on";
      }
    });
  }
}

TEST(HybridSharding, AResumedRunHasTheBitsOfTheUninterruptedOne) {
  for (const Groups& groups : {Groups{4, 2, 1}, Groups{4, -1, 2}, Groups{6, 3, 1}})
    for (const std::string precision : {"fp32", "bf16", "fp16"}) {
      SCOPED_TRACE(str(groups.world, " ", groups.mics, " ", precision));
      const TestFolder folder("resume");
      on_ranks(groups.world, [&](comm::CommunicatorPtr comm) {
        Job job = job_of(groups, precision);
        job.checkpoint.async = precision != "fp32";
        Trained trained(job, comm);
        for (int i = 0; i < 3; ++i) trained.step();
        trained.engine->save_checkpoint(folder.string());
        std::vector<double> losses, resumed_losses;
        for (int i = 0; i < 3; ++i) losses.push_back(trained.step());
        trained.engine->finish_checkpoint();
        EXPECT_EQ(trained.engine->measured_bytes(), trained.engine->formula_bytes());
        job.seed = 9;
        Trained resumed(job, comm);
        resumed.engine->load_checkpoint(folder.string());
        for (int i = 0; i < 3; ++i) resumed_losses.push_back(resumed.step());
        EXPECT_EQ(losses, resumed_losses);
        EXPECT_TRUE(bit_equal(whole_state(*resumed.engine), whole_state(*trained.engine)));
      });
    }
}

TEST(HybridSharding, StateOnDiskChangesNoBit) {
  const TestFolder folder("disk");
  const OffloadConfig on_disk{.device = "nvme", .nvme_path = folder.string()};
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    const Case rows = case_of({4, 2, 1}), second_copies = case_of({4, -1, 2});
    Case rows_on_disk = rows, second_copies_on_disk = second_copies;
    rows_on_disk.config.zero.offload_param = on_disk;
    second_copies_on_disk.config.zero.offload_optimizer = on_disk;
    for (const auto& [on_disk, in_memory] :
         {std::pair{rows_on_disk, rows}, {second_copies_on_disk, second_copies}})
      EXPECT_TRUE(bit_equal(rank_run<Mlp>(on_disk, comm, mlp_loss).weights,
                            rank_run<Mlp>(in_memory, comm, mlp_loss).weights));
  });
}

}  // namespace
}  // namespace tessera::testing
