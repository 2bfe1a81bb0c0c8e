#include "zero/optimizer/state_values.h"

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/str.h"

namespace tessera::zero {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<at::ScalarType, std::string_view>, 10> kTypes{{
    {at::kDouble, "torch.float64"},
    {at::kFloat, "torch.float32"},
    {at::kHalf, "torch.float16"},
    {at::kBFloat16, "torch.bfloat16"},
    {at::kLong, "torch.int64"},
    {at::kInt, "torch.int32"},
    {at::kShort, "torch.int16"},
    {at::kChar, "torch.int8"},
    {at::kByte, "torch.uint8"},
    {at::kBool, "torch.bool"},
}};

at::Tensor bytes_of(const at::Tensor& contiguous) { return contiguous.view({-1}).view(at::kByte); }

at::TensorOptions on_cpu(at::ScalarType type) { return at::TensorOptions(at::kCPU).dtype(type); }

const std::pair<at::ScalarType, std::string_view>& type_of(const at::Tensor& tensor) {
  const auto* const type = std::ranges::find_if(kTypes, [&](const auto& one) {
    return tensor.layout() == at::kStrided && one.first == tensor.scalar_type();
  });
  if (type == kTypes.end())
    throw Error("a tensor of ", tensor.layout(), " ", tensor.scalar_type(),
                " cannot be saved; expected a dense one of fp64, fp32, fp16, bf16, an integer type or bool");
  return *type;
}

}  // namespace

void StateValuesWriter::check(const at::Tensor& tensor) { type_of(tensor); }

json StateValuesWriter::add(const at::Tensor& tensor) {
  const std::string_view type = type_of(tensor).second;
  parts_.push_back(bytes_of(tensor.detach().cpu().contiguous()));
  const int64_t bytes = parts_.back().numel();
  return {{"$tessera", "tensor"},
          {"dtype", type},
          {"shape", tensor.sizes().vec()},
          {"begin", std::exchange(size_, size_ + bytes)},
          {"bytes", bytes}};
}

at::Tensor StateValuesWriter::finish(const json& values) const {
  const std::string text = json{{"$tessera", "values"}, {"value", values}}.dump();
  const uint64_t length = text.size();
  at::Tensor head = at::empty({static_cast<int64_t>(sizeof(length) + length)}, on_cpu(at::kByte));
  std::memcpy(head.data_ptr(), &length, sizeof(length));
  std::memcpy(static_cast<char*>(head.data_ptr()) + sizeof(length), text.data(), length);
  std::vector<at::Tensor> all = {head};
  all.insert(all.end(), parts_.begin(), parts_.end());
  return at::cat(all);
}

StateValuesReader::StateValuesReader(const at::Tensor& data, std::string what) : what_(std::move(what)) {
  const auto fail = [&](const std::string& found) {
    throw Error(what_, ": ", found, "; expected what this optimizer has saved");
  };
  uint64_t length = 0;
  if (data.numel() < static_cast<int64_t>(sizeof(length))) fail(str("found ", data.numel(), " bytes"));
  const auto* bytes = static_cast<const char*>(data.const_data_ptr());
  std::memcpy(&length, bytes, sizeof(length));
  const auto rest = static_cast<uint64_t>(data.numel()) - sizeof(length);
  if (length > rest) fail(str("found a text of ", length, " bytes in ", data.numel()));
  try {
    document_ = parse_json(std::string_view(bytes + sizeof(length), length));
  } catch (const JsonError& error) {
    fail(error.what());
  }
  if (!document_.is_object() || !document_.contains("value") || !document_["value"].is_object())
    fail("found a text without an object \"value\"");
  parts_ = data.narrow(0, static_cast<int64_t>(sizeof(length) + length), static_cast<int64_t>(rest - length));
}

JsonField StateValuesReader::values() const { return JsonField::of<Error>(document_["value"], what_); }

bool StateValuesReader::is_tensor(const JsonField& value) {
  const json& json = value.value();
  return json.is_object() && json.contains("$tessera") && json["$tessera"] == "tensor";
}

at::Tensor StateValuesReader::tensor(const JsonField& value) const {
  const JsonField dtype = value["dtype"], dims = value["shape"], begin = value["begin"],
                  size = value["bytes"];
  const std::string& name = dtype.text();
  const auto* const type = std::ranges::find_if(kTypes, [&](const auto& one) { return one.second == name; });
  if (type == kTypes.end()) dtype.fail("a type of torch");
  std::vector<int64_t> shape;
  const auto width = static_cast<int64_t>(c10::elementSize(type->first));
  int64_t bytes = width, without_zeros = width;  // strides of a tensor without elements have to fit, too
  dims.for_each([&](const JsonField& dim) {
    shape.push_back(dim.integer(0));
    if (__builtin_mul_overflow(without_zeros, std::max<int64_t>(shape.back(), 1), &without_zeros))
      dims.fail("a shape");
    bytes = shape.back() == 0 ? 0 : bytes * shape.back();
  });
  if (size.integer(0) != bytes) size.fail(str(bytes, " bytes"));
  if (bytes > parts_.numel()) size.fail(str("at most ", parts_.numel(), " bytes"));
  const int64_t first = begin.integer(0, parts_.numel() - bytes);
  at::Tensor tensor = at::empty(shape, on_cpu(type->first));
  const auto* const data = static_cast<const uint8_t*>(parts_.const_data_ptr()) + first;
  if (type->first == at::kBool && std::any_of(data, data + bytes, [](uint8_t byte) { return byte > 1; }))
    value.fail("bytes of bool, 0 or 1");
  if (bytes > 0) std::memcpy(tensor.data_ptr(), data, static_cast<size_t>(bytes));
  return tensor;
}

}  // namespace tessera::zero
