// Consolidation: every element of every tensor, whatever the world it was saved by. (What other libraries
// read in the files is in consolidate_libraries_test.py.)
#include "checkpoint/consolidate.h"
#include "checkpoint/checkpoint_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "checkpoint/convert.h"
#include "checkpoint/formats/safetensors_reader.h"
#include "core/error.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace tessera::checkpoint {
namespace {

using testing::Bytes;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SampleModel;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

// -------------------------------------------------------------------------------------------- conversion

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values, DType from, DType to) {
  std::vector<To> out(values.size());
  convert(std::as_bytes(std::span(values)), from, std::as_writable_bytes(std::span(out)), to);
  return out;
}

double value_of_half(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0x1f)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(Convert, EveryHalfIsExactInFp32) {
  std::vector<uint16_t> all(65'536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto floats = converted<float>(all, DType::kFloat16, DType::kFloat32);
  for (size_t i = 0; i < all.size(); ++i) {
    const double expected = value_of_half(all[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(floats[i]));
    } else {
      ASSERT_EQ(floats[i], expected) << i;
      ASSERT_EQ(std::signbit(floats[i]), std::signbit(expected)) << i;
    }
  }
}

TEST(Convert, EveryBf16IsExactInFp32AndComesBack) {
  std::vector<uint16_t> all(65'536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto floats = converted<float>(all, DType::kBFloat16, DType::kFloat32);
  const auto back = converted<uint16_t>(floats, DType::kFloat32, DType::kBFloat16);
  for (size_t i = 0; i < all.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &floats[i], 4);
    ASSERT_EQ(bits, static_cast<uint32_t>(i) << 16);
    if (std::isnan(floats[i]))
      ASSERT_EQ(back[i] & 0x7fc0, 0x7fc0);
    else
      ASSERT_EQ(back[i], all[i]);
  }
}

TEST(Convert, RoundsToTheNearestBf16AndTiesToEven) {
  std::mt19937 source(1);
  std::vector<uint32_t> bits = {0,          0x80000000, 0x00000001, 0x00008000, 0x00008001,
                                0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7fffff,
                                0x7f7f7fff, 0x7f7f8000, 0x7f800000, 0xff800000};
  for (int i = 0; i < 200'000; ++i) bits.push_back(source() % 3 ? source() : source() << 15);
  std::vector<float> values(bits.size());
  std::memcpy(values.data(), bits.data(), bits.size() * 4);
  const auto rounded = converted<uint16_t>(values, DType::kFloat32, DType::kBFloat16);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_EQ(rounded[i] & 0x7fff, 0x7fc0);
      continue;
    }
    // The two neighbours by magnitude; beyond the largest finite one lies what
    // would be 2^128, which stands for infinity.
    const auto magnitude = [](uint32_t high) {
      float value;
      const uint32_t wide = high << 16;
      std::memcpy(&value, &wide, 4);
      return std::isinf(value) ? 0x1p128 : static_cast<double>(value);
    };
    const uint32_t below = (bits[i] & 0x7fffffff) >> 16;
    const double value = std::isinf(values[i]) ? 0x1p128 : std::fabs(static_cast<double>(values[i]));
    const double down = value - magnitude(below), up = below == 0x7f80 ? 1.0 : magnitude(below + 1) - value;
    const uint32_t expected = down < up ? below : up < down ? below + 1 : below + (below & 1);
    ASSERT_EQ(rounded[i], (bits[i] >> 16 & 0x8000) | expected) << std::hex << bits[i];
  }
}

TEST(Convert, Fp64GoesByWayOfFp32) {
  const std::vector<double> values = {
      1.0, -0.0, 0.1, 1e300, -1e300, 1e-300, 1.0 + 0x1p-8 + 0x1p-30, std::numeric_limits<double>::infinity()};
  const auto floats = converted<float>(values, DType::kFloat64, DType::kFloat32);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(floats[i], static_cast<float>(values[i]));
  EXPECT_TRUE(std::signbit(floats[1]));
  EXPECT_EQ(converted<uint16_t>(values, DType::kFloat64, DType::kBFloat16)[6], 0x3f80)
      << "a tie in fp32, so to even";
}

TEST(Convert, EveryHalfComesBackFromFp32) {
  std::vector<uint16_t> all(65'536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto back = converted<uint16_t>(converted<float>(all, DType::kFloat16, DType::kFloat32),
                                        DType::kFloat32, DType::kFloat16);
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(value_of_half(all[i])))
      ASSERT_EQ(back[i] & 0x7fff, 0x7e00);
    else
      ASSERT_EQ(back[i], all[i]);
  }
}

