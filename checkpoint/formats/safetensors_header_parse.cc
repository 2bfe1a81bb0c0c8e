#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/safetensors_header.h"
#include "checkpoint/formats/safetensors_types.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kMaxDimensions = 64;  // libtorch's limit

std::optional<DType> parse_type(std::string_view word) {
  for (const auto& [type, name] : kSafetensorsTypes)
    if (name == word) return type;
  return std::nullopt;
}

std::string type_words() {
  std::vector<std::string_view> words;
  for (const auto& [type, name] : kSafetensorsTypes) words.push_back(name);
  return join(words, ", ");
}

// Builds the header from the parser's events. A tree of the JSON could be many times as large as its text.
// Every handler throws or returns true.
class HeaderBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderBuilder(const std::string& file) : file_(file) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kStart: return go(Place::kTop);
      case Place::kMetadata: return go(Place::kMetadataKeys);
      case Place::kTensor: fields_ = {}; return go(Place::kTensorKeys);
      default: return unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    switch (place_) {
      case Place::kTop: return top_key(name);
      case Place::kMetadataKeys:
        if (header_.metadata.contains(name)) fail(kSafetensorsMetadata, " has ", quoted_name(name), " twice");
        metadata_key_ = name;
        return go(Place::kMetadataValue);
      default: return tensor_key(name);
    }
  }

  bool end_object() override {
    if (place_ == Place::kTensorKeys) {
      for (size_t i = 0; i < kFields.size(); ++i)
        if (!fields_[i]) fail_tensor(" has no \"", kFields[i], "\"");
      tensor_.offset = offsets_[0];
      tensor_.bytes = offsets_[1] - offsets_[0];
      header_.tensors.push_back(std::move(tensor_));
    }
    return go(place_ == Place::kTop ? Place::kEnd : Place::kTop);
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kShape) return go(Place::kShapeItems);
    if (place_ == Place::kOffsets) return go(Place::kOffsetItems);
    return unexpected("an array");
  }

  bool end_array() override {
    if (place_ == Place::kOffsetItems && (offsets_.size() != 2 || offsets_[0] > offsets_[1]))
      fail_tensor(": data_offsets is [", join(offsets_, ", "), "], expected [BEGIN, END]");
    return go(Place::kTensorKeys);
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadataValue) {
      header_.metadata.emplace(std::move(metadata_key_), value);
      return go(Place::kMetadataKeys);
    }
    if (place_ != Place::kType) return unexpected(quoted_name(value));
    const std::optional<DType> type = parse_type(value);
    if (!type) fail_tensor(": dtype is ", quoted_name(value), ", expected one of ", type_words());
    tensor_.type = *type;
    return go(Place::kTensorKeys);
  }

  bool number_unsigned(number_unsigned_t value) override {
    const bool is_shape = place_ == Place::kShapeItems;
    if (!is_shape && place_ != Place::kOffsetItems) return unexpected(str(value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail_tensor(": ", is_shape ? "shape" : "data_offsets", " has ", value, ", expected less than 2^63");
    std::vector<int64_t>& numbers = is_shape ? tensor_.shape : offsets_;
    numbers.push_back(static_cast<int64_t>(value));
    if (is_shape && numbers.size() > kMaxDimensions)
      fail_tensor(" has more than ", kMaxDimensions, " dimensions");
    if (!is_shape && numbers.size() > 2)
      fail_tensor(": data_offsets has more than two numbers, expected [BEGIN, END]");
    return true;
  }

  bool number_integer(number_integer_t value) override { return unexpected(str(value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(quoted_name(text)); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool null() override { return unexpected("null"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail("no JSON at byte ", position, " of the header");
  }

 private:
  enum class Place {
    kStart,
    kTop,
    kMetadata,
    kMetadataKeys,
    kMetadataValue,
    kTensor,
    kTensorKeys,
    kType,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetItems,
    kEnd
  };
  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};

  bool go(Place place) {
    place_ = place;
    return true;
  }

  bool top_key(const string_t& name) {
    if (name == kSafetensorsMetadata) {
      if (has_metadata_) fail(kSafetensorsMetadata, " occurs twice");
      has_metadata_ = true;
      return go(Place::kMetadata);
    }
    if (!names_.insert(name).second) fail("tensor ", quoted_name(name), " occurs twice");
    tensor_ = {};
    tensor_.name = name;
    return go(Place::kTensor);
  }

  bool tensor_key(const string_t& name) {
    const auto field = static_cast<size_t>(std::find(kFields.begin(), kFields.end(), name) - kFields.begin());
    if (field == kFields.size())
      fail_tensor(" has the key ", quoted_name(name), ", expected dtype, shape and data_offsets");
    if (fields_[field]) fail_tensor(" has \"", kFields[field], "\" twice");
    fields_[field] = true;
    if (field == 2) offsets_.clear();
    return go(std::array{Place::kType, Place::kShape, Place::kOffsets}[field]);
  }

  bool unexpected(const std::string& found) {
    switch (place_) {
      case Place::kStart: fail("the header is ", found, ", expected an object");
      case Place::kMetadata: fail(kSafetensorsMetadata, " is ", found, ", expected an object");
      case Place::kMetadataValue:
        fail(kSafetensorsMetadata, ": ", quoted_name(metadata_key_), " is ", found, ", expected a string");
      case Place::kTensor: fail_tensor(" is ", found, ", expected an object");
      case Place::kType: fail_tensor(": dtype is ", found, ", expected a string");
      case Place::kShape:
      case Place::kShapeItems: fail_tensor(": shape has ", found, ", expected a list of sizes");
      default: fail_tensor(": data_offsets has ", found, ", expected [BEGIN, END]");
    }
  }

  template <class... What>
  [[noreturn]] void fail(const What&... what) {
    throw CheckpointError(str(file_, ": ", what...));
  }
  template <class... What>
  [[noreturn]] void fail_tensor(const What&... what) {
    fail("tensor ", quoted_name(tensor_.name), what...);
  }

  const std::string& file_;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  Place place_ = Place::kStart;
  bool has_metadata_ = false;
  std::string metadata_key_;
  SafetensorsTensor tensor_;
  std::array<bool, 3> fields_ = {};
  std::vector<int64_t> offsets_;
};

void check_size(const SafetensorsTensor& tensor, const std::string& file) {
  int64_t bytes = size_bytes(tensor.type);
  bool overflow = false;
  for (const int64_t size : tensor.shape) overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  if (overflow || bytes != tensor.bytes)
    throw CheckpointError(str(file, ": tensor ", quoted_name(tensor.name), " has ", tensor.bytes,
                              " bytes of data, expected ",
                              overflow ? std::string("more than 2^63") : str(bytes), " for ",
                              safetensors_type(tensor.type), " and shape ", describe_shape(tensor.shape)));
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           const std::string& file) {
  if (!text.starts_with('{'))
    throw CheckpointError(str(file, ": no safetensors file: its header does not start with '{'"));
  HeaderBuilder builder(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  SafetensorsHeader header = builder.take();
  // Tensors without elements come before the one that starts where they do.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
            });
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    check_size(tensor, file);
    if (tensor.offset != end)
      throw CheckpointError(str(file, ": tensor ", quoted_name(tensor.name), " starts at byte ",
                                tensor.offset, " of the data, expected ", end,
                                tensor.offset < end ? " (it overlaps another)" : " (there is a hole)"));
    end += tensor.bytes;
  }
  if (end != data_bytes)
    throw CheckpointError(
        str(file, ": the file has ", data_bytes, " bytes of data, expected ", end,
            data_bytes < end ? " (it is truncated)" : " (something follows the last tensor)"));
  return header;
}

}  // namespace tessera::checkpoint
