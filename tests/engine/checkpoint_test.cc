// Saving and loading through the engine: resharding, resuming, refusing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/reader.h"
#include "tests/engine/checkpoint_testing.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

struct Job {
  int world = 1, stage = 0;
  std::string optimizer = "AdamW";
  std::string precision = "fp32";
  int64_t unit_numel = 150;
  double dropout = 0;
  uint64_t seed = 1;
  CheckpointConfig checkpoint{.async = false, .keep_last = 0, .fsync = false};
};

/// A model and its engine on one rank.
struct Trained {
  Trained(const Job& setup, comm::CommunicatorPtr comm, Logger log = {}) : model(setup.dropout) {
    fill_parameters(*model, setup.seed);
    Case c = small_units(comm->size(), setup.stage);
    c.optimizer = setup.optimizer;
    c.config.zero.unit_numel = setup.unit_numel;
    c.config.bf16 = setup.precision == "bf16";
    c.config.fp16.enabled = setup.precision == "fp16";
    c.config.fp16.loss_scale_window = 3;
    c.config.checkpoint = setup.checkpoint;
    InitOptions init;
    init.log = log;
    engine = initialize(model, engine_config(c), comm, init);
  }
  double step() {
    const at::Tensor loss = saved_net_loss(*model, engine->global_steps(), engine->rank());
    engine->backward(loss);
    engine->step();
    return loss.item<double>();
  }
  SavedNet model;
  std::unique_ptr<Engine> engine;
};

// -------------------------------------------------------------------------------------------- resharding

class Resharding : public ::testing::TestWithParam<int> {};  // world that loads