TEST(Convert, RoundsToTheNearestHalfAndTiesToEven) {
  std::vector<float> values;
  std::vector<uint16_t> expected;
  const auto add = [&](double value, uint16_t bits) {
    values.push_back(static_cast<float>(value)), expected.push_back(bits);
    values.push_back(static_cast<float>(-value)), expected.push_back(bits | 0x8000);
  };
  // Between each two neighbours: the middle goes to the even one, what is beside the middle to the nearer
  // one. Behind the largest finite number, 65504, stands infinity, where 65536 would be.
  for (uint16_t below = 0; below < 0x7c00; ++below) {
    const double low = value_of_half(below),
                 high = below == 0x7bff ? 65536 : value_of_half(static_cast<uint16_t>(below + 1));
    const double middle = (low + high) / 2, little = (high - low) / 1024;
    add(middle, static_cast<uint16_t>(below + (below & 1)));
    add(middle - little, below);
    add(middle + little, static_cast<uint16_t>(below + 1));
  }
  for (const double large : {65536.0, 1e9, 3e38}) add(large, 0x7c00);
  EXPECT_EQ(converted<uint16_t>(values, DType::kFloat32, DType::kFloat16), expected);
}

TEST(Convert, CountsWhatHasBecomeInfinite) {
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {1, 65504, 65519, 65520, -70000, 3.4e38f, infinity, -infinity, nan};
  std::vector<uint16_t> halves(values.size());
  const auto to = std::as_writable_bytes(std::span(halves));
  EXPECT_EQ(convert(std::as_bytes(std::span(values)), DType::kFloat32, to, DType::kFloat16), 3);
  EXPECT_EQ(convert(std::as_bytes(std::span(values)), DType::kFloat32, to, DType::kBFloat16), 1)
      << "3.4e38 is nearer to 2^128";
  const std::vector<double> wide = {1e300, -1e39, 1e38, 65520, std::numeric_limits<double>::infinity()};
  std::vector<float> floats(wide.size());
  EXPECT_EQ(convert(std::as_bytes(std::span(wide)), DType::kFloat64,
                    std::as_writable_bytes(std::span(floats)), DType::kFloat32),
            2);
  EXPECT_EQ(convert(std::as_bytes(std::span(wide)), DType::kFloat64, to.first(10), DType::kFloat16), 4);
}

TEST(Convert, OtherTypesAreMistakesOfOurs) {
  std::vector<std::byte> data(8);
  EXPECT_THROW(convert(std::span(data).first(4), DType::kInt32, std::span(data).last(4), DType::kFloat32),
               std::logic_error);
  EXPECT_THROW(convert(std::span(data).first(4), DType::kFloat32, std::span(data).last(4), DType::kInt32),
               std::logic_error);
  EXPECT_THROW(convert(std::span(data).first(4), DType::kFloat32, std::span(data).last(4), DType::kBFloat16),
               std::logic_error);
}

// ----------------------------------------------------------------------------------------- consolidation

/// What the model should be after consolidation: name -> (type, shape, bytes).
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
  ConsolidateOptions options() const {
    return {.directory = folder_.path() / "checkpoints",
            .tag = "",
            .output = folder_.path() / "model.safetensors",
            .disk = {.sync = false, .probe = {}},
            .progress = {}};
  }
  void save(const SampleModel& model, const std::string& tag = "step") {
    for (const std::string& error : testing::save_all(model, folder_.path() / "checkpoints", tag))
      ASSERT_EQ(error, "");
  }
  // Flips a bit of a dataset in a rank's file.
  void damage(int rank, const std::string& dataset) {
    const Checkpoint checkpoint = Checkpoint::open(folder_.path() / "checkpoints");
    const auto path = checkpoint.path() / checkpoint.manifest().rank_file(rank).name;
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(checkpoint.dataset(rank, dataset).offset);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(checkpoint.dataset(rank, dataset).offset);
    file.put(byte);
  }

  TemporaryFolder folder_;
};

