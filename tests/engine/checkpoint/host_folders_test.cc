// Checkpoints in memory on several hosts, whose folders are folders of a test.
#include "engine/checkpoint/host_folders.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <set>
#include <thread>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "core/files/disk_error.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_writer_internal.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

/// A folder for each host; `ranks`: by host.
struct Hosts {
  explicit Hosts(std::vector<int> ranks) : ranks(std::move(ranks)), base("hosts") {
    for (size_t host = 0; host < this->ranks.size(); ++host) {
      names.push_back(str("host", host));
      fs::create_directory(folder(host));
    }
  }
  int world() const {
    int sum = 0;
    for (const int num : ranks) sum += num;
    return sum;
  }
  fs::path folder(size_t host) const { return base / names[host]; }
  fs::path folder_of(int rank) const {
    size_t host = 0;
    while (rank >= ranks[host]) rank -= ranks[host++];
    return folder(host);
  }
  /// The host is gone, with its memory.
  void lose(size_t host) {
    fs::remove_all(folder(host));
    ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(host));
    names.erase(names.begin() + static_cast<std::ptrdiff_t>(host));
  }
  /// Another one in its place.
  void replace(size_t host) {
    names[host] = "new_" + names[host];
    fs::create_directory(folder(host));
  }

  std::vector<int> ranks;
  std::vector<std::string> names;
  TestFolder base;
};

std::optional<int64_t> steps_of(const nlohmann::json& state) {
  return state.at("global_steps").get<int64_t>();
}

/// Trains `num_steps` and saves in memory after each; the state then.
Tensors train(const Hosts& hosts, const Job& job, int num_steps) {
  Tensors saved;
  on_ranks(hosts.world(), [&](comm::CommunicatorPtr comm) {
    const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
    Trained trained(job, comm);
    for (int step = 0; step < num_steps; ++step) {
      trained.step();
      trained.engine->save_in_memory(*folders, {{"who", "me"}});
    }
    Tensors state = whole_state(*trained.engine);
    if (comm->rank() == 0) saved = std::move(state);
  });
  return saved;
}

struct Restarted {
  Tensors state;  // as loaded; empty: nothing was found
  std::string problem;
  int64_t steps = 0;
};

/// Ranks that start on these hosts, and load what is in memory.
Restarted restart(const Hosts& hosts, const Job& job) {
  Restarted restarted;
  on_ranks(hosts.world(), [&](comm::CommunicatorPtr comm) {
    const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
    const HostFolders::Found found = folders->find(steps_of);
    if (comm->rank() == 0) restarted.problem = found.problem;
    if (found.tag.empty()) return;
    Trained trained(job, comm);
    LoadOptions options;
    options.folders = folders.get();
    const LoadedCheckpoint loaded = trained.engine->load_checkpoint(folders->path(), found.tag, options);
    EXPECT_EQ(loaded.client_state.at("who"), "me");
    Tensors state = whole_state(*trained.engine);
    if (comm->rank() == 0)
      restarted.state = std::move(state), restarted.steps = trained.engine->global_steps();
    trained.step();
    trained.engine->save_in_memory(*folders, {});
    comm->barrier("owners have removed the one before");
    EXPECT_THAT(checkpoint::list_checkpoints(folders->path()), ::testing::SizeIs(1));
  });
  return restarted;
}

class Layouts : public ::testing::TestWithParam<std::vector<int>> {};  // ranks by host

TEST_P(Layouts, AnyHostMayBeLost) {
  for (size_t lost = 0; lost < GetParam().size(); ++lost) {
    const bool is_replaced = lost % 2 == 1;
    SCOPED_TRACE(str("without host ", lost, is_replaced ? ", another in its place" : ""));
    const int stage = static_cast<int>(lost) % 4;
    Hosts hosts(GetParam());
    const Tensors saved = train(hosts, {.world = hosts.world(), .stage = stage}, 2);
    if (is_replaced) {
      fs::remove_all(hosts.folder(lost));
      hosts.replace(lost);
    } else {
      hosts.lose(lost);
    }
    const Restarted restarted = restart(hosts, {.world = hosts.world(), .stage = stage, .seed = 9});
    EXPECT_EQ(restarted.steps, 2);
    EXPECT_EQ(restarted.problem, "");
    EXPECT_TRUE(bit_equal(restarted.state, saved));
  }
}

