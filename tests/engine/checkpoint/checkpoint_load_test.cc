// Loading: what is refused, damage, and the bytes read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/convert_checkpoint.h"
#include "checkpoint/read/reader.h"
#include "core/str.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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

TEST(Load, RanksThatHaveOpenedOtherContentAreRefused) {
  const TestFolder folder("other_content");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 2}, comm);
    for (const char* host : {"first", "second"}) {
      trained.step();
      trained.engine->save_checkpoint(folder / host, "best");
    }
  });
  for (const char* host : {"first", "second"}) {
    checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
    options.directory = folder / host;
    options.output = std::filesystem::path(folder / host) / "model.safetensors";
    checkpoint::convert_checkpoint(options);
  }
  for (const int stage : {0, 2, 3})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {  // as on two hosts, of which one has an older copy
      Trained other({.world = 2, .stage = stage, .seed = 8}, comm);
      const Tensors before = whole_state(*other.engine);
      const std::string mine = folder / (other.engine->rank() == 0 ? "first" : "second");
      const auto expect_refused = [&](const std::function<void()>& load) {
        EXPECT_THAT(error_of<CheckpointError>(load),
                    HasSubstr(": rank 1 has opened other content than rank 0"));
      };
      expect_refused([&] { other.engine->load_checkpoint(mine, "best"); });
      expect_refused([&] { other.engine->load_weights(mine + "/model.safetensors"); });
      EXPECT_TRUE(bit_equal(whole_state(*other.engine), before));
      other.engine->load_checkpoint(folder / "second", "best");
      EXPECT_EQ(other.engine->global_steps(), 2);
    });
}

TEST(Load, TheScheduleGoesOnWhereItIsWhenAsked) {
  const TestFolder folder("schedule");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 3}, comm);
    for (int i = 0; i < 3; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string(), "three");
    Trained other({.world = 2, .stage = 1, .seed = 8}, comm);
    other.engine->load_checkpoint(folder.string(), "three", {.load_lr_scheduler_states = false});
    EXPECT_EQ(other.engine->global_steps(), 3);
    EXPECT_EQ(other.engine->schedule_steps(), 0);
    other.step();
    EXPECT_EQ(other.engine->schedule_steps(), 1);
    other.engine->save_checkpoint(folder.string(), "four");
    Trained third({.world = 2, .stage = 2, .seed = 8}, comm);
    third.engine->load_checkpoint(folder.string());
    EXPECT_EQ(third.engine->global_steps(), 4);
    EXPECT_EQ(third.engine->schedule_steps(), 1);
    third.engine->load_checkpoint(folder.string(), "three");
    EXPECT_EQ(third.engine->schedule_steps(), 3);
  });
}

struct CodedImpl : torch::nn::Module {
  explicit CodedImpl(at::ScalarType type) {
    layer = register_module("layer", torch::nn::Linear(3, 2));
    codes = register_parameter("codes", at::arange(6, at::kFloat).mul(0.3).to(type), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x) + codes.to(at::kFloat).mean(); }
  torch::nn::Linear layer{nullptr};
  at::Tensor codes;
};
TORCH_MODULE(Coded);

// 0.3 would become 0.
TEST(Load, FrozenIntegersTakeNoFractions) {
  const TestFolder folder("codes");
  for (const int stage : {0, 3})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      const Case c = small_units(2, stage);
      Coded fractions(at::kFloat), integers(at::kChar);
      const auto from = initialize(fractions, engine_config(c), comm);
      from->save_checkpoint(folder.string(), "fractions");
      if (comm->rank() == 0) {
        checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
        options.directory = folder.string();
        options.output = folder / "model.safetensors";
        checkpoint::convert_checkpoint(options);
      }
      comm->barrier("consolidated");
      const auto engine = initialize(integers, engine_config(c), comm);
      const Tensors before = whole_state(*engine);
      for (const bool strict : {true, false})
        EXPECT_THAT(error_of<CheckpointError>(
                        [&] { engine->load_checkpoint(folder.string(), "fractions", {.strict = strict}); }),
                    AllOf(HasSubstr("parameter codes: Float in the checkpoint, Char in the model")));
      EXPECT_THAT(error_of<CheckpointError>([&] { engine->load_weights(folder / "model.safetensors"); }),
                  AllOf(HasSubstr("codes: fp32 in the file, int8 in the model")));
      EXPECT_TRUE(bit_equal(whole_state(*engine), before)) << "nothing changed";
      engine->save_checkpoint(folder.string(), "integers");
      from->load_checkpoint(folder.string(), "integers");  // the other way nothing is lost
      EXPECT_TRUE(at::equal(from->full_parameter("codes"), engine->full_parameter("codes").to(at::kFloat)));
    });
}