// Saved at every world and stage once; the world of the parameter loads each at
// every stage, with units of another size.
TEST_P(Resharding, AnyWorldAndStageLoadsAnyOther) {
  const TestFolder folder(str("resharding", GetParam()));
  std::map<std::string, Tensors> states, buffers;
  for (int world : {1, 2, 3, 4, 8})
    for (int stage = 0; stage <= 3; ++stage) {
      const std::string tag = str("world", world, "stage", stage);
      on_ranks(world, [&](comm::CommunicatorPtr comm) {
        Trained trained({.world = world, .stage = stage}, comm);
        for (int i = 0; i < 3; ++i) trained.step();
        trained.engine->save_checkpoint(folder.string(), tag, {{"who", tag}});
        Tensors state = whole_state(*trained.engine);
        if (comm->rank() == 0) states[tag] = std::move(state), buffers[tag] = buffers_of(*trained.engine);
      });
    }
  EXPECT_FALSE(bit_equal(states["world1stage0"], states["world2stage0"])) << "or the test shows nothing";
  on_ranks(GetParam(), [&](comm::CommunicatorPtr comm) {
    for (int stage = 0; stage <= 3; ++stage) {
      Trained trained({.stage = stage, .unit_numel = 400, .seed = 9}, comm);
      trained.step();  // something to be overwritten
      for (const auto& [tag, expected] : states) {
        const LoadedCheckpoint loaded = trained.engine->load_checkpoint(folder.string(), tag);
        EXPECT_EQ(loaded.client_state.at("who"), tag);
        EXPECT_THAT(loaded.not_loaded, IsEmpty());
        EXPECT_TRUE(bit_equal(whole_state(*trained.engine), expected)) << tag << " at stage " << stage;
        EXPECT_TRUE(bit_equal(buffers_of(*trained.engine), buffers.at(tag))) << tag << " at stage " << stage;
        EXPECT_EQ(trained.engine->global_steps(), 3);
        EXPECT_TRUE(std::isfinite(trained.step())) << "training goes on";
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Resharding, ::testing::Values(1, 2, 3, 4, 8),
                         [](const auto& info) { return str("World", info.param); });

// ---------------------------------------------------------------------------------------------- resuming

struct Outcome {
  std::vector<double> losses;
  Tensors state;
};

/// Six steps, on rank 0's view; saved after three, or resumed there. fp16 overflows on the way.
Outcome run(const Job& setup, const std::string& folder, bool resume) {
  Outcome outcome;
  on_ranks(setup.world, [&](comm::CommunicatorPtr comm) {
    if (comm->rank() == 0) at::manual_seed(resume ? 77 : 3);
    comm->barrier("seed");
    Trained trained(setup, comm);
    if (resume) trained.engine->load_checkpoint(folder);
    while (trained.engine->global_steps() < 6) {
      const double loss = trained.step();
      if (comm->rank() == 0 && trained.engine->global_steps() > 3) outcome.losses.push_back(loss);
      if (!resume && trained.engine->global_steps() == 3) trained.engine->save_checkpoint(folder);
    }
    Tensors state = whole_state(*trained.engine);
    if (comm->rank() == 0) outcome.state = std::move(state);
  });
  return outcome;
}

TEST(Resume, IsBitIdenticalAtEveryStageAndPrecision) {
  for (int world : {1, 2})
    for (int stage = 0; stage <= 3; ++stage)
      for (const std::string precision : {"fp32", "bf16", "fp16"}) {
        SCOPED_TRACE(str("world ", world, " stage ", stage, " ", precision));
        const TestFolder folder("resume");
        // Ranks as threads share a generator, so that dropout can be compared on one rank
        // only (on several: the trainer's test).
        const Job setup{
            .world = world, .stage = stage, .precision = precision, .dropout = world == 1 ? 0.3 : 0};
        const Outcome whole = run(setup, folder.string(), false), resumed = run(setup, folder.string(), true);
        EXPECT_EQ(whole.losses, resumed.losses);
        EXPECT_EQ(whole.losses.size(), 3u);
        EXPECT_TRUE(bit_equal(whole.state, resumed.state));
      }
}

TEST(Resume, WithEveryOptimizer) {
  for (const std::string optimizer : {"Adam", "SGD", "Adagrad", "Lion", "LAMB"}) {
    const TestFolder folder("optimizers");
    Job setup{.world = 2, .stage = 2};
    setup.optimizer = optimizer;
    const Outcome whole = run(setup, folder.string(), false), resumed = run(setup, folder.string(), true);
    EXPECT_EQ(whole.losses, resumed.losses) << optimizer;
    EXPECT_TRUE(bit_equal(whole.state, resumed.state)) << optimizer;
  }
}

TEST(Resume, TheLossScaleGoesOn) {
  const TestFolder folder("scale");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 3, .precision = "fp16"}, comm);
    for (int i = 0; i < 5; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string());
    Trained resumed({.world = 2, .stage = 1, .precision = "fp16"}, comm);
    resumed.engine->load_checkpoint(folder.string(), "global_step5");
    EXPECT_EQ(resumed.engine->loss_scale(), trained.engine->loss_scale());
    EXPECT_EQ(resumed.engine->skipped_steps(), trained.engine->skipped_steps());
    EXPECT_EQ(resumed.engine->micro_steps(), 5);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(resumed.step(), trained.step());
      EXPECT_EQ(resumed.engine->loss_scale(), trained.engine->loss_scale());
    }
  });
}

TEST(Resume, PrecisionMayChange) {
  const TestFolder folder("precision");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 2, .precision = "bf16"}, comm);
    for (int i = 0; i < 3; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string());
    for (const std::string precision : {"fp32", "bf16", "fp16"}) {
      Trained other({.world = 2, .stage = 3, .precision = precision, .seed = 5}, comm);
      other.engine->load_checkpoint(folder.string());
      Tensors state = whole_state(*other.engine), expected = whole_state(*trained.engine);
      EXPECT_TRUE(bit_equal(state, expected)) << precision << ": masters and moments are fp32 everywhere";
      EXPECT_TRUE(std::isfinite(other.step()));
    }
  });
}

// ---------------------------------------------------------------------------------------------- refusing