INSTANTIATE_TEST_SUITE_P(HostFolders, Layouts,
                         ::testing::Values(std::vector{2, 2}, std::vector{1, 3}, std::vector{1, 1, 2},
                                           std::vector{1, 2, 1, 1, 1}),
                         [](const auto& info) { return "Ranks" + join(info.param, "_"); });

/// Names of the ranks' files of the only checkpoint in the folder.
std::set<std::string> rank_files(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.path().filename().string().starts_with("rank_")) names.insert(entry.path().filename());
  return names;
}

TEST(HostFolders, EachFileLiesOnTwoHosts) {
  const Hosts hosts({1, 1, 1, 1});
  train(hosts, {.world = 4, .stage = 2}, 3);
  for (size_t host = 0; host < 4; ++host) {
    const size_t first = host / 2 * 2;
    EXPECT_EQ(rank_files(hosts.folder(host)),
              (std::set{str("rank_0000", first, ".h5"), str("rank_0000", first + 1, ".h5")}));
    EXPECT_THAT(checkpoint::list_checkpoints(hosts.folder(host)), ::testing::ElementsAre("global_step3"));
  }
}

TEST(HostFolders, RanksReadOnlyWhatTheyNeed) {
  Hosts hosts({1, 1, 1, 1});
  const Job job{.world = 4, .stage = 3};
  const Tensors saved = train(hosts, job, 1);
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
    const HostFolders::Found found = folders->find(steps_of);
    Trained trained(job, comm);
    LoadOptions options;
    options.folders = folders.get();
    trained.engine->load_checkpoint(folders->path(), found.tag, options);
    EXPECT_TRUE(bit_equal(whole_state(*trained.engine), saved));
  });
  // Buffers are in rank 0's file: that is sent to the other pair of hosts, and nothing else to anyone.
  EXPECT_EQ(rank_files(hosts.folder(1)), (std::set<std::string>{"rank_00000.h5", "rank_00001.h5"}));
  EXPECT_EQ(rank_files(hosts.folder(2)),
            (std::set<std::string>{"rank_00000.h5", "rank_00002.h5", "rank_00003.h5"}));
}

TEST(HostFolders, WhatIsBroughtIsRemovedAfterTheLoad) {
  Hosts hosts({1, 1, 1, 1});
  const Job job{.world = 4, .stage = 1};
  train(hosts, job, 1);
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
    folders->find(steps_of);
    folders->bring({0, 1, 2, 3});
    EXPECT_THAT(rank_files(folders->path()), ::testing::SizeIs(4));
    comm->barrier("looked");
    folders->release();
    EXPECT_THAT(rank_files(folders->path()), ::testing::SizeIs(2));
    EXPECT_EQ(folders->find(steps_of).tag, "global_step1");
  });
}

/// Fails when `operation` is carried out on a file of that name.
auto fails(std::string operation, std::string name) {
  return [operation = std::move(operation), name = std::move(name)](std::string_view done,
                                                                    const fs::path& path) {
    if (done == operation && path.filename().string().find(name) != std::string::npos)
      throw DiskError("no space left (injected)");
  };
}

// Each phase of a save, on one host: the others have published it already, or have their copies.
TEST(HostFolders, ASaveThatFailsOnOneHostIsRemovedOnAll) {
  Hosts hosts({1, 1});
  const Job job{.world = 2, .stage = 2};
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const fs::path mine = hosts.folder_of(comm->rank());
    Trained trained(job, comm);
    for (const char* operation : {"write", "rename"}) {
      const auto good = HostFolders::join(comm, mine);
      trained.step();
      trained.engine->save_in_memory(*good, {{"who", "me"}});
      const std::string before = str("global_step", trained.engine->global_steps());
      const ScopedHostFoldersProbe probe(comm->rank() == 1 ? fails(operation, "rank_00000.h5") : DiskProbe());
      const auto bad = HostFolders::join(comm, mine);
      for (int i = 0; i < 2; ++i) {
        trained.step();
        EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->save_in_memory(*bad, {}); }),
                    AllOf(HasSubstr("rank 1"), HasSubstr("no space left (injected)")));
        comm->barrier("looked at");
        EXPECT_THAT(checkpoint::list_checkpoints(mine), ::testing::ElementsAre(before));
        comm->barrier("looked");
      }
      EXPECT_EQ(good->find(steps_of).tag, before);
    }
  });
}

