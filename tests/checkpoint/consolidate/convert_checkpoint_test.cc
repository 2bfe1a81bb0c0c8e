// Checkpoints converted by convert_checkpoint(): what is refused, what is left when an operation fails, and
// the re-saved one element for element. (convert_libraries_test.py reads the others with torch; that runs go
// on from them in FSDP2 and DeepSpeed is shown by tests/peers/continued_suite.py.)
#include "checkpoint/consolidate/convert_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/training_state.h"
#include "checkpoint/read/reader.h"
#include "core/error.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MemoryFolder;
using testing::SampleModel;
using ::testing::ThrowsMessage;

namespace fs = std::filesystem;

class ConvertCheckpoint : public ::testing::Test {
 protected:
  fs::path source() const { return folder_.path() / "checkpoints"; }
  fs::path output() const { return folder_.path() / "out"; }
  ConvertOptions options(ConvertTarget target) const {
    ConvertOptions options;
    options.directory = source();
    options.output = output();
    options.target = target;
    options.disk.sync = false;
    return options;
  }
  void save(const SampleModel& model, const std::string& tag = "step") {
    for (const std::string& error : testing::save_all(model, source(), tag)) ASSERT_EQ(error, "");
  }
  /// Saves a model of these parameters on one rank, with a state of the engine's.
  void save_with(const std::vector<std::string>& names, const json& state) {
    std::vector<zero::ParameterSpec> specs;
    for (const std::string& name : names) specs.push_back({name, {3}, DType::kFloat32, true, 0, {}});
    const SampleModel model(specs, {.world_size = 1}, 1);
    SaveRequest request = model.request(source(), "step", 0);
    request.state = state;
    checkpoint::save(request, [](const std::string& mine) { return std::vector<std::string>{mine}; });
  }

  MemoryFolder folder_;
};

TEST_F(ConvertCheckpoint, ReSavedByOneRankItHasEveryElement) {
  for (const int world : {1, 2, 3, 8}) {
    const SampleModel model = testing::sample_model(world, static_cast<uint64_t>(world));
    save(model);
    convert_checkpoint(options(ConvertTarget::kTessera));
    const Checkpoint found = Checkpoint::open(output());
    EXPECT_EQ(found.manifest().world_size(), 1);
    EXPECT_EQ(model.difference(found), "");
    EXPECT_EQ(found.manifest().state, Checkpoint::open(source()).manifest().state);
  }
}

// Larger than the writer's buffer, and of odd sizes.
TEST_F(ConvertCheckpoint, ReSavedWithLargeTensors) {
  const SampleModel model({{"a", {5'000'001}, DType::kFloat32, true, 0, {}},
                           {"b", {3}, DType::kFloat32, true, 0, {}},
                           {"c", {7'000'003}, DType::kFloat16, false, 0, {}}},
                          {.world_size = 3}, 5);
  save(model);
  std::vector<int64_t> heard;
  ConvertOptions with_progress = options(ConvertTarget::kTessera);
  with_progress.progress = [&](int64_t done, int64_t total) {
    EXPECT_LE(done, total);
    heard.push_back(total - done);
  };
  convert_checkpoint(with_progress);
  EXPECT_EQ(model.difference(Checkpoint::open(output())), "");
  ASSERT_FALSE(heard.empty());
  EXPECT_EQ(heard.back(), 0);
}

TEST_F(ConvertCheckpoint, UniversalHasAFolderForEachTrainableParameter) {
  save(testing::sample_model(2, 1));
  const ConvertResult result = convert_checkpoint(options(ConvertTarget::kUniversal));
  EXPECT_EQ(result.output, output() / "step_universal");
  EXPECT_THAT(testing::names_in(output()), ElementsAre("latest", "latest_universal", "step_universal"));
  EXPECT_THAT(testing::names_in(result.output),
              ElementsAre("mp_rank_00_model_states.pt", "zero", "zero_pp_rank_0_mp_rank_00_model_states.pt"));
  EXPECT_THAT(testing::names_in(result.output / "zero"),
              ElementsAre("embedding.weight", "fc.bias", "fc.weight", "größe.weight", "half.weight",
                          "nothing", "odd", "optimizer_state.pt", "scale"));
  for (const char* name : {"odd/name", "nothing"})
    EXPECT_THAT(testing::names_in(result.output / "zero" / name),
                ElementsAre("exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"));
}

