// Consolidation of checkpoints saved by any world: every element of every tensor.
// (consolidate_libraries_test.py reads the files with other libraries.)
#include "checkpoint/consolidate/convert_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/convert.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/checkpoint/formats/safetensors_testing.h"
#include "tests/support/files.h"

namespace tessera::checkpoint {
namespace {

using testing::Bytes;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MemoryFolder;
using testing::SampleModel;
using ::testing::ThrowsMessage;

/// A tensor expected after consolidation.
struct Expected {
  DType type;
  std::vector<int64_t> shape;
  Bytes bytes;
};

Bytes as_type(const Bytes& bytes, DType from, DType to) {
  if (from == to) return bytes;
  Bytes out(bytes.size() / static_cast<size_t>(size_bytes(from)) * static_cast<size_t>(size_bytes(to)));
  convert(bytes, from, out, to);
  return out;
}

std::map<std::string, Expected> expected_of(const SampleModel& model, DType floating) {
  std::map<std::string, Expected> expected;
  const SavedLayout saved = saved_layout(model.layout());
  for (size_t i = 0; i < saved.parameters.size(); ++i) {
    const SavedParameter& parameter = saved.parameters[i];
    const DType type = saved.weights_type(parameter.unit);
    const auto begin = model.weights(parameter.unit).begin() + parameter.offset * size_bytes(type);
    const Bytes bytes(begin, begin + parameter.numel() * size_bytes(type));
    const Expected one{floating, parameter.shape, as_type(bytes, type, floating)};
    expected[parameter.name] = one;
    for (const std::string& alias : parameter.aliases) expected[alias] = one;
  }
  for (const WholeTensor& tensor : model.tensors()) {
    const DType type = is_floating(tensor.type) ? floating : tensor.type;
    expected[tensor.name] = {type, tensor.shape,
                             as_type({tensor.data.begin(), tensor.data.end()}, tensor.type, type)};
  }
  return expected;
}

void expect_holds(const std::filesystem::path& path, const std::map<std::string, Expected>& expected) {
  const SafetensorsModel found(path);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : expected) names.push_back(name);
  ASSERT_EQ(found.names(), names);
  for (const auto& [name, tensor] : expected) {
    EXPECT_EQ(found.find(name)->type, tensor.type) << name;
    EXPECT_EQ(found.find(name)->shape, tensor.shape) << name;
    Bytes bytes(static_cast<size_t>(found.find(name)->bytes));
    found.read(name, 0, bytes);
    EXPECT_TRUE(bytes == tensor.bytes) << name;
  }
}

class Consolidate : public ::testing::Test {
 protected:
  ConvertOptions options() const {
    return {.directory = folder_.path() / "checkpoints",
            .tag = "",
            .output = folder_.path() / "model.safetensors",
            .target = ConvertTarget::kSafetensors,
            .disk = {.sync = false, .probe = {}},
            .progress = {}};
  }
  void save(const SampleModel& model, const std::string& tag = "step") {
    for (const std::string& error : testing::save_all(model, folder_.path() / "checkpoints", tag))
      ASSERT_EQ(error, "");
  }
  /// Flips a bit of a dataset in a rank's file.
  void damage(int rank, const std::string& dataset) {
    const Checkpoint checkpoint = Checkpoint::open(folder_.path() / "checkpoints");
    flip_bit(checkpoint.path() / checkpoint.manifest().rank_file(rank).name,
             checkpoint.manifest().rank_file(rank).datasets.find(dataset)->offset, 0);
  }