TEST(HostFolders, ASecondSaveOfAStepThatFailsLeavesTheFirst) {
  Hosts hosts({1, 1});
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const fs::path mine = hosts.folder_of(comm->rank());
    const auto folders = HostFolders::join(comm, mine);
    Trained trained({.world = 2, .stage = 2}, comm);
    trained.step();
    trained.engine->save_in_memory(*folders, {{"who", "me"}});
    const auto expect_the_first = [&] {
      comm->barrier("tried");
      EXPECT_THAT(checkpoint::list_checkpoints(mine), ::testing::ElementsAre("global_step1"));
      const HostFolders::Found found = folders->find(steps_of);
      EXPECT_EQ(found.tag, "global_step1");
      EXPECT_EQ(found.problem, "");
      EXPECT_EQ(found.state.at("client_state"), nlohmann::json({{"who", "me"}}));
    };
    for (const auto& [operation, file] :
         {std::pair("write", "rank_00001.h5"), std::pair("exchange", "global_step1")}) {
      const ScopedCheckpointProbe probe(comm->rank() == 1 ? fails(operation, file) : DiskProbe());
      EXPECT_THAT(
          error_of<CheckpointError>([&] { trained.engine->save_in_memory(*folders, {{"who", "other"}}); }),
          AllOf(HasSubstr("rank 1"), HasSubstr("no space left (injected)")))
          << operation;
      expect_the_first();
    }
    EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->save_in_memory(*folders, {{"loss", NAN}}); }),
                AllOf(HasSubstr("rank 0"), HasSubstr("state.client_state.loss: found nan")));
    expect_the_first();
  });
}

TEST(HostFolders, FilesThatCannotBeBroughtAreAnErrorOnAllRanks) {
  Hosts hosts({1, 1, 1, 1});
  const Job job{.world = 4, .stage = 1};
  const Tensors saved = train(hosts, job, 1);
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    const fs::path mine = hosts.folder_of(comm->rank());
    const ScopedHostFoldersProbe probe(comm->rank() == 2 ? fails("write", "rank_00001.h5") : DiskProbe());
    const auto bad = HostFolders::join(comm, mine);
    const HostFolders::Found found = bad->find(steps_of);
    Trained trained(job, comm);
    const Tensors before = whole_state(*trained.engine);
    LoadOptions options;
    options.folders = bad.get();
    EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->load_checkpoint(mine, found.tag, options); }),
                AllOf(HasSubstr("rank 2"), HasSubstr("no space left (injected)")));
    EXPECT_TRUE(bit_equal(whole_state(*trained.engine), before));
    if (comm->rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_EQ(error_of<CommError>([&] { comm->exchange(1, "they go on together"); }), "");
    bad->release();
    EXPECT_THAT(rank_files(mine), ::testing::SizeIs(2));
  });
  EXPECT_TRUE(bit_equal(restart(hosts, job).state, saved));
}

void damage(const fs::path& file) { flip_bit(file, static_cast<int64_t>(fs::file_size(file) / 2), 3); }

TEST(HostFolders, ADamagedFileIsTakenFromThePartner) {
  Hosts hosts({1, 1});
  const Job job{.world = 2, .stage = 2};
  const Tensors saved = train(hosts, job, 2);
  damage(hosts.folder(0) / "global_step2" / "rank_00000.h5");
  fs::resize_file(hosts.folder(1) / "global_step2" / "rank_00001.h5", 100);
  const Restarted restarted = restart(hosts, job);
  EXPECT_EQ(restarted.problem, "");
  EXPECT_TRUE(bit_equal(restarted.state, saved));
}

TEST(HostFolders, WhatIsWholeNowhereIsNotUsed) {
  Hosts hosts({1, 1});
  const Job job{.world = 2, .stage = 2};
  train(hosts, job, 2);
  for (size_t host : {0, 1}) damage(hosts.folder(host) / "global_step2" / "rank_00001.h5");
  const Restarted restarted = restart(hosts, job);
  EXPECT_THAT(restarted.state, IsEmpty());
  EXPECT_THAT(restarted.problem, AllOf(HasSubstr("rank_00001.h5: block"), HasSubstr("is damaged")));
}