TEST_F(ConvertCheckpoint, UniversalLeavesTheLatestOfOthers) {
  save(testing::sample_model(2, 1));
  ConvertOptions beside = options(ConvertTarget::kUniversal);
  beside.output = source();
  convert_checkpoint(beside);
  convert_checkpoint(beside);  // replaces the first
  EXPECT_THAT(testing::names_in(source()),
              ElementsAre("latest", "latest_universal", "step", "step_universal"));
  EXPECT_EQ(read_text(source() / "latest"), "step\n");
  EXPECT_EQ(read_text(source() / "latest_universal"), "step_universal");
  fs::remove_all(source() / "step_universal");
  fs::create_directories(source() / "step_universal");
  EXPECT_THAT([&] { convert_checkpoint(beside); },
              ThrowsMessage<CheckpointError>(HasSubstr("is no universal checkpoint")));
}

TEST_F(ConvertCheckpoint, DistributedKeepsOtherFilesOfTheFolder) {
  save(testing::sample_model(2, 1));
  fs::create_directories(output());
  for (const char* name : {"notes.txt", "__3_0.distcp", ".metadata"}) write_text(output() / name, "old");
  convert_checkpoint(options(ConvertTarget::kDistributed));
  EXPECT_THAT(testing::names_in(output()), ElementsAre(".metadata", "__0_0.distcp", "notes.txt"));
  EXPECT_NE(read_text(output() / ".metadata"), "old");
}

TEST_F(ConvertCheckpoint, WhatItReadsIsVerified) {
  save(testing::sample_model(2, 1));
  {
    const Checkpoint checkpoint = Checkpoint::open(source());
    flip_bit(checkpoint.path() / "rank_00001.h5",
             checkpoint.manifest().rank_file(1).datasets.find("/exp_avg/unit_00001")->offset, 0);
  }
  for (const ConvertTarget target :
       {ConvertTarget::kTessera, ConvertTarget::kUniversal, ConvertTarget::kDistributed}) {
    EXPECT_THAT([&] { convert_checkpoint(options(target)); },
                ThrowsMessage<CheckpointError>(HasSubstr("rank_00001.h5: block 0")));
    std::error_code error;
    if (fs::exists(output(), error)) {
      EXPECT_THAT(testing::names_in(output()), IsEmpty());
    }
  }
}

// A folder is whole or absent; universal's is also whole where its name could not be written into
// latest_universal.
TEST_F(ConvertCheckpoint, EachOperationFails) {
  save(testing::sample_model(2, 1));
  for (const ConvertTarget target :
       {ConvertTarget::kTessera, ConvertTarget::kUniversal, ConvertTarget::kDistributed}) {
    constexpr size_t kMostTries = 100;  // of universal's many files not each operation
    size_t num_operations = 0;
    for (size_t fatal = 0; fatal == 0 || fatal < num_operations; fatal += 1 + num_operations / kMostTries) {
      ConvertOptions failing = options(target);
      failing.disk.sync = true;
      size_t count = 0;
      bool to_fail = fatal > 0;
      failing.disk.probe = [&](std::string_view, const fs::path&) {
        if (count++ == fatal && to_fail) throw DiskError("No space left on device");
      };
      if (to_fail) {
        try {
          convert_checkpoint(failing);
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr("No space left on device"));
        }
      } else {
        convert_checkpoint(failing);  // counts
        num_operations = count;
      }
      std::error_code error;
      const std::vector<std::string> names =
          fs::exists(output(), error) ? testing::names_in(output()) : std::vector<std::string>();
      for (const std::string& name : names)
        EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name << " after operation " << fatal;
      const bool is_there = fs::exists(output() / "step_universal", error);
      EXPECT_EQ(is_there, fs::exists(output() / "step_universal/zero/optimizer_state.pt", error)) << fatal;
      fs::remove_all(output());
    }
    EXPECT_GT(num_operations, 10u);
  }
}

