// The header of a safetensors file: what is refused, and that a header is read as it was written.
#include "checkpoint/formats/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "tests/checkpoint/formats/formats_testing.h"

namespace tessera::checkpoint {
namespace {

TEST(SafetensorsHeader, WhatIsWrongIsSaid) {
  struct Mistake {
    const char* header;
    int64_t data_bytes;
    const char* message;
  };
  const std::vector<Mistake> mistakes = {
      {"", 0, "no safetensors file: its header does not start with '{'"},
      {" {}", 0, "no safetensors file: its header does not start with '{'"},
      {"[]", 0, "no safetensors file: its header does not start with '{'"},
      {"{", 0, "no JSON at byte 2 of the header"},
      {"{} x", 0, "no JSON at byte 4 of the header"},
      {"{}{}", 0, "no JSON at byte 3 of the header"},
      {"{\"a\xff\":1}", 0, "no JSON at byte 4 of the header"},
      {R"({"a":1})", 0, "tensor 'a' is 1, expected an object"},
      {R"({"a":null})", 0, "tensor 'a' is null, expected an object"},
      {R"({"a":[[[]]]})", 0, "tensor 'a' is an array, expected an object"},
      {R"({"a":{}})", 0, R"(tensor 'a' has no "dtype")"},
      {R"({"a":{"dtype":"F32","shape":[]}})", 4, R"(tensor 'a' has no "data_offsets")"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, R"(tensor 'a' has no "shape")"},
      {R"({"a":{"dtype":"F32","dtype":"F32"}})", 4, R"(tensor 'a' has "dtype" twice)"},
      {R"({"a":{"shape":[],"shape":[]}})", 4, R"(tensor 'a' has "shape" twice)"},
      {R"({"a":{"kind":"F32"}})", 4, "tensor 'a' has the key 'kind', expected dtype, shape and data_offsets"},
      {R"({"a":{"dtype":7}})", 4, "tensor 'a': dtype is 7, expected a string"},
      {R"({"a":{"dtype":"F6_E3M2"}})", 4,
       "tensor 'a': dtype is 'F6_E3M2', expected one of BOOL, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, "
       "F8_E4M3FNUZ, "
       "F8_E5M2FNUZ, I16, U16, F16, BF16, I32, U32, F32, C64, F64, I64, U64"},
      {R"({"a":{"dtype":{}}})", 4, "tensor 'a': dtype is an object, expected a string"},
      {R"({"a":{"shape":3}})", 4, "tensor 'a': shape has 3, expected a list of sizes"},
      {R"({"a":{"shape":[-1]}})", 4, "tensor 'a': shape has -1, expected a list of sizes"},
      {R"({"a":{"shape":[1.5]}})", 4, "tensor 'a': shape has '1.5', expected a list of sizes"},
      {R"({"a":{"shape":[true]}})", 4, "tensor 'a': shape has true, expected a list of sizes"},
      {R"({"a":{"shape":[[1]]}})", 4, "tensor 'a': shape has an array, expected a list of sizes"},
      {R"({"a":{"shape":["1"]}})", 4, "tensor 'a': shape has '1', expected a list of sizes"},
      {R"({"a":{"shape":[9223372036854775808]}})", 4,
       "tensor 'a': shape has 9223372036854775808, expected less than 2^63"},
      {R"({"a":{"shape":[99999999999999999999]}})", 4,
       "tensor 'a': shape has '99999999999999999999', expected a list of sizes"},
      {R"({"a":{"data_offsets":[0]}})", 4, "tensor 'a': data_offsets is [0], expected [BEGIN, END]"},
      {R"({"a":{"data_offsets":[4,0]}})", 4, "tensor 'a': data_offsets is [4, 0], expected [BEGIN, END]"},
      {R"({"a":{"data_offsets":[0,1,2]}})", 4,
       "tensor 'a': data_offsets has more than two numbers, expected [BEGIN, END]"},
      {R"({"a":{"data_offsets":{}}})", 4, "tensor 'a': data_offsets has an object, expected [BEGIN, END]"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
       "tensor 'a' has 4 bytes of data, expected 8 for F32 and shape [2]"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "tensor 'a' has 0 bytes of data, expected more than 2^63 for F32 and shape [4294967296, 4294967296]"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3,
       "tensor 'a' starts at byte 1 of the data, expected 0 (there is a hole)"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "tensor 'b' starts at byte 1 of the data, expected 2 (it overlaps another)"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
       2, "tensor 'b' starts at byte 0 of the data, expected 2 (it overlaps another)"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"e":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}})",
       2, "tensor 'e' starts at byte 9 of the data, expected 2 (there is a hole)"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 3,
       "the file has 3 bytes of data, expected 2 (something follows the last tensor)"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1,
       "the file has 1 bytes of data, expected 2 (it is truncated)"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "tensor 'a' occurs twice"},
      {R"({"__metadata__":7})", 0, "__metadata__ is 7, expected an object"},
      {R"({"__metadata__":{"k":7}})", 0, "__metadata__: 'k' is 7, expected a string"},
      {R"({"__metadata__":{"k":{}}})", 0, "__metadata__: 'k' is an object, expected a string"},
      {R"({"__metadata__":{"k":"a","k":"b"}})", 0, "__metadata__ has 'k' twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ occurs twice"},
      {R"({"line\nbreak":7})", 0, R"(tensor 'line\x0abreak' is 7, expected an object)"},
  };
  for (const Mistake& mistake : mistakes)
    EXPECT_EQ(header_error(mistake.header, mistake.data_bytes),
              std::string("m.safetensors: ") + mistake.message)
        << mistake.header;
  std::string deep = R"({"a":{"shape":[1)";
  for (int i = 0; i < 64; ++i) deep += ",1";
  EXPECT_EQ(header_error(deep + "]}}", 1), "m.safetensors: tensor 'a' has more than 64 dimensions");
}

TEST(SafetensorsHeader, IsReadAsItWasWritten) {
  SafetensorsHeader header;
  header.metadata = {{"format", "pt"}, {"note", "two\nlines \"and\" quotes"}};
  for (const auto& [type, word] : kSafetensorsTypes)
    header.tensors.push_back({"t." + std::string(name_of(type)), {3, 1, 5}, type, 0, 0});
  header.tensors.push_back({"重み", {}, DType::kInt8, 0, 0});
  header.tensors.push_back({"empty", {4, 0}, DType::kFloat32, 0, 0});
  place_tensors(header.tensors);
  const std::string head = format_safetensors_header(header, "x");
  EXPECT_EQ(head.size() % 8, 0u);
  const SafetensorsTensor& last = header.tensors.back();
  const SafetensorsHeader read =
      parse_safetensors_header(std::string_view(head).substr(8), last.offset + last.bytes, "x");
  EXPECT_EQ(read.metadata, header.metadata);
  ASSERT_EQ(read.tensors.size(), header.tensors.size());
  for (const SafetensorsTensor& tensor : header.tensors) {
    const auto found = std::find_if(read.tensors.begin(), read.tensors.end(),
                                    [&](const auto& other) { return other.name == tensor.name; });
    ASSERT_NE(found, read.tensors.end());
    EXPECT_EQ(std::tie(found->shape, found->type, found->offset, found->bytes),
              std::tie(tensor.shape, tensor.type, tensor.offset, tensor.bytes));
    EXPECT_EQ(tensor.offset % size_bytes(tensor.type), 0) << "tensors are aligned";
  }
}

}  // namespace
}  // namespace tessera::checkpoint
