// Hashes in a safetensors file's metadata: any damage to the file is noticed,
// and the file stays one that others read.
#include "checkpoint/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "tests/checkpoint/formats/formats_testing.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// The error of reading every tensor of a model, whole and in parts; empty when all equal `right`.
std::string read_error(const std::filesystem::path& path, const std::map<std::string, std::string>& right) {
  try {
    const SafetensorsModel model(path);
    for (const auto& [name, bytes] : right) {
      std::string found(bytes.size(), '\0');
      model.read(name, 0, std::as_writable_bytes(std::span(found)));
      if (found != bytes) return "WRONG DATA";
      if (bytes.empty()) continue;
      const size_t begin = bytes.size() / 3;
      model.read(name, static_cast<int64_t>(begin),
                 std::as_writable_bytes(std::span(found).subspan(begin, 1)));
      if (found != bytes) return "WRONG DATA";
    }
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::map<std::string, std::string> tensors_of(const std::filesystem::path& path) {
  const SafetensorsModel model(path);
  std::map<std::string, std::string> tensors;
  for (const std::string& name : model.names()) {
    std::string bytes(static_cast<size_t>(model.find(name)->bytes), '\0');
    model.read(name, 0, std::as_writable_bytes(std::span(bytes)));
    tensors[name] = bytes;
  }
  return tensors;
}

TEST(Digest, EveryBitOfASmallFileIsCovered) {
  TestFolder folder;
  write_model(Disk(), {.format = ModelFormat::kSafetensors, .path = folder / "m", .tensors = small_model()},
              3);
  const auto right = tensors_of(folder / "m");
  const uint64_t num_bits = 8 * std::filesystem::file_size(folder / "m");
  for (uint64_t bit = 0; bit < num_bits; ++bit) {
    flip_bit(folder / "m", bit / 8, bit % 8);
    const std::string error = read_error(folder / "m", right);
    EXPECT_THAT(error, StartsWith((folder / "m").string())) << "bit " << bit % 8 << " of byte " << bit / 8;
    EXPECT_EQ(error.find('\n'), error.npos) << error;
    flip_bit(folder / "m", bit / 8, bit % 8);
    if (HasFailure()) break;
  }
  EXPECT_EQ(read_error(folder / "m", right), "");
}

TEST(Digest, RandomBitsOfLargeTensorsAndShards) {
  TestFolder folder;
  const std::vector<ModelTensor> tensors = {
      {"large", {3, 300'000}, DType::kFloat32, {"tied"}},  // of several blocks
      {"half", {500'001}, DType::kBFloat16, {}},
      {"small", {7}, DType::kFloat64, {}}};
  for (const int64_t max_shard_bytes : {int64_t{0}, int64_t{1'200'000}}) {
    const std::filesystem::path path = folder / ("m" + std::to_string(max_shard_bytes));
    write_model(Disk(),
                {.format = ModelFormat::kSafetensors,
                 .path = path,
                 .tensors = tensors,
                 .max_shard_bytes = max_shard_bytes},
                5, 123'457);
    const auto right = tensors_of(path);
    ASSERT_EQ(right.size(), 4u);
    const SafetensorsModel model(path);
    std::mt19937_64 random(9);
    for (int trial = 0; trial < 200; ++trial) {
      const std::filesystem::path& file = model.files()[random() % model.files().size()].path();
      const uint64_t bit = random() % (8 * std::filesystem::file_size(file));
      flip_bit(file, bit / 8, bit % 8);
      EXPECT_THAT(read_error(path, right), StartsWith(file.string())) << bit;
      flip_bit(file, bit / 8, bit % 8);
    }
    EXPECT_EQ(read_error(path, right), "");
  }
}

// Independent of the reader: the two entries as their description has them.
TEST(Digest, IsAsDescribed) {
  TestFolder folder;
  write_model(Disk(),
              {.format = ModelFormat::kSafetensors,
               .path = folder / "m",
               .tensors = {{"b", {2'000'000}, DType::kUInt8, {}}, {"a", {3}, DType::kFloat32, {}}}},
              4);
  const std::string content = read_text(folder / "m");
  const SafetensorsFile file(folder / "m");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const std::string data = content.substr(static_cast<size_t>(file.tensors()[0].offset));
  const auto hash = [&](size_t begin, size_t bytes) {
    const uint64_t value = hash_block(std::as_bytes(std::span(data).subspan(begin, bytes)));
    return hashes_to_hex({&value, 1});
  };
  EXPECT_EQ(file.metadata().at("tessera_blocks"),
            hash(0, 12) + hash(12, 1 << 20) + hash(12 + (1 << 20), 2'000'000 - (1 << 20)));
  std::string head = content.substr(0, content.size() - data.size());
  const std::string digest = file.metadata().at("tessera_digest");
  head.replace(head.find(digest), digest.size(), digest.size(), '0');
  EXPECT_EQ(digest, text_digest(head));
}

TEST(Digest, MetadataThatAnotherProgramKept) {
  TestFolder folder;
  write_model(Disk(), {.format = ModelFormat::kSafetensors, .path = folder / "m", .tensors = small_model()},
              3);
  const SafetensorsFile file(folder / "m");
  SafetensorsHeader header{.tensors = {file.tensors().begin(), file.tensors().end()},
                           .metadata = file.metadata()};
  header.tensors.pop_back();
  place_tensors(header.tensors);
  int64_t bytes = 0;
  for (const SafetensorsTensor& tensor : header.tensors) bytes += tensor.bytes;
  const auto error_of_file = [&] {
    write_text(folder / "other",
               format_safetensors_header(header, "m") + std::string(static_cast<size_t>(bytes), 'x'));
    return error_of([&] { SafetensorsFile{folder / "other"}; });
  };
  EXPECT_THAT(error_of_file(), AllOf(HasSubstr("other: the header is damaged: found "),
                                     HasSubstr("write it without tessera_blocks and tessera_digest")));
  header.metadata.erase("tessera_digest");
  EXPECT_THAT(error_of_file(), HasSubstr("it has no tessera_digest beside the other of the two"));
  header.metadata.erase("tessera_blocks");
  EXPECT_EQ(error_of_file(), "");
}

}  // namespace
}  // namespace tessera::checkpoint