TEST_F(ConvertCheckpoint, UniversalThatFailsLeavesTheOneBefore) {
  ConvertOptions options = this->options(ConvertTarget::kUniversal);
  const fs::path weights = output() / "step_universal/zero/scale/fp32.pt";
  size_t num_operations = 0;
  const auto convert = [&](uint64_t seed, size_t fatal) {
    save(testing::sample_model(2, seed));
    num_operations = 0;
    options.disk.probe = [&, fatal](std::string_view operation, const fs::path& path) {
      if (num_operations++ == fatal) throw DiskError(operation, " ", path, ": No space left on device");
    };
    convert_checkpoint(options);
    return read_text(weights);
  };
  const std::string old = convert(1, SIZE_MAX);
  const size_t all = num_operations;
  size_t num_failed = 0;
  for (size_t fatal = all - 12; fatal < all; ++fatal) {
    try {
      convert(2, fatal);
      convert(1, SIZE_MAX);
    } catch (const Error& error) {
      EXPECT_EQ(read_text(weights), old) << error.what();
      ++num_failed;
    }
    EXPECT_THAT(testing::names_in(output()), ElementsAre("latest", "latest_universal", "step_universal"));
  }
  EXPECT_GT(num_failed, 3u);
}

TEST_F(ConvertCheckpoint, ValuesWhoseNamesAreEqualWithDotsAreNamed) {
  json state = {{"global_steps", 1}, {"optimizer", {{"type", "AdamW"}, {"parameter_steps", {1}}}}};
  state["client_state"] = {{"a.b", 1}, {"a", {{"b", 2}, {"c", 3}}}};
  save_with({"w"}, state);
  const ConvertResult result = convert_checkpoint(options(ConvertTarget::kDistributed));
  EXPECT_THAT(result.notes, ::testing::Contains(HasSubstr("client_state.a.b is there twice")));
}

json state_with(const json& optimizer, const json& config = json::object()) {
  return {{"global_steps", 7},
          {"skipped_steps", 1},
          {"schedule_steps", 6},
          {"optimizer", optimizer},
          {"config", config}};
}

TEST_F(ConvertCheckpoint, DeepSpeedHasOneCountOfUpdates) {
  save_with({"a", "b", "c"}, state_with({{"type", "AdamW"}, {"parameter_steps", {6, 0, 6}}}));
  const ConvertResult result = convert_checkpoint(options(ConvertTarget::kUniversal));
  EXPECT_THAT(result.notes, ::testing::Contains(HasSubstr("1 parameters without an update (b) count 6 now")));
  save_with({"a", "b", "c"}, state_with({{"type", "AdamW"}, {"parameter_steps", {6, 0, 5}}}));
  EXPECT_THAT(
      [&] { convert_checkpoint(options(ConvertTarget::kUniversal)); },
      ThrowsMessage<CheckpointError>(HasSubstr("a has had 6 updates and c 5; DeepSpeed has one count")));
  ConvertOptions distributed = options(ConvertTarget::kDistributed);
  distributed.output = folder_.path() / "dcp";
  convert_checkpoint(distributed);
}

TEST_F(ConvertCheckpoint, NamesThatLeaveTheFolderAreRefused) {
  for (const char* name : {"../x", "/x", "x/../../y", "x/", ".", "optimizer_state.pt"}) {
    save_with({name}, state_with({{"type", "AdamW"}, {"parameter_steps", {6}}}));
    EXPECT_THAT(
        [&] { convert_checkpoint(options(ConvertTarget::kUniversal)); },
        ThrowsMessage<CheckpointError>(HasSubstr("cannot be written as DeepSpeed's universal checkpoint")))
        << name;
  }
}

TEST_F(ConvertCheckpoint, AFolderIsNotItsOwnOutput) {
  save(testing::sample_model(1, 1));
  ConvertOptions same = options(ConvertTarget::kTessera);
  same.output = source();
  EXPECT_THAT(
      [&] { convert_checkpoint(same); },
      ThrowsMessage<CheckpointError>(HasSubstr("has the checkpoint itself; expected another folder")));
  same = options(ConvertTarget::kUniversal);
  same.dtype = DType::kBFloat16;
  EXPECT_THAT([&] { convert_checkpoint(same); }, ThrowsMessage<CheckpointError>(HasSubstr("dtype bf16")));
}