TEST(Load, FrozenParametersAreLeftOutWhenAsked) {
  const TestFolder folder("frozen");
  for (const int stage : {0, 3})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      Trained trained({.world = 2, .stage = stage}, comm);
      for (int i = 0; i < 2; ++i) trained.step();
      trained.engine->save_checkpoint(folder.string(), "small", {{"epoch", 1}},
                                      {.save_latest = false, .exclude_frozen_parameters = true});
      const checkpoint::Checkpoint saved = checkpoint::Checkpoint::open(folder.string(), "small");
      for (const checkpoint::SavedParameter& parameter : saved.manifest().layout.parameters)
        EXPECT_EQ(parameter.name.find("frozen"), std::string::npos) << parameter.name;
      EXPECT_FALSE(std::filesystem::exists(folder / "latest"));
      Trained other({.world = 2, .stage = 3 - stage, .seed = 8}, comm);
      const Tensors before = whole_state(*other.engine), expected = whole_state(*trained.engine);
      EXPECT_THAT(error_of<CheckpointError>([&] { other.engine->load_checkpoint(folder.string(), "small"); }),
                  HasSubstr("frozen.weight"));
      const LoadedCheckpoint loaded =
          other.engine->load_checkpoint(folder.string(), "small", {.strict = false});
      EXPECT_THAT(loaded.not_loaded, ::testing::Contains(HasSubstr("frozen.bias: not in the checkpoint")));
      for (const auto& [name, value] : whole_state(*other.engine))
        EXPECT_TRUE(at::equal(value, (name.starts_with("frozen") ? before : expected).at(name))) << name;
      comm->barrier("done");
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

void damage(const checkpoint::Checkpoint& saved, int rank, const std::string& dataset) {
  flip_bit(saved.path() / saved.manifest().rank_file(rank).name,
           saved.manifest().rank_file(rank).datasets.find(dataset)->offset + 5, 2);
}

// Damage in one rank's file that only one of the loading ranks reads: all of them must refuse, unchanged.
TEST(Load, DamageIsFoundBeforeAnythingChanges) {
  const TestFolder folder("damage");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 3}, comm);
    for (int i = 0; i < 2; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string());
    comm->barrier("saved");
    if (comm->rank() == 0) damage(checkpoint::Checkpoint::open(folder.string()), 1, "/exp_avg_sq/unit_00000");
    comm->barrier("damaged");
    Trained other({.world = 2, .stage = 2, .seed = 8}, comm);
    const Tensors before = whole_state(*other.engine);
    EXPECT_THAT(error_of<CheckpointError>([&] { other.engine->load_checkpoint(folder.string()); }),
                AllOf(HasSubstr("rank_00001.h5"), HasSubstr("damaged")));
    EXPECT_TRUE(bit_equal(whole_state(*other.engine), before));
    EXPECT_TRUE(std::isfinite(other.step()));
  });
}

// Damage in the random number state, which one rank reads, in other blocks than the weights.
TEST(Load, DamagedRandomNumbersAreFoundBeforeAnythingChangesToo) {
  const TestFolder folder("damaged_rng");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    wide_engine(4, comm, 2)->save_checkpoint(folder.string());
    comm->barrier("saved");
    if (comm->rank() == 0) damage(checkpoint::Checkpoint::open(folder.string()), 1, "/blobs/rng_cpu");
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

TEST(Load, EachRankReadsItsPartOnly) {
  constexpr int64_t kStateBytes = int64_t{6 << 20} * 3 * 4;
  const TestFolder folder("bytes");
  const auto engine_of = [&](comm::CommunicatorPtr comm, int stage) { return wide_engine(6, comm, stage); };
  on_ranks(3, [&](comm::CommunicatorPtr comm) { engine_of(comm, 3)->save_checkpoint(folder.string()); });
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    for (int stage : {0, 3}) {
      const int64_t needed = stage == 0 ? kStateBytes : kStateBytes / 4;
      const LoadedCheckpoint loaded = engine_of(comm, stage)->load_checkpoint(folder.string());
      EXPECT_GE(loaded.bytes_read, 2 * needed) << "verified, then read";
      EXPECT_LE(loaded.bytes_read, 2 * needed + (int64_t{24} << 20))
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

}  // namespace
}  // namespace tessera::testing
