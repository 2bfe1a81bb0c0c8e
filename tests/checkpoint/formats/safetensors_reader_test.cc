// Safetensors files of other programs: errors name what is wrong, and no content crashes the reader.
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/checkpoint/formats/formats_testing.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(SafetensorsFile, HeaderLengths) {
  TestFolder folder;
  const auto path = folder / "m.safetensors";
  const auto error = [&](const std::string& content) {
    write_text(path, content);
    const std::string message = error_of<Error>([&] { SafetensorsFile{path}; });
    EXPECT_THAT(message, StartsWith(path.string()));
    return message.substr(path.string().size());
  };
  EXPECT_EQ(error(""), ": no safetensors file: it has 0 bytes, expected 8 at least");
  EXPECT_EQ(error("1234567"), ": no safetensors file: it has 7 bytes, expected 8 at least");
  EXPECT_EQ(error(std::string("\3\0\0\0\0\0\0\0{}", 10)),
            ": the header's length is 3, expected at most 2 (what the file has left)");
  EXPECT_EQ(error(std::string(8, '\xff') + "{}"),
            ": the header's length is 18446744073709551615, expected at most 2 (what the file has left)");
  EXPECT_EQ(error(std::string("\0\0\0\0\0\0\0\x80{}", 10)),
            ": the header's length is 9223372036854775808, expected at most 2 (what the file has left)");
  EXPECT_EQ(error(std::string(8, '\0')), ": no safetensors file: its header does not start with '{'");
  EXPECT_EQ(error(file_of("{}", "x")),
            ": the file has 1 bytes of data, expected 0 (something follows the last tensor)");
  std::filesystem::resize_file(path, 200'000'000);  // sparse
  std::ofstream(path, std::ios::binary | std::ios::in).write("\1\xe1\xf5\5\0\0\0\0{", 9);
  EXPECT_THAT(error_of<Error>([&] { SafetensorsFile{path}; }),
              HasSubstr("the header's length is 100000001, expected at most 100000000"));
  EXPECT_THAT(error_of<Error>([&] { SafetensorsFile{folder / "none"}; }), HasSubstr("No such file"));
  EXPECT_THAT(error_of<Error>([&] { SafetensorsFile{folder.path()}; }), HasSubstr("Is a directory"));
}

TEST(SafetensorsFile, ReadsRanges) {
  TestFolder folder;
  write_text(
      folder / "m.safetensors",
      file_of(
          R"({"b":{"dtype":"I16","shape":[2],"data_offsets":[3,7]},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}  )",
          "abcdefg"));
  const SafetensorsFile file(folder / "m.safetensors");
  ASSERT_EQ(file.tensors().size(), 2u);
  ASSERT_NE(file.find("b"), nullptr);
  EXPECT_EQ(file.find("c"), nullptr);
  std::string text(3, ' ');
  const int64_t begin = file.find("b")->offset;
  file.read_at(begin + 1, std::as_writable_bytes(std::span(text)));
  EXPECT_EQ(text, "efg");
  EXPECT_THROW(file.read_at(begin + 2, std::as_writable_bytes(std::span(text))), std::logic_error);
  EXPECT_THROW(file.read_at(begin - 1, std::as_writable_bytes(std::span(text))), std::logic_error);
}

TEST(SafetensorsIndex, WhatIsWrongIsSaid) {
  const std::vector<std::pair<std::string, std::string>> mistakes = {
      {"", "is no JSON at byte 1"},
      {"[]", "is a list, expected an object"},
      {"7", "is 7, expected an object"},
      {"{}", R"(has no "weight_map"; expected {"weight_map": {NAME: FILE}})"},
      {R"({"metadata":{"weight_map":{"a":"b"}}})",
       R"(has no "weight_map"; expected {"weight_map": {NAME: FILE}})"},
      {R"({"weight_map":[]})", R"("weight_map" is a list, expected an object)"},
      {R"({"weight_map":null})", R"("weight_map" is null, expected an object)"},
      {R"({"weight_map":{},"weight_map":{}})", R"(has "weight_map" twice)"},
      {R"({"weight_map":{"a":1}})", "tensor 'a' is in 1, expected the name of a file"},
      {R"({"weight_map":{"a":{"b":"c"}}})", "tensor 'a' is in an object, expected the name of a file"},
      {R"({"weight_map":{"a":["c"]}})", "tensor 'a' is in a list, expected the name of a file"},
      {R"({"weight_map":{"a":"../x"}})",
       "tensor 'a' is in '../x', expected a file in the index's own folder"},
      {R"({"weight_map":{"a":"/etc/passwd"}})",
       "tensor 'a' is in '/etc/passwd', expected a file in the index's own folder"},
      {R"({"weight_map":{"a":".."}})", "tensor 'a' is in '..', expected a file in the index's own folder"},
      {R"({"weight_map":{"a":""}})", "tensor 'a' is in '', expected a file in the index's own folder"},
      {R"({"weight_map":{"a":"x\u0000y"}})",
       R"(tensor 'a' is in 'x\x00y', expected a file in the index's own folder)"},
      {R"({"weight_map":{"a":"f","a":"f"}})", "has a tensor twice, in 'f' the second time"},
      {R"({"weight_map":{"a":"f"}} {})", "is no JSON at byte 26"},
  };
  for (const auto& [text, message] : mistakes)
    EXPECT_EQ(error_of<Error>([&] { parse_safetensors_index(text, "i.json"); }), "i.json: " + message)
        << text;
  const auto good = parse_safetensors_index(
      R"({"metadata":{"total_size":7,"x":[{"weight_map":[1]}]},"weight_map":{"a":"f","b":"g"},"more":null})",
      "i.json");
  EXPECT_EQ(good, (std::map<std::string, std::string>{{"a", "f"}, {"b", "g"}}));
}