/// As after a crash between the publications of two hosts: the checkpoint before is everywhere, the new one
/// on some.
TEST(HostFolders, AnUnfinishedSaveLeavesTheOneBefore) {
  for (const bool is_first_done : {true, false}) {
    Hosts hosts({1, 2});
    const Job job{.world = 3, .stage = 1};
    const Tensors saved = train(hosts, job, 1);
    const TestFolder before("before");
    fs::copy(hosts.base.string(), before / "all", fs::copy_options::recursive);
    on_ranks(3, [&](comm::CommunicatorPtr comm) {
      const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
      const HostFolders::Found found = folders->find(steps_of);
      Trained trained(job, comm);
      LoadOptions options;
      options.folders = folders.get();
      trained.engine->load_checkpoint(folders->path(), found.tag, options);
      trained.step();
      trained.engine->save_in_memory(*folders, {{"who", "me"}});
    });
    // The one that is done has its own file only: copies are sent when all are done.
    const size_t done = is_first_done ? 0 : 1, open = 1 - done;
    fs::remove_all(hosts.folder(open));
    fs::copy(fs::path(before / "all") / hosts.names[open], hosts.folder(open), fs::copy_options::recursive);
    fs::copy(fs::path(before / "all") / hosts.names[done] / "global_step1",
             hosts.folder(done) / "global_step1", fs::copy_options::recursive);
    for (const char* file : {"rank_00000.h5", "rank_00001.h5", "rank_00002.h5"})
      if ((std::string(file) == "rank_00000.h5") == (open == 0))
        fs::remove(hosts.folder(done) / "global_step2" / file);
    const Restarted restarted = restart(hosts, job);
    EXPECT_EQ(restarted.steps, 1);
    EXPECT_THAT(restarted.problem, HasSubstr("rank_0000"));
    EXPECT_TRUE(bit_equal(restarted.state, saved));
  }
}

TEST(HostFolders, AFolderThatIsGoneIsAnErrorAndNotMadeAgain) {
  const Hosts hosts({1, 1});
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
    Trained trained({.world = 2, .stage = 2}, comm);
    trained.step();
    trained.engine->save_in_memory(*folders, {});
    comm->barrier("saved");
    if (comm->rank() == 1) fs::remove_all(hosts.folder(1));
    trained.step();
    EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->save_in_memory(*folders, {}); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("the folder is gone")));
    EXPECT_THAT(error_of<CheckpointError>([&] { folders->find(steps_of); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("host1: there is no such folder")));
    trained.step();  // training goes on
  });
  EXPECT_FALSE(fs::exists(hosts.folder(1)));
  EXPECT_THAT(checkpoint::list_checkpoints(hosts.folder(0)), ::testing::ElementsAre("global_step1"));
  EXPECT_EQ(std::distance(fs::directory_iterator(hosts.folder(0)), fs::directory_iterator()), 2)
      << "and latest";
}

TEST(HostFolders, RowsOfRanks) {
  Hosts hosts({2, 2});
  const Job job{.world = 4, .stage = 3, .mics_shard_size = 2};
  const Tensors saved = train(hosts, job, 2);
  hosts.lose(0);
  const Restarted restarted = restart(hosts, {.world = 2, .stage = 3, .seed = 9});
  EXPECT_TRUE(bit_equal(restarted.state, saved));
}

TEST(HostFolders, AFolderThatOthersMayWriteToIsRefused) {
  Hosts hosts({1, 1});
  ::chmod(hosts.folder(1).c_str(), 0770);
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    EXPECT_THAT(error_of<CheckpointError>([&] { HostFolders::join(comm, hosts.folder_of(comm->rank())); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("mode 40770; expected a folder of user")));
  });
}

TEST(HostFolders, AFolderMayBeMadeAfterTheRanks) {
  Hosts hosts({1, 1});
  fs::remove_all(hosts.folder(1));
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    std::thread late;
    if (comm->rank() == 1)
      late = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        fs::create_directory(hosts.folder(1));
      });
    const auto folders = HostFolders::join(comm, hosts.folder_of(comm->rank()));
    if (late.joinable()) late.join();
    EXPECT_EQ(folders->num_hosts(), 2);
    EXPECT_EQ(folders->find(steps_of).tag, "");
  });
}

TEST(HostFolders, ThereAreNoneWhereOneRankHasNone) {
  const Hosts hosts({1, 1});
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    EXPECT_EQ(HostFolders::join(comm, comm->rank() == 0 ? hosts.folder(0) : fs::path()), nullptr);
  });
}

}  // namespace
}  // namespace tessera::testing