TEST_F(Consolidate, GivesTheMastersOfAnyWorld) {
  for (const int world : {1, 2, 3, 5, 8}) {
    const SampleModel model = testing::sample_model(world, static_cast<uint64_t>(world));
    save(model);
    const ConsolidateResult result = consolidate(options());
    const auto expected = expected_of(model, DType::kFloat32);
    expect_holds(options().output, expected);
    EXPECT_EQ(result.checkpoint, folder_.path() / "checkpoints" / "step");
    EXPECT_EQ(result.num_names, static_cast<int64_t>(expected.size()));
    EXPECT_EQ(result.num_tensors, result.num_names - 1) << "one parameter is tied";
  }
}

TEST_F(Consolidate, ToBf16) {
  const SampleModel model = testing::sample_model(3, 7);
  save(model);
  ConsolidateOptions as_bf16 = options();
  as_bf16.dtype = DType::kBFloat16;
  consolidate(as_bf16);
  expect_holds(as_bf16.output, expected_of(model, DType::kBFloat16));
}

TEST_F(Consolidate, IntoShards) {
  const SampleModel model = testing::sample_model(2, 7);
  save(model);
  ConsolidateOptions shards = options();
  shards.output = folder_.path() / "out";
  shards.max_shard_bytes = 600;
  consolidate(shards);
  EXPECT_GT(testing::names_in(shards.output).size(), 3u);
  expect_holds(shards.output, expected_of(model, DType::kFloat32));
}

// Larger than the buffers, in sizes that fit nothing: pieces begin and end everywhere,
// and a byte tensor shifts what follows.
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
    ConsolidateOptions one = options();
    one.dtype = type;
    std::vector<int64_t> heard;
    one.progress = [&](int64_t done, int64_t total) {
      heard.push_back(done);
      EXPECT_LE(done, total);
      heard.back() == total ? heard.push_back(-1) : void();
    };
    const ConsolidateResult result = consolidate(one);
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
  consolidate(options());
  expect_holds(options().output, expected_of(second, DType::kFloat32));
  ConsolidateOptions chosen = options();
  chosen.tag = "one";
  consolidate(chosen);
  expect_holds(options().output, expected_of(first, DType::kFloat32));
  chosen.tag = "three";
  EXPECT_THAT([&] { consolidate(chosen); },
              ThrowsMessage<CheckpointError>(HasSubstr("has no checkpoint three; it has one, two")));
}

TEST_F(Consolidate, WhatItReadsIsVerified) {
  save(testing::sample_model(2, 1));
  const std::filesystem::path checkpoint = folder_.path() / "checkpoints" / "step";
  damage(1, "/master/unit_00001");
  EXPECT_THAT([&] { consolidate(options()); },
              ThrowsMessage<CheckpointError>(HasSubstr("rank_00001.h5: block 0")));
  EXPECT_THAT(testing::names_in(folder_.path()), ElementsAre("checkpoints"));
  damage(1, "/master/unit_00001");  // repairs it
  consolidate(options());
  std::filesystem::remove(checkpoint / "rank_00001.h5");
  EXPECT_THAT([&] { consolidate(options()); },
              ThrowsMessage<CheckpointError>(HasSubstr("rank_00001.h5: cannot be read")));
}

TEST_F(Consolidate, EachOperationFails) {
  save(testing::sample_model(2, 1));
  for (const ModelFormat format : {ModelFormat::kSafetensors, ModelFormat::kTorch, ModelFormat::kHdf5}) {
    size_t num_operations = 0;
    for (size_t fatal = 0; fatal == 0 || fatal < num_operations; ++fatal) {
      ConsolidateOptions failing = options();
      failing.format = format;
      failing.disk.sync = true;
      size_t count = 0;
      bool to_fail = fatal > 0;
      failing.disk.probe = [&](std::string_view, const std::filesystem::path&) {
        if (count++ == fatal && to_fail) throw DiskError("No space left on device");
      };
      if (to_fail) {
        EXPECT_THAT([&] { consolidate(failing); }, ThrowsMessage<DiskError>("No space left on device"))
            << fatal;
      } else {
        consolidate(failing);  // counts
        num_operations = count;
      }
      std::filesystem::remove(options().output);  // the last operation follows the rename
      EXPECT_THAT(testing::names_in(folder_.path()), ElementsAre("checkpoints"));
    }
    EXPECT_GT(num_operations, 10u);
  }
}

TEST_F(Consolidate, AModelWithNothingInIt) {
  const SampleModel model({}, {.world_size = 2}, 1, {});
  save(model);
  std::vector<int64_t> heard;
  consolidate(options());
  expect_holds(options().output, expected_of(model, DType::kFloat32));
}

}  // namespace
}  // namespace tessera::checkpoint
