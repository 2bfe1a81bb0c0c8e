// Manifests to text and back; refused and mutated manifests.
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/checkpoint_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "checkpoint/block_hashes.h"
#include "core/error.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace tessera::checkpoint::testing {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const Manifest& sample() {
  static const Manifest manifest = [] {
    const MemoryFolder folder;
    save_all(sample_model(2, 7), folder.path(), "step7");
    return read_manifest(folder.path() / "step7");
  }();
  return manifest;
}

/// The text of a document, with a digest that is right.
std::string sealed(ordered_json document) {
  document.erase("digest");
  std::string text = document.dump();
  text.pop_back();
  return seal_manifest(text + ",");
}

std::string parse_error(std::string_view text) {
  try {
    Manifest::parse(text, "m.json");
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

std::string error_with(const std::function<void(ordered_json&)>& change) {
  ordered_json document = ordered_json::parse(sample().to_text());
  change(document);
  return parse_error(sealed(document));
}

TEST(Manifest, TextAndBack) {
  const std::string text = sample().to_text();
  const Manifest again = Manifest::parse(text, "m.json");
  EXPECT_EQ(again, sample());
  EXPECT_EQ(again.to_text(), text);
  EXPECT_EQ(error_with([](ordered_json&) {}), "") << "the test's own sealing";
  for (const FileRecord& file : sample().files)
    EXPECT_EQ(FileRecordReader().parse(file_record_to_text(file), "f.json"), file);
}

/// By ranks whose blobs have one size, as states of random generators do.
Manifest saved_by(int world) {
  const MemoryFolder folder;
  SampleModel model = sample_model(world, 7);
  for (int rank = 0; rank < world; ++rank) model.blob(rank) = random_bytes(100, rank);
  save_all(model, folder.path(), "step7");
  return read_manifest(folder.path() / "step7");
}

// Files of ranks have the same datasets, but for rank 0's: the text lists them twice, whatever the number of
// ranks.
TEST(Manifest, DatasetsAreListedOnce) {
  const Manifest manifest = saved_by(5);
  const ordered_json document = ordered_json::parse(manifest.to_text());
  EXPECT_EQ(document["version"], 2);
  for (int rank = 0; rank < 5; ++rank) {
    const ordered_json& datasets = document["files"][rank]["datasets"];
    if (rank < 2)
      EXPECT_TRUE(datasets.is_array()) << rank;
    else
      EXPECT_EQ(datasets, 1) << rank;
    EXPECT_EQ(manifest.rank_file(rank).datasets.identity() == manifest.rank_file(1).datasets.identity(),
              rank > 0);
  }
  FileRecordReader records;
  const std::string second = file_record_to_text(manifest.rank_file(1));
  EXPECT_EQ(records.parse(second, "f"), manifest.rank_file(1));
  const FileRecord third = records.parse(file_record_to_text(manifest.rank_file(2)), "f");
  EXPECT_EQ(third, manifest.rank_file(2));
  EXPECT_EQ(third.datasets.identity(), records.parse(second, "f").datasets.identity());

  const auto error_in_third = [&](const ordered_json& datasets, int64_t bytes_less = 0) {
    ordered_json changed = document;
    changed["files"][2]["datasets"] = datasets;
    if (bytes_less > 0)
      changed["files"][2]["bytes"] = changed["files"][2]["bytes"].get<int64_t>() - bytes_less;
    return parse_error(sealed(changed));
  };
  EXPECT_THAT(error_in_third(2), HasSubstr("files[2].datasets: found 2; expected an integer from 0 to 1"));
  EXPECT_THAT(error_in_third(-1), HasSubstr("files[2].datasets: found -1"));
  EXPECT_THAT(error_in_third(1.5), HasSubstr("files[2].datasets: found 1.5"));
  EXPECT_THAT(error_in_third(0), HasSubstr("files[2]")) << "rank 0's file has the buffers too";
  const int64_t after = manifest.rank_file(2).bytes - manifest.rank_file(2).datasets.end_byte();
  EXPECT_EQ(error_in_third(1), "");
  EXPECT_THAT(error_in_third(1, after + 1), HasSubstr("the datasets end at byte"));
}

TEST(Manifest, Version1ListsThemForEachFile) {
  Manifest manifest = saved_by(3);
  manifest.version = 1;
  const std::string text = manifest.to_text();
  const ordered_json document = ordered_json::parse(text);
  EXPECT_EQ(document["version"], 1);
  EXPECT_EQ(document["files"][1]["datasets"], document["files"][2]["datasets"]);
  EXPECT_TRUE(document["files"][2]["datasets"].is_array());
  EXPECT_EQ(Manifest::parse(text, "m.json"), manifest);
  ordered_json mixed = document;
  mixed["files"][2]["datasets"] = 1;
  EXPECT_THAT(parse_error(sealed(mixed)), HasSubstr("files[2].datasets: found 1; expected a list"));
}

TEST(Manifest, TheDigestCoversEveryByte) {
  const std::string text = sample().to_text();
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    std::string changed = text;
    // The frame's bytes are few, so they get a third of the trials.
    const size_t at = trial % 3 == 0 ? text.size() - 1 - random() % 60 : random() % text.size();
    changed[at] = static_cast<char>(changed[at] ^ (1 << random() % 8));
    EXPECT_THAT(parse_error(changed), StartsWith("m.json: is damaged: ")) << at;
  }
  for (size_t size : {size_t{0}, size_t{1}, size_t{40}, text.size() / 2, text.size() - 1})
    EXPECT_THAT(parse_error(std::string_view(text).substr(0, size)), StartsWith("m.json: is damaged: "));
  EXPECT_THAT(parse_error(text + "\n"), StartsWith("m.json: is damaged: "));
}

TEST(Manifest, ANewerVersionIsNamed) {
  EXPECT_EQ(error_with([](ordered_json& m) {
              m["version"] = 3;
              m["news"] = true;
              m.erase("units");
            }),
            "m.json: has format version 3, written by a newer Tessera; this one reads up to version 2");
  EXPECT_EQ(error_with([](ordered_json& m) { m["version"] = 0; }),
            "m.json: version: found 0; expected an integer from 1 to 9223372036854775807");
  EXPECT_EQ(error_with([](ordered_json& m) { m["format"] = "other"; }),
            "m.json: format: found \"other\"; expected \"tessera-checkpoint\"");
}

TEST(Manifest, WrongFieldsAreNamed) {
  struct Case {
    std::function<void(ordered_json&)> change;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](auto& m) { m.erase("units"); }, "m.json: \"units\" is missing"},
      {[](auto& m) { m["more"] = 1; }, "m.json: unknown key \"more\""},
      {[](auto& m) { m["stage"] = 4; }, "m.json: stage: found 4; expected an integer from 0 to 3"},
      {[](auto& m) { m["world_size"] = 2.0; },
       "m.json: world_size: found 2.0; expected an integer from 1 to 100000"},
      {[](auto& m) { m["world_size"] = 0; },
       "m.json: world_size: found 0; expected an integer from 1 to 100000"},
      {[](auto& m) { m["world_size"] = 18446744073709551615u; },
       "m.json: world_size: found 18446744073709551615; expected an integer"},
      {[](auto& m) { m["world_size"] = 4; },
       "m.json: files: found a list of 3; expected 5: one a rank, and model.h5"},
      {[](auto& m) { m["block_bytes"] = 4096; },
       "m.json: block_bytes: found 4096; expected an integer from 1048576 to 1048576"},
      {[](auto& m) { m["state_names"][0] = "a/b"; },
       "m.json: state_names: found a/b; expected letters, digits and _"},
      {[](auto& m) { m["state_names"][1] = "exp_avg"; }, "m.json: state_names: found exp_avg a second time"},
      {[](auto& m) { m["units"][0]["numel"] = 7; },
       "m.json: units[0].numel: found 7; expected a multiple of world_size, 2"},
      {[](auto& m) { m["units"][0]["dtype"] = "int8"; },
       "m.json: units[0].dtype: found \"int8\"; expected fp32, bf16, fp16 or fp64"},
      {[](auto& m) { m["units"][0]["trainable"] = 1; },
       "m.json: units[0].trainable: found 1; expected true or false"},
      {[](auto& m) { m["units"] = ordered_json::object(); },
       "m.json: units: found an object; expected a list"},
      {[](auto& m) { m["parameters"][0]["shape"][0] = -1; },
       "m.json: parameters[0].shape[0]: found -1; expected an integer from 0"},
      {[](auto& m) { m["parameters"][0]["shape"] = {1l << 40, 1l << 40}; },
       "m.json: parameters[0].shape: the product of the sizes is too large"},
      {[](auto& m) { m["parameters"][0]["shape"] = std::vector<int>(33, 1); },
       "m.json: parameters[0].shape: found a list of 33; expected at most 32"},
      {[](auto& m) { m["parameters"][0]["unit"] = 99; },
       "m.json: parameters[0].unit: found 99; expected an integer from 0 to"},
      {[](auto& m) { m["parameters"][0]["offset"] = 1; },
       "m.json: parameters[0].offset: found 1; expected a multiple of 64 bytes"},
      {[](auto& m) { m["parameters"][0]["offset"] = 160; },
       "m.json: parameters[0]: embedding.weight ends at element 237 of unit 0, which has"},
      {[](auto& m) { m["parameters"][1]["name"] = "head.weight"; },
       "m.json: parameters: found head.weight a second time"},
      {[](auto& m) { m["parameters"][3]["offset"] = m["parameters"][2]["offset"]; }, "lie at the same place"},
      {[](auto& m) { m["parameters"][3]["offset"] = m["parameters"][2]["offset"].template get<int>() + 16; },
       "m.json: parameters: fc.weight and fc.bias overlap"},
      {[](auto& m) { m["files"][1]["name"] = "../x"; },
       "m.json: files[1].name: found \"../x\"; expected rank_00001.h5"},
      {[](auto& m) { m["files"][1]["bytes"] = 1; }, "m.json: files[1]"},
      {[](auto& m) { m["files"][0]["blocks"] = "00"; },
       "m.json: files[0].blocks: expected 16 lower-case hexadecimal digits for each of 1 blocks"},
      {[](auto& m) { m["files"][0]["blocks"] = "00000000000000gg"; }, "m.json: files[0].blocks: expected 16"},
      {[](auto& m) { m["files"][0]["datasets"][0]["bytes"] = 3; },
       "m.json: files[0].datasets[0].bytes: found 3; expected "},
      {[](auto& m) { m["files"][0]["datasets"][0]["offset"] = 1 << 30; },
       "m.json: files[0].datasets[0]: /master/unit_00000 ends at byte"},
      {[](auto& m) { m["files"][0]["datasets"][0]["offset"] = m["files"][0]["datasets"][1]["offset"]; },
       "overlaps with another dataset"},
      {[](auto& m) { m["files"][0]["datasets"].erase(0); },
       "m.json: files[0]: dataset /master/unit_00000 is missing"},
      {[](auto& m) { m["files"][0]["datasets"][0]["name"] = "/x"; },
       "m.json: files[0]: dataset /master/unit_00000 is missing"},
      {[](auto& m) { m["files"][1]["datasets"].back()["name"] = "/x"; },
       "m.json: files[1]: dataset /x belongs to no unit"},
      {[](auto& m) { m["files"][2]["datasets"] = m["files"][1]["datasets"]; }, "m.json: files[2]"},
      {[](auto& m) { m["tensors"].erase(0); },
       "m.json: tensors: dataset /buffers/norm.fp32 belongs to no tensor"},
      {[](auto& m) { m["tensors"][0]["dataset"] = "/blobs/rng%2Fcpu"; },
       "m.json: tensors[0].dataset: found \"/blobs/rng%2Fcpu\"; expected a dataset of"},
      {[](auto& m) { m["state"] = 3; }, "m.json: state: found 3; expected an object"},
      {[](auto& m) { m["tag"] = ""; },
       "m.json: tag: found \"\"; expected a string of 1 to 200 bytes without NUL"},
      {[](auto& m) { m["tag"] = std::string("a\0", 2); }, "m.json: tag: found "},
  };
  for (const Case& c : cases) {
    const std::string error = error_with(c.change);
    EXPECT_THAT(error, AllOf(StartsWith("m.json: "), HasSubstr(c.message)));
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

TEST(Manifest, TextThatIsNoJson) {
  const auto error = [](const std::string& start) { return parse_error(seal_manifest(start)); };
  EXPECT_THAT(error("{\"a\": tru, "), StartsWith("m.json: is no JSON text: error at byte "));
  EXPECT_THAT(error("{\"tag\": 1, \"tag\": 2, "), StartsWith("m.json: \"tag\" is given twice in one object"));
  EXPECT_THAT(error("{\"a\": 1e999, "), StartsWith("m.json: is no JSON text"));
  std::string deep = "{\"state\": ";
  for (int i = 0; i < 100'000; ++i) deep += "[";
  EXPECT_THAT(error(deep), StartsWith("m.json: nested deeper than 64 levels"));
}

/// A random mutation: bytes changed, removed or copied, numbers replaced.
std::string mutate(std::string text, std::mt19937& random) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  for (size_t i = 0, num = 1 + below(3); i < num; ++i) {
    const size_t at = below(text.size()), size = below(30);
    switch (below(5)) {
      case 0: text[at] = static_cast<char>(random()); break;
      case 1: text.erase(at, size); break;
      case 2: text.insert(at, text.substr(below(text.size()), size)); break;
      case 3: {
        const size_t digit = text.find_first_of("0123456789", at);
        constexpr std::array<const char*, 8> kNumbers{
            "-1",  "9223372036854775807", "18446744073709551615", "1e308", "0.5", "4294967296", "\"\"",
            "null"};
        if (digit != std::string::npos) text.replace(digit, 1 + below(6), kNumbers[below(kNumbers.size())]);
        break;
      }
      default: {
        const size_t from = text.find_first_of("{[\"", at),
                     to = text.find_first_of("}]\"", below(text.size()));
        if (from != std::string::npos && to != std::string::npos) std::swap(text[from], text[to]);
      }
    }
    if (text.empty()) text = "{";
  }
  return text;
}

TEST(Manifest, MutationsNeverCrash) {
  const std::string text = sample().to_text();
  const std::string body = text.substr(0, text.rfind(kDigestKey));
  std::mt19937 random(11);
  int num_accepted = 0, num_refused = 0;
  for (int trial = 0; trial < 4'000; ++trial) {
    const std::string changed = seal_manifest(mutate(body, random));
    try {
      const Manifest manifest = Manifest::parse(changed, "m.json");
      EXPECT_EQ(Manifest::parse(manifest.to_text(), "m.json"), manifest);  // what is accepted is whole
      ++num_accepted;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), StartsWith("m.json: "));
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 2'000);
  EXPECT_GT(num_accepted, 40) << "the mutations stay close to good manifests";
}

TEST(BlockHashes, PiecesDoNotMatter) {
  std::mt19937 random(3);
  std::vector<std::byte> bytes(3 * kBlockBytes + 12'345);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  std::vector<uint64_t> expected;
  for (size_t at = 0; at < bytes.size(); at += kBlockBytes)
    expected.push_back(
        hash_block(std::span(bytes).subspan(at, std::min<size_t>(kBlockBytes, bytes.size() - at))));
  ASSERT_EQ(static_cast<int64_t>(expected.size()), num_blocks(static_cast<int64_t>(bytes.size())));
  for (size_t largest : {size_t{1'000}, size_t{70'000}, size_t{kBlockBytes}, size_t{5 * kBlockBytes}}) {
    BlockHasher hasher;
    for (std::span<const std::byte> left = bytes; !left.empty();) {
      const size_t size = std::min(left.size(), 1 + random() % largest);
      hasher.update(left.first(size));
      left = left.subspan(size);
    }
    EXPECT_EQ(hasher.bytes(), static_cast<int64_t>(bytes.size()));
    EXPECT_EQ(hasher.finish(), expected);
  }
  EXPECT_TRUE(BlockHasher().finish().empty());
  EXPECT_EQ(hashes_from_hex(hashes_to_hex(expected)), expected);
}

// Test vectors of XXH3 with seed 0, so that another reader's library can be checked against ours.
TEST(BlockHashes, AreXxh3) {
  EXPECT_EQ(hash_block({}), 0x2d06800538d394c2u);
  EXPECT_EQ(text_digest(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_FALSE(hashes_from_hex("0123456789abcde"));
  EXPECT_FALSE(hashes_from_hex("0123456789ABCDEF"));
  EXPECT_EQ(hashes_from_hex("0123456789abcdef"), std::vector<uint64_t>{0x0123456789abcdef});
}

}  // namespace
}  // namespace tessera::checkpoint::testing