TEST_F(ConvertCheckpoint, OptionsOfGroupsComeFromTheConfigurationWhereNoneWereSaved) {
  const json config{
      {"optimizer",
       {{"type", "AdamW"},
        {"params", {{"lr", 0.5}, {"betas", {0.8, 0.9}}, {"weight_decay", 0.25}, {"adam_w_mode", true}}},
        {"param_groups", {{{"match", {"*.bias"}}, {"lr", 0.125}}}}}},
      {"scheduler", {{"type", "WarmupLR"}}}};
  Manifest manifest;
  manifest.layout.parameters = {{.name = "a.weight", .shape = {1}, .group = 0, .aliases = {}},
                                {.name = "a.bias", .shape = {1}, .group = 1, .aliases = {}}};
  manifest.files.emplace_back();
  manifest.state = state_with({{"type", "AdamW"}, {"parameter_steps", {6, 6}}}, config);
  TrainingState state = training_state(manifest, "here", {});
  ASSERT_EQ(state.groups.size(), 2u);
  EXPECT_EQ(state.groups[0]["lr"], 0.5);
  EXPECT_EQ(state.groups[1]["lr"], 0.125);
  EXPECT_EQ(state.groups[1]["weight_decay"], 0.25);
  EXPECT_EQ(state.groups[1]["betas"], json({{"$tessera", "tuple"}, {"value", {0.8, 0.9}}}));
  EXPECT_EQ(state.groups[1]["decoupled_weight_decay"], true);
  EXPECT_FALSE(state.groups[0].contains("adam_w_mode"));
  EXPECT_EQ(state.lr_scheduler, json({{"last_batch_iteration", 5}}));
  EXPECT_THAT(state.notes, ElementsAre(HasSubstr("lr is the configuration's")));
  state = training_state(manifest, "here",
                         [](const Manifest&) { return std::vector<json>{{{"lr", 0.1}}, {{"lr", 0.2}}}; });
  EXPECT_EQ(state.groups[1]["lr"], 0.2);
  EXPECT_EQ(state.groups[1]["initial_lr"], 0.125);
  EXPECT_THAT(state.notes, IsEmpty());

  json& schedule = manifest.state["config"]["scheduler"];
  schedule = {{"type", "StepLR"}, {"params", {{"interval", "step"}}}};
  EXPECT_EQ(training_state(manifest, "here", {}).lr_scheduler["last_epoch"], 6);
  schedule["params"]["interval"] = "epoch";
  EXPECT_TRUE(training_state(manifest, "here", {}).lr_scheduler.is_null());
  schedule = {{"type", nullptr}};

  manifest.state["client_state"] = {
      {"tessera.encoding", 1},
      {"tessera.global_samples", 56},
      {"tessera.param_groups", {{{"lr", 1.0}, {"fn", {{"$tessera", "array"}}}}, {{"lr", 2.0}}}},
      {"client_state", {{"epoch", 3}, {"table", {{"$tessera", "tensor"}, {"value", ""}}}}}};
  state = training_state(manifest, "here", {});
  EXPECT_EQ(state.groups[0]["lr"], 1.0);
  EXPECT_EQ(state.global_samples, 56);
  EXPECT_EQ(state.client_state, json({{"epoch", 3}}));
  EXPECT_THAT(state.notes, ElementsAre("client_state: table is left out: it has a value of type tensor",
                                       "param group 0: fn is left out: it has a value of type array"));
}

TEST_F(ConvertCheckpoint, AStateThatIsNoneIsAnError) {
  save_with({"a"}, state_with({{"type", "AdamW"}, {"parameter_steps", {6, 6}}}));
  EXPECT_THAT([&] { convert_checkpoint(options(ConvertTarget::kDistributed)); },
              ThrowsMessage<CheckpointError>(HasSubstr("parameter_steps")));
}

}  // namespace
}  // namespace tessera::checkpoint
