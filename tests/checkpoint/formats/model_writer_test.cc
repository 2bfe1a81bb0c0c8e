// What is the same in all formats: names, sizes, the order of bytes.
#include "checkpoint/formats/model_writer.h"
#include "checkpoint/checkpoint_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/formats/formats_testing.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ThrowsMessage;

constexpr std::array kFormats = {ModelFormat::kSafetensors, ModelFormat::kTorch, ModelFormat::kHdf5};

ModelTensor tensor(const std::string& name, std::vector<int64_t> shape,
                   std::vector<std::string> aliases = {}) {
  return {name, std::move(shape), DType::kFloat32, std::move(aliases)};
}

TEST(ModelFormat, FromAnEnding) {
  EXPECT_EQ(model_format_of("a/b.safetensors"), ModelFormat::kSafetensors);
  for (const char* name : {"m.pt", "m.pth", "pytorch_model.bin"})
    EXPECT_EQ(model_format_of(name), ModelFormat::kTorch);
  for (const char* name : {"m.h5", "m.hdf5"}) EXPECT_EQ(model_format_of(name), ModelFormat::kHdf5);
  for (const char* name : {"m", "m.pt/", "m.PT2", ".h5", "m.safetensors.index.json", ""})
    EXPECT_EQ(model_format_of(name), std::nullopt) << name;
}

TEST(ModelWriter, RefusesListsNoFormatCanHold) {
  struct Mistake {
    std::vector<ModelTensor> tensors;
    const char* message;
  };
  const int64_t huge = int64_t{1} << 40;
  const std::vector<Mistake> mistakes = {
      {{tensor("a", {1}), tensor("b", {1}), tensor("a", {2})}, "tensor 'a' occurs twice"},
      {{tensor("a", {1}), tensor("b", {1}, {"c", "a"})}, "tensor 'a' occurs twice"},
      {{tensor("a", {1}, {"a"})}, "tensor 'a' occurs twice"},
      {{tensor("", {1})}, "a tensor has an empty name"},
      {{tensor("x", {1}, {""})}, "a tensor has an empty name"},
      {{tensor("b\xff", {1})}, "tensor 'b\\xff': its name is not UTF-8"},
      {{tensor("a", {2, -1})}, "tensor 'a' has a negative size, -1"},
      {{tensor("a", {huge, huge})}, "tensor 'a' has more bytes than 63 bits can count"},
      {{tensor("a", {int64_t{1} << 59}, {"b", "c", "d", "e"})},
       "tensor 'a' has more bytes than 63 bits can count"},
      {{tensor("a", {int64_t{1} << 59}), tensor("b", {int64_t{1} << 59})},
       "the model has more bytes than 62 bits can count"},
  };
  TestFolder folder;
  const Disk disk;
  for (const ModelFormat format : kFormats)
    for (const Mistake& mistake : mistakes)
      EXPECT_THAT(
          [&] {
            open_model_writer(disk, {.format = format, .path = folder / "out", .tensors = mistake.tensors});
          },
          ThrowsMessage<CheckpointError>(mistake.message));
  EXPECT_TRUE(folder.names().empty());
}

TEST(ModelWriter, TooManyOrTooFewBytesAreMistakesOfOurs) {
  TestFolder folder;
  const Disk disk;
  for (const ModelFormat format : kFormats) {
    const std::vector<std::byte> data(100);
    auto writer = open_model_writer(
        disk, {.format = format, .path = folder / "out", .tensors = {tensor("a", {3}), tensor("b", {4})}});
    EXPECT_THROW(writer->append(std::span(data).first(29)), std::logic_error);
    writer = open_model_writer(
        disk, {.format = format, .path = folder / "out", .tensors = {tensor("a", {3}), tensor("b", {4})}});
    writer->append(std::span(data).first(20));
    EXPECT_THROW(writer->finish(), std::logic_error);
    writer.reset();
    EXPECT_TRUE(folder.names().empty());
  }
}

TEST(ModelWriter, PiecesOfAnySizeGiveTheSameFile) {
  TestFolder folder;
  for (const ModelFormat format : kFormats) {
    const ModelWriterOptions options{.format = format, .path = folder / "out", .tensors = small_model()};
    write_model(Disk(), options, 7, 1'000'000);
    const std::string expected = content_of(folder / "out");
    for (const size_t piece_bytes : {1, 2, 3, 7, 64, 100}) {
      write_model(Disk(), options, 7, piece_bytes);
      EXPECT_TRUE(content_of(folder / "out") == expected) << name_of(format) << ", " << piece_bytes;
    }
  }
}

}  // namespace
}  // namespace tessera::checkpoint