struct OtherNetImpl : torch::nn::Module {
  OtherNetImpl() {
    table = register_module("table", torch::nn::Embedding(20, 9));  // 19 when saved
    middle = register_module("middle", torch::nn::Linear(9, 9));
    added = register_module("added", torch::nn::Linear(9, 2));
    fill_parameters(*this, 4);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return added->forward(middle->forward(table->forward(tokens))).square().mean();
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear middle{nullptr}, added{nullptr};
};
TORCH_MODULE(OtherNet);

TEST(Load, NamesWhatDoesNotFitAndLoadsTheRestWhenAsked) {
  const TestFolder folder("other");
  Tensors saved;
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 1}, comm);
    trained.step();
    trained.engine->save_checkpoint(folder.string());
    Tensors state = whole_state(*trained.engine);
    if (comm->rank() == 0) saved = std::move(state);
  });
  on_ranks(3, [&](comm::CommunicatorPtr comm) {
    OtherNet model;
    Case c = small_units(3, 3);
    c.optimizer = "AdamW";
    auto engine = initialize(model, engine_config(c), comm);
    const Tensors before = whole_state(*engine);
    EXPECT_THAT(error_of<CheckpointError>([&] { engine->load_checkpoint(folder.string()); }),
                AllOf(HasSubstr("global_step1"), HasSubstr("added.weight"), HasSubstr("frozen.weight"),
                      HasSubstr("table.weight"), HasSubstr("[19, 9] in the checkpoint, [20, 9] in the model"),
                      HasSubstr("strict")));
    EXPECT_TRUE(bit_equal(whole_state(*engine), before)) << "nothing changed";

    const LoadedCheckpoint loaded = engine->load_checkpoint(folder.string(), "", {.strict = false});
    EXPECT_THAT(loaded.not_loaded, ::testing::Contains(HasSubstr("added.bias: not in the checkpoint")));
    EXPECT_THAT(loaded.not_loaded,
                ::testing::Contains(HasSubstr("buffer norm.running_mean: not in the model")));
    const Tensors after = whole_state(*engine);
    for (const char* name : {"middle.weight", "middle.bias", "middle.weight exp_avg",
                             "middle.bias exp_avg_sq", "middle.weight steps"})
      EXPECT_TRUE(at::equal(after.at(name), saved.at(name))) << name;
    for (const char* name : {"table.weight", "added.weight", "added.bias exp_avg"})
      EXPECT_TRUE(at::equal(after.at(name), before.at(name))) << name;
  });
}

TEST(Load, AnotherOptimizersStateIsRefusedOrLeftOut) {
  const TestFolder folder("optimizer");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 2}, comm);
    trained.step();
    trained.engine->save_checkpoint(folder.string());
    Job setup{.world = 2, .stage = 3, .seed = 8};
    setup.optimizer = "SGD";
    Trained other(setup, comm);
    EXPECT_THAT(
        error_of<CheckpointError>([&] { other.engine->load_checkpoint(folder.string()); }),
        AllOf(HasSubstr("AdamW was saved with exp_avg, exp_avg_sq"), HasSubstr("SGD needs momentum_buffer")));
    EXPECT_EQ(other.engine->global_steps(), 0);
    other.engine->load_checkpoint(folder.string(), "", {.load_optimizer_states = false});
    EXPECT_EQ(other.engine->global_steps(), 1);
    EXPECT_TRUE(at::equal(other.engine->full_parameter("middle.weight"),
                          trained.engine->full_parameter("middle.weight")));
    Trained module_only({.world = 2, .stage = 0, .seed = 8}, comm);
    module_only.engine->load_checkpoint(folder.string(), "", {.load_module_only = true});
    EXPECT_EQ(module_only.engine->global_steps(), 0);
    EXPECT_TRUE(at::equal(module_only.engine->full_parameter("middle.weight"),
                          trained.engine->full_parameter("middle.weight")));
  });
}

struct WideImpl : torch::nn::Module {
  explicit WideImpl(int64_t rows) {
    register_parameter("weight", at::ones({rows, 1 << 20}) * 0.5);
  }  // 4 MiB of fp32 a row
};