  MemoryFolder folder_;
};

TEST_F(Consolidate, GivesTheMastersOfAnyWorld) {
  for (const int world : {1, 2, 3, 5, 8}) {
    const SampleModel model = testing::sample_model(world, static_cast<uint64_t>(world));
    save(model);
    const ConvertResult result = convert_checkpoint(options());
    const auto expected = expected_of(model, DType::kFloat32);
    expect_holds(options().output, expected);
    EXPECT_EQ(result.checkpoint, folder_.path() / "checkpoints" / "step");
    EXPECT_EQ(result.num_names, static_cast<int64_t>(expected.size()));
    EXPECT_EQ(result.num_tensors, result.num_names - 1) << "one parameter is tied";
  }
}

TEST_F(Consolidate, IntoShards) {
  const SampleModel model = testing::sample_model(2, 7);
  save(model);
  ConvertOptions shards = options();
  shards.output = folder_.path() / "out";
  shards.max_shard_bytes = 600;
  convert_checkpoint(shards);
  EXPECT_GT(testing::names_in(shards.output).size(), 3u);
  expect_holds(shards.output, expected_of(model, DType::kFloat32));
}

// Larger than the buffers, and of odd sizes, so that pieces begin and end anywhere.
TEST_F(Consolidate, LargeTensorsOfOddSizes) {
  const auto spec = [](const std::string& name, int64_t numel, DType dtype, bool trainable) {
    return zero::ParameterSpec{
        .name = name, .shape = {numel}, .dtype = dtype, .trainable = trainable, .group = 0, .aliases = {}};
  };
  const SampleModel model(
      {spec("a", 5'000'001, DType::kFloat32, true), spec("b", 3, DType::kFloat32, true),
       spec("frozen", 7'000'003, DType::kFloat16, false), spec("c", 3'333'333, DType::kBFloat16, true)},
      {.world_size = 3, .unit_numel = 4'000'000}, 5, {});
  save(model);
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    ConvertOptions one = options();
    one.dtype = type;
    std::vector<int64_t> heard;
    one.progress = [&](int64_t done, int64_t total) {
      heard.push_back(done);
      EXPECT_LE(done, total);
      heard.back() == total ? heard.push_back(-1) : void();
    };
    const ConvertResult result = convert_checkpoint(one);
    expect_holds(one.output, expected_of(model, type));
    ASSERT_GT(heard.size(), 4u) << "several batches";
    EXPECT_EQ(heard.back(), -1) << "the last call says that all is done";
    EXPECT_TRUE(std::is_sorted(heard.begin(), heard.end() - 1));
    EXPECT_EQ(heard[heard.size() - 2], result.bytes);
  }
}

TEST_F(Consolidate, TagsAreChosen) {
  const SampleModel first = testing::sample_model(2, 1), second = testing::sample_model(3, 2);
  save(first, "one");
  save(second, "two");
  convert_checkpoint(options());
  expect_holds(options().output, expected_of(second, DType::kFloat32));
  ConvertOptions chosen = options();
  chosen.tag = "one";
  convert_checkpoint(chosen);
  expect_holds(options().output, expected_of(first, DType::kFloat32));
  chosen.tag = "three";
  EXPECT_THAT([&] { convert_checkpoint(chosen); },
              ThrowsMessage<CheckpointError>(HasSubstr("has no checkpoint three; it has one, two")));
}

TEST_F(Consolidate, WhatItReadsIsVerified) {
  save(testing::sample_model(2, 1));
  const std::filesystem::path checkpoint = folder_.path() / "checkpoints" / "step";
  damage(1, "/master/unit_00001");
  EXPECT_THAT([&] { convert_checkpoint(options()); },
              ThrowsMessage<CheckpointError>(HasSubstr("rank_00001.h5: block 0")));
  EXPECT_THAT(testing::names_in(folder_.path()), ElementsAre("checkpoints"));
  damage(1, "/master/unit_00001");  // repairs it
  convert_checkpoint(options());
  std::filesystem::remove(checkpoint / "rank_00001.h5");
  EXPECT_THAT([&] { convert_checkpoint(options()); },
              ThrowsMessage<CheckpointError>(HasSubstr("rank_00001.h5: cannot be read")));
}

TEST_F(Consolidate, AModelWithNothingInIt) {
  const SampleModel model({}, {.world_size = 2}, 1, {});
  save(model);
  convert_checkpoint(options());
  expect_holds(options().output, expected_of(model, DType::kFloat32));
}

}  // namespace
}  // namespace tessera::checkpoint
