// Values and tensors of an optimizer as bytes: what is written is read, and damage is refused.
#include "zero/optimizer/state_values.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera::zero::testing {
namespace {

using nlohmann::json;
using tessera::testing::error_of;
using ::testing::HasSubstr;

std::vector<at::Tensor> tensors_of_all_types() {
  std::vector<at::Tensor> all;
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                                    at::kShort, at::kChar, at::kByte, at::kBool})
    all.push_back(at::arange(6, at::kFloat).reshape({2, 3}).to(type));
  all.push_back(all[1].t());         // not contiguous
  all.push_back(at::full({}, 7.0));  // no dimension
  all.push_back(at::empty({0, 4}));  // no element
  return all;
}

at::Tensor written_state() {
  StateValuesWriter writer;
  json list = json::array();
  for (const at::Tensor& tensor : tensors_of_all_types()) list.push_back(writer.add(tensor));
  return writer.finish({{"tensors", list}, {"number", 0.1}});
}

TEST(StateValues, AreReadAsTheyWereWritten) {
  const StateValuesReader reader(written_state(), "states");
  const JsonField values = reader.values(), list = values["tensors"];
  EXPECT_EQ(values["number"].number(), 0.1);
  EXPECT_FALSE(StateValuesReader::is_tensor(values["number"]));
  const std::vector<at::Tensor> expected = tensors_of_all_types();
  size_t i = 0;
  list.for_each([&](const JsonField& one) {
    ASSERT_TRUE(StateValuesReader::is_tensor(one));
    const at::Tensor tensor = reader.tensor(one);
    EXPECT_EQ(tensor.scalar_type(), expected[i].scalar_type());
    EXPECT_TRUE(at::equal(tensor, expected[i])) << i;
    ++i;
  });
  EXPECT_EQ(i, expected.size());
}

TEST(StateValues, WhatHasNoBytesHereIsRefused) {
  StateValuesWriter writer;
  EXPECT_THAT(error_of([&] { writer.add(at::ones({2}, at::kComplexFloat)); }), HasSubstr("ComplexFloat"));
  EXPECT_THAT(error_of([&] { writer.add(at::ones({2, 2}).to_sparse()); }), HasSubstr("Sparse"));
}

/// Reads all tensors.
std::string error_with(const std::string& text, int64_t num_bytes = 100) {
  const auto length = static_cast<int64_t>(text.size());
  at::Tensor data = at::zeros({8 + length + num_bytes}, at::kByte);
  std::memcpy(data.data_ptr(), &length, sizeof(length));
  std::memcpy(static_cast<char*>(data.data_ptr()) + 8, text.data(), text.size());
  return error_of([&] {
    const StateValuesReader reader(data, "states of X");
    reader.tensor(reader.values()["t"]);
  });
}

std::string document_with(const json& change) {
  json tensor = {
      {"$tessera", "tensor"}, {"dtype", "torch.float32"}, {"shape", {5, 5}}, {"begin", 0}, {"bytes", 100}};
  tensor.update(change);
  return json{{"$tessera", "values"}, {"value", {{"t", tensor}}}}.dump();
}

TEST(StateValues, DamageIsRefusedByPlace) {
  EXPECT_EQ(error_with(document_with(json::object())), "");
  EXPECT_THAT(error_with(document_with({{"begin", 1}})), HasSubstr("states of X: t.begin: found 1"));
  EXPECT_THAT(error_with(document_with({{"begin", -1}})), HasSubstr("begin"));
  EXPECT_THAT(error_with(document_with({{"bytes", 99}})), HasSubstr("expected 100 bytes"));
  EXPECT_THAT(error_with(document_with({{"shape", {5, 6}}, {"bytes", 120}})), HasSubstr("at most 100 bytes"));
  EXPECT_THAT(error_with(document_with({{"shape", {-5, 5}}})), HasSubstr("shape"));
  EXPECT_THAT(error_with(document_with({{"shape", {1LL << 40, 1LL << 40}}})), HasSubstr("shape"));
  EXPECT_THAT(error_with(document_with({{"dtype", "torch.complex64"}})), HasSubstr("a type of torch"));
  EXPECT_THAT(error_with("[]"), HasSubstr("without an object \"value\""));
  EXPECT_THAT(error_with("{"), HasSubstr("states of X: "));
  EXPECT_THAT(error_of([] { StateValuesReader(at::zeros({3}, at::kByte), "states of X"); }),
              HasSubstr("found 3 bytes"));
}

}  // namespace
}  // namespace tessera::zero::testing