std::unique_ptr<TypedEngine<WideImpl>> wide_engine(int64_t rows, comm::CommunicatorPtr comm, int stage) {
  Case c;
  c.world = comm->size();
  c.optimizer = "AdamW";
  c.config.zero.stage = stage;
  c.config.checkpoint.fsync = false;
  return initialize(std::make_shared<WideImpl>(rows), engine_config(c), comm);
}

void flip_bit(const checkpoint::Checkpoint& saved, int rank, const std::string& dataset) {
  std::fstream file(saved.path() / str("rank_0000", rank, ".h5"),
                    std::ios::in | std::ios::out | std::ios::binary);
  const int64_t place = saved.dataset(rank, dataset).offset + 5;
  file.seekg(place);
  const char byte = static_cast<char>(file.get() ^ 4);
  file.seekp(place);
  file.put(byte);
}

// Damage in one rank's file that only one of the loading ranks reads: all of them must refuse, unchanged.
TEST(Load, DamageIsFoundBeforeAnythingChanges) {
  const TestFolder folder("damage");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 3}, comm);
    for (int i = 0; i < 2; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string());
    comm->barrier("saved");
    if (comm->rank() == 0)
      flip_bit(checkpoint::Checkpoint::open(folder.string()), 1, "/exp_avg_sq/unit_00000");
    comm->barrier("damaged");
    Trained other({.world = 2, .stage = 2, .seed = 8}, comm);
    const Tensors before = whole_state(*other.engine);
    EXPECT_THAT(error_of<CheckpointError>([&] { other.engine->load_checkpoint(folder.string()); }),
                AllOf(HasSubstr("rank_00001.h5"), HasSubstr("damaged")));
    EXPECT_TRUE(bit_equal(whole_state(*other.engine), before));
    EXPECT_TRUE(std::isfinite(other.step()));
  });
}

// The weights are sound; the random numbers, blocks away from them and read by one rank alone, are not.
TEST(Load, DamagedRandomNumbersAreFoundBeforeAnythingChangesToo) {
  const TestFolder folder("damaged_rng");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    wide_engine(4, comm, 2)->save_checkpoint(folder.string());
    comm->barrier("saved");
    if (comm->rank() == 0) flip_bit(checkpoint::Checkpoint::open(folder.string()), 1, "/blobs/rng_cpu");
    comm->barrier("damaged");
    auto other = wide_engine(4, comm, 3);
    EXPECT_THAT(error_of<CheckpointError>(
                    [&] { other->load_checkpoint(folder.string(), "", {.load_optimizer_states = false}); }),
                AllOf(HasSubstr("rank_00001.h5"), HasSubstr("/blobs/rng_cpu"), HasSubstr("damaged")));
    EXPECT_EQ(other->global_steps(), 0);
    EXPECT_EQ(other->full_parameter("weight").max().item<float>(), 0.5f) << "and the engine goes on";
  });
}

TEST(Load, WhatIsNotThere) {
  const TestFolder folder("absent");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 0}, comm);
    EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->load_checkpoint(folder / "nowhere"); }),
                HasSubstr("nowhere"));
    trained.engine->save_checkpoint(folder.string(), "one");
    EXPECT_THAT(error_of<CheckpointError>([&] { trained.engine->load_checkpoint(folder.string(), "two"); }),
                AllOf(HasSubstr("two"), HasSubstr("one")));
  });
}

