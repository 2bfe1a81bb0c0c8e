// Saving: when it is allowed, what is kept, asynchronous saves; and stopping on request.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "core/str.h"
#include "tests/comm/memory/host_only_transfer.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/log_file.h"
#include "tests/support/one_core.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(Save, NotBetweenTheLastBackwardAndTheUpdate) {
  const TestFolder folder("between");
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Trained trained({}, comm);
    trained.engine->backward(saved_net_loss(*trained.model, 0, 0));
    EXPECT_THAT(error_of([&] { trained.engine->save_checkpoint(folder.string()); }),
                HasSubstr("call step() first"));
    trained.engine->step();
    EXPECT_EQ(trained.engine->save_checkpoint(folder.string()), folder / "global_step1");
  });
}

TEST(Save, KeepsTheLastAndTheSpared) {
  const TestFolder folder("keep");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Job setup{.world = 2, .stage = 2};
    setup.checkpoint.keep_last = 2;
    Trained trained(setup, comm);
    for (int i = 0; i < 5; ++i) {
      trained.step();
      trained.engine->save_checkpoint(folder.string());
      if (i == 0) trained.engine->keep_checkpoints({"global_step1"});
    }
  });
  for (int step = 1; step <= 5; ++step)
    EXPECT_EQ(fs::exists(folder / str("global_step", step)), step == 1 || step >= 4) << step;
}

// ------------------------------------------------------------------------------------------ asynchronous

using Mode = comm::testing::HostOnlyTransfer::Mode;

/// Where the state is: in the host's memory, or on a device, which is host memory here.
class AsyncSaveOf : public ::testing::TestWithParam<std::optional<Mode>> {};

// On a device the copy is its own work: training's next update comes after it, and the host waits for
// nothing.
TEST_P(AsyncSaveOf, HoldsTheMomentItWasCalledIn) {
  using comm::testing::HostOnlyTransfer;
  for (int stage = 0; stage <= 3; ++stage) {
    const TestFolder folder("async");
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      const auto transfer = GetParam() ? std::make_shared<HostOnlyTransfer>(*GetParam()) : nullptr;
      Job setup{.world = 2,
                .stage = stage,
                .precision = "bf16",
                .transfer = transfer,
                .state_on_device = transfer != nullptr};
      setup.checkpoint.async = true;
      Trained trained(setup, comm);
      trained.step();
      const int64_t snapshot = trained.engine->measured_bytes().snapshot;
      EXPECT_GT(snapshot, 0);
      EXPECT_EQ(trained.engine->pinned_bytes(), transfer ? snapshot : 0);
      std::vector<Tensors> moments;
      for (int i = 0; i < 3; ++i) {
        moments.push_back(whole_state(*trained.engine));
        if (transfer) transfer->forget_copies();
        trained.engine->save_checkpoint(folder.string());  // the previous one may still be in flight
        if (transfer) {
          EXPECT_EQ(transfer->bytes(HostOnlyTransfer::Direction::kDown), snapshot);
        }
        trained.step();
      }
      trained.engine->finish_checkpoint();
      if (transfer) {
        EXPECT_THAT(transfer->violations(), ::testing::IsEmpty());
      }
      for (int i = 0; i < 3; ++i) {
        Trained other({.world = 2, .stage = 3 - stage, .seed = 8}, comm);
        other.engine->load_checkpoint(folder.string(), str("global_step", i + 1));
        EXPECT_TRUE(bit_equal(whole_state(*other.engine), moments[i]))
            << "stage " << stage << " step " << i + 1;
      }
    });
  }
}

std::string name_of_place(const ::testing::TestParamInfo<std::optional<Mode>>& info) {
  constexpr std::array<const char*, 3> kNames = {"Host", "DeviceAtLast", "DeviceOnThreads"};
  return kNames[info.index];
}

INSTANTIATE_TEST_SUITE_P(Places, AsyncSaveOf, ::testing::Values(std::nullopt, Mode::kLast, Mode::kOnThreads),
                         name_of_place);

TEST(AsyncSave, WithoutPageLockedMemoryIsCopiedByTheHost) {
  using comm::testing::HostOnlyTransfer;
  const TestFolder folder("async_pageable");
  const LogFile log;
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto transfer = std::make_shared<HostOnlyTransfer>(HostOnlyTransfer::Mode::kLast);
    transfer->refuse_memory();
    Job setup{.stage = 3, .transfer = transfer, .state_on_device = true};
    setup.checkpoint.async = true;
    Trained trained(setup, comm, log.logger());
    for (int round = 0; round < 12; ++round) {  // in some of them the writer is done at once
      trained.step();
      const Tensors moment = whole_state(*trained.engine);
      {
        testing::BusyCore core;
        std::thread([&] {  // whose writer gets a few thousandths of the core
          testing::run_on_one_core(/*idle=*/true);
          trained.engine->save_checkpoint(folder.string(), "a");
          core.begin();
        })
            .join();
        trained.step();
      }
      trained.engine->finish_checkpoint();
      trained.engine->load_checkpoint(folder.string(), "a");
      EXPECT_TRUE(bit_equal(whole_state(*trained.engine), moment)) << round;
    }
    EXPECT_THAT(transfer->copies(), ::testing::IsEmpty());
    EXPECT_EQ(trained.engine->pinned_bytes(), 0);
  });
  EXPECT_THAT(log.text(),
              HasSubstr("checkpoint.async: training will wait for the copies of checkpoints: no room "
                        "for "));
}