// One to five places of a text changed: bytes replaced, removed, doubled, or digits of another number.
std::string mutated(std::string text, std::mt19937_64& source) {
  static constexpr std::string_view kLikely = "0123456789,:[]{}\" -.eE\\utn";
  for (uint64_t i = source() % 5; i != ~uint64_t{0} && !text.empty(); --i) {
    const size_t at = source() % text.size();
    switch (source() % 6) {
      case 0: text[at] = static_cast<char>(source()); break;
      case 1: text[at] = kLikely[source() % kLikely.size()]; break;
      case 2: text.erase(at, 1 + source() % 20); break;
      case 3: text.insert(at, text.substr(source() % text.size(), 1 + source() % 60)); break;
      case 4: text.insert(at, std::to_string(source())); break;
      case 5: text.insert(at, 1 + source() % 300, kLikely[source() % kLikely.size()]); break;
    }
  }
  return text;
}

TEST(Mutations, OfAFileNeverDoHarm) {
  TestFolder folder;
  write_model(Disk(), {.format = ModelFormat::kSafetensors, .path = folder / "m", .tensors = small_model()},
              3);
  // Without hashes, or each mutation would only fail the hash check.
  const SafetensorsFile written(folder / "m");
  SafetensorsHeader plain{.tensors = written.tensors(), .metadata = {{"format", "pt"}}};
  place_tensors(plain.tensors);
  const auto data_begin = static_cast<size_t>(written.tensors().front().offset);
  const std::string original =
      format_safetensors_header(plain, "m") + read_text(folder / "m").substr(data_begin);
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i)
    header_bytes = header_bytes << 8 | static_cast<unsigned char>(original[static_cast<size_t>(i)]);
  std::mt19937_64 source(11);
  int num_read = 0, num_refused = 0;
  for (int i = 0; i < 10'000; ++i) {
    // Half of them with a corrected header length, or most mutations would only fail the length check.
    const std::string content = i % 2 == 0 ? mutated(original, source)
                                           : file_of(mutated(original.substr(8, header_bytes), source),
                                                     original.substr(8 + header_bytes));
    write_text(folder / "x", content);
    try {
      const SafetensorsFile file(folder / "x");
      for (const SafetensorsTensor& tensor : file.tensors()) {
        std::vector<std::byte> data(static_cast<size_t>(tensor.bytes));
        file.read_at(tensor.offset, data);
      }
      ++num_read;
    } catch (const Error& error) {
      ++num_refused;
      EXPECT_THAT(error.what(), StartsWith((folder / "x").string()));
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
  EXPECT_GT(num_read, 50);
  EXPECT_GT(num_refused, 5'000);
}

TEST(Mutations, OfAnIndexNeverDoHarm) {
  const std::string original =
      R"({"metadata":{"total_size":12345,"note":["x",{"y":1.5e3}]},"weight_map":{"a.weight":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})";
  std::mt19937_64 source(12);
  int num_read = 0;
  for (int i = 0; i < 10'000; ++i) {
    try {
      for (const auto& [name, file] : parse_safetensors_index(mutated(original, source), "i.json"))
        EXPECT_EQ(file.find('/'), file.npos);
      ++num_read;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), StartsWith("i.json: "));
    }
  }
  EXPECT_GT(num_read, 50);
  EXPECT_LT(num_read, 9'000);
}

TEST(Mutations, DeepNestingIsNoTrouble) {
  const std::string brackets(1'000'000, '[');
  EXPECT_THAT(header_error(R"({"a":)" + brackets, 0),
              HasSubstr("tensor 'a' is an array, expected an object"));
  EXPECT_THAT(error_of<Error>([&] { parse_safetensors_index(R"({"x":)" + brackets, "i.json"); }),
              HasSubstr("is no JSON at byte"));
}

}  // namespace
}  // namespace tessera::checkpoint