TEST(Save, OnlyBetweenUpdates) {
  const TestFolder folder("between");
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Trained trained({}, comm);
    trained.engine->backward(saved_net_loss(*trained.model, 0, 0));
    EXPECT_THAT(error_of([&] { trained.engine->save_checkpoint(folder.string()); }),
                HasSubstr("gradients are not saved"));
    EXPECT_THAT(error_of([&] { trained.engine->load_checkpoint(folder.string()); }),
                HasSubstr("between backward() and"));
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

TEST(AsyncSave, HoldsTheMomentItWasCalledIn) {
  for (int stage = 0; stage <= 3; ++stage) {
    const TestFolder folder("async");
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      Job setup{.world = 2, .stage = stage, .precision = "bf16"};
      setup.checkpoint.async = true;
      Trained trained(setup, comm);
      trained.step();
      std::vector<Tensors> moments;
      for (int i = 0; i < 4; ++i) {
        trained.engine->save_checkpoint(folder.string());  // the one before may still be on its way
        moments.push_back(whole_state(*trained.engine));
        trained.step();
      }
      trained.engine->finish_checkpoint();
      for (int i = 0; i < 4; ++i) {
        Trained other({.world = 2, .stage = 3 - stage, .seed = 8}, comm);
        other.engine->load_checkpoint(folder.string(), str("global_step", i + 1));
        EXPECT_TRUE(bit_equal(whole_state(*other.engine), moments[i]))
            << "stage " << stage << " step " << i + 1;
      }
    });
  }
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
    trained.engine->finish_checkpoint();  // said once
    trained.engine->save_checkpoint(folder / "a_file", "bad");
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isfinite(trained.step()));
    if (comm->rank() == 0) {
      EXPECT_EQ(num_warnings(log_file), 1) << "at a step, without being asked, and once";
    }
    trained.engine->save_checkpoint(folder.string(), "better");
    trained.engine->finish_checkpoint();  // of the last save; the one that failed was logged
    trained.engine->save_checkpoint(folder / "a_file", "bad");
  });  // the engine goes without being asked how the save went
  EXPECT_EQ(num_warnings(log_file), 2);
  EXPECT_EQ(checkpoint::find_checkpoint(folder.string(), "").filename(), "better");
}

// A step may find the failed save ended on one rank and still running on another. That must not show in what
// is thrown: a rank that loads while the others give up would wait for them.
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

// -------------------------------------------------------------------------------------------- bytes, stop

TEST(Load, EachRankReadsItsPartOnly) {
  constexpr int64_t kStateBytes = int64_t{24 << 20} * 3 * 4;
  const TestFolder folder("bytes");
  const auto engine_of = [&](comm::CommunicatorPtr comm, int stage) { return wide_engine(24, comm, stage); };
  on_ranks(3, [&](comm::CommunicatorPtr comm) { engine_of(comm, 3)->save_checkpoint(folder.string()); });
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    for (int stage : {0, 3}) {
      const int64_t needed = stage == 0 ? kStateBytes : kStateBytes / 4;
      const LoadedCheckpoint loaded = engine_of(comm, stage)->load_checkpoint(folder.string());
      EXPECT_GE(loaded.bytes_read, 2 * needed) << "verified, then read";
      EXPECT_LE(loaded.bytes_read, 2 * needed + (int64_t{40} << 20))
          << "and the rest of blocks cut on either side";
    }
  });
}

struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    for (int i = 0; i < 24; ++i)
      register_parameter(str("p", i), at::ones({1 << 16}));  // 256 KiB, a unit each
  }
};

// On many ranks a slice of a unit is far smaller than the 1 MiB that is verified at a time.
TEST(Load, ABlockWithManySlicesIsReadOnce) {
  const TestFolder folder("slices");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c;
    c.world = 2;
    c.optimizer = "AdamW";
    c.config.zero.stage = 3;
    c.config.zero.unit_numel = 1 << 16;
    c.config.checkpoint.fsync = false;
    const auto engine = initialize(std::make_shared<ManyImpl>(), engine_config(c), comm);
    engine->save_checkpoint(folder.string());
    const LoadedCheckpoint loaded = engine->load_checkpoint(folder.string());
    const int64_t file_bytes =
        checkpoint::Checkpoint::open(folder.string()).manifest().rank_file(comm->rank()).bytes;
    EXPECT_GE(file_bytes, int64_t{9 << 20});
    EXPECT_LE(loaded.bytes_read, 2 * file_bytes + (int64_t{2} << 20)) << "verified, then read";
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