int num_warnings(const std::string& log_file) {
  std::ifstream log(log_file);
  int found = 0;
  for (std::string line; std::getline(log, line);) {
    if (line.find("a checkpoint was not written") == std::string::npos) continue;
    EXPECT_THAT(line, HasSubstr("a_file"));
    ++found;
  }
  return found;
}

TEST(AsyncSave, AFailureIsReportedAndTrainingGoesOn) {
  const TestFolder folder("async_failure");
  std::ofstream(folder / "a_file") << "in the way";
  const std::string log_file = folder / "log";
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Job setup{.world = 2, .stage = 2};
    setup.checkpoint.async = true;
    Trained trained(setup, comm,
                    comm->rank() == 0 ? Logger({.terminal = false, .file = log_file}) : Logger());
    trained.step();
    trained.engine->save_checkpoint(folder.string(), "good");
    trained.engine->finish_checkpoint();
    trained.engine->save_checkpoint(folder / "a_file", "bad");
    EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->finish_checkpoint(); }), HasSubstr("a_file"));
    trained.engine->finish_checkpoint();  // thrown once
    trained.engine->save_checkpoint(folder / "a_file", "bad");
    for (bool is_warned = false; !is_warned;) {  // when the save has failed
      EXPECT_TRUE(std::isfinite(trained.step()));
      is_warned = comm->exchange<int>(comm->rank() == 0 ? num_warnings(log_file) : 0, "warnings")[0] > 0;
    }
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isfinite(trained.step()));
    if (comm->rank() == 0) {
      EXPECT_EQ(num_warnings(log_file), 1) << "at a step, without being asked, and once";
    }
    trained.engine->save_checkpoint(folder.string(), "better");
    trained.engine->finish_checkpoint();  // of the last save; the one that failed was logged
    trained.engine->save_checkpoint(folder / "a_file", "bad");
  });  // destroys the engine without finish_checkpoint()
  EXPECT_EQ(num_warnings(log_file), 2);
  EXPECT_EQ(checkpoint::find_checkpoint(folder.string(), "").filename(), "better");
}

// At a step, a failed save may have ended on one rank and still run on another. All ranks must throw alike: a
// rank that loads while the others throw would wait for them.
TEST(AsyncSave, AFailureIsTheSameOnAllRanksWhoeverHasHeardOfIt) {
  const TestFolder folder("async_agreed");
  std::ofstream(folder / "a_file") << "in the way";
  for (int heard_by : {0, 1})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      Job setup{.world = 2, .stage = 2};
      setup.checkpoint.async = true;
      Trained trained(setup, comm);
      trained.step();
      trained.engine->save_checkpoint(folder.string(), "good");
      const auto fail_unheard_by_one = [&] {  // the other is in step() before the save can have ended
        const auto pause = std::chrono::milliseconds(comm->rank() == heard_by ? 150 : 0);
        std::this_thread::sleep_for(pause);
        trained.engine->save_checkpoint(folder / "a_file", "bad");
        std::this_thread::sleep_for(pause);
        trained.step();
      };
      fail_unheard_by_one();
      EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->finish_checkpoint(); }),
                  HasSubstr("a_file"));
      fail_unheard_by_one();
      EXPECT_TRUE(trained.engine->last_save_failed());
      EXPECT_EQ(trained.engine->load_checkpoint(folder.string()).tag, "good")
          << "what is whole can be loaded, on all ranks";
      EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->finish_checkpoint(); }),
                  HasSubstr("a_file"));
      EXPECT_FALSE(trained.engine->last_save_failed());
    });
}

TEST(Stop, ReachesAllRanksInTheSameStep) {
  for (int stage : {0, 3})
    on_ranks(3, [&](comm::CommunicatorPtr comm) {
      Trained trained({.world = 3, .stage = stage}, comm);
      trained.step();
      EXPECT_FALSE(trained.engine->should_stop());
      if (comm->rank() == 2) trained.engine->request_stop();
      trained.step();
      EXPECT_TRUE(trained.engine->should_stop());
    });
}

}  // namespace
}  // namespace tessera::testing
