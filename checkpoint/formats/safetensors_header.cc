#include "checkpoint/formats/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kMetadata = "__metadata__";
constexpr size_t kMaxDimensions = 64;  // libtorch's own limit

struct TypeWord {
  DType type;
  std::string_view word;
};

// In the order in which the reference implementation writes them, last to first.
constexpr std::array kTypes = {
    TypeWord{DType::kBool, "BOOL"}, TypeWord{DType::kUInt8, "U8"},    TypeWord{DType::kInt8, "I8"},
    TypeWord{DType::kInt16, "I16"}, TypeWord{DType::kFloat16, "F16"}, TypeWord{DType::kBFloat16, "BF16"},
    TypeWord{DType::kInt32, "I32"}, TypeWord{DType::kFloat32, "F32"}, TypeWord{DType::kFloat64, "F64"},
    TypeWord{DType::kInt64, "I64"},
};

size_t rank_of(DType type) {
  return static_cast<size_t>(
      std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeWord& t) { return t.type == type; }) -
      kTypes.begin());
}

std::optional<DType> parse_type(std::string_view word) {
  for (const TypeWord& entry : kTypes)
    if (entry.word == word) return entry.type;
  return std::nullopt;
}

std::string type_words() {
  std::vector<std::string_view> words;
  for (const TypeWord& entry : kTypes) words.push_back(entry.word);
  return join(words, ", ");
}

std::string json_string(const std::string& text) { return nlohmann::json(text).dump(); }

// Builds the header while the parser reads, and so needs no tree of the JSON, which for hostile input would
// be many times as large as its text. Every handler throws or returns true.
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
        if (header_.metadata.contains(name)) fail(str(kMetadata, " has ", quoted_name(name), " twice"));
        metadata_key_ = name;
        return go(Place::kMetadataValue);
      default: return tensor_key(name);
    }
  }

  bool end_object() override {
    if (place_ == Place::kTensorKeys) {
      for (size_t i = 0; i < kFields.size(); ++i)
        if (!fields_[i]) fail(str("tensor ", quoted_name(tensor_.name), " has no \"", kFields[i], "\""));
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
      fail(str("tensor ", quoted_name(tensor_.name), ": data_offsets is [", join(offsets_, ", "),
               "], expected [BEGIN, END]"));
    return go(Place::kTensorKeys);
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadataValue) {
      header_.metadata.emplace(std::move(metadata_key_), value);
      return go(Place::kMetadataKeys);
    }
    if (place_ != Place::kType) return unexpected(quoted_name(value));
    const std::optional<DType> type = parse_type(value);
    if (!type)
      fail(str("tensor ", quoted_name(tensor_.name), ": dtype is ", quoted_name(value), ", expected one of ",
               type_words()));
    tensor_.type = *type;
    return go(Place::kTensorKeys);
  }

  bool number_unsigned(number_unsigned_t value) override {
    const bool is_shape = place_ == Place::kShapeItems;
    if (!is_shape && place_ != Place::kOffsetItems) return unexpected(str(value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail(str("tensor ", quoted_name(tensor_.name), ": ", is_shape ? "shape" : "data_offsets", " has ",
               value, ", expected less than 2^63"));
    std::vector<int64_t>& numbers = is_shape ? tensor_.shape : offsets_;
    numbers.push_back(static_cast<int64_t>(value));
    if (is_shape && numbers.size() > kMaxDimensions)
      fail(str("tensor ", quoted_name(tensor_.name), " has more than ", kMaxDimensions, " dimensions"));
    if (!is_shape && numbers.size() > 2)
      fail(str("tensor ", quoted_name(tensor_.name),
               ": data_offsets has more than two numbers, expected [BEGIN, END]"));
    return true;
  }

  bool number_integer(number_integer_t value) override { return unexpected(str(value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(quoted_name(text)); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool null() override { return unexpected("null"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail(str("no JSON at byte ", position, " of the header"));
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
    if (name == kMetadata) {
      if (has_metadata_) fail(str(kMetadata, " occurs twice"));
      has_metadata_ = true;
      return go(Place::kMetadata);
    }
    if (!names_.insert(name).second) fail(str("tensor ", quoted_name(name), " occurs twice"));
    tensor_ = {};
    tensor_.name = name;
    return go(Place::kTensor);
  }

  bool tensor_key(const string_t& name) {
    const auto field = static_cast<size_t>(std::find(kFields.begin(), kFields.end(), name) - kFields.begin());
    if (field == kFields.size())
      fail(str("tensor ", quoted_name(tensor_.name), " has the key ", quoted_name(name),
               ", expected dtype, shape and data_offsets"));
    if (fields_[field])
      fail(str("tensor ", quoted_name(tensor_.name), " has \"", kFields[field], "\" twice"));
    fields_[field] = true;
    if (field == 2) offsets_.clear();
    return go(std::array{Place::kType, Place::kShape, Place::kOffsets}[field]);
  }

  bool unexpected(const std::string& found) {
    switch (place_) {
      case Place::kStart: fail(str("the header is ", found, ", expected an object"));
      case Place::kMetadata: fail(str(kMetadata, " is ", found, ", expected an object"));
      case Place::kMetadataValue:
        fail(str(kMetadata, ": ", quoted_name(metadata_key_), " is ", found, ", expected a string"));
      case Place::kTensor:
        fail(str("tensor ", quoted_name(tensor_.name), " is ", found, ", expected an object"));
      case Place::kType:
        fail(str("tensor ", quoted_name(tensor_.name), ": dtype is ", found, ", expected a string"));
      case Place::kShape:
      case Place::kShapeItems:
        fail(str("tensor ", quoted_name(tensor_.name), ": shape has ", found, ", expected a list of sizes"));
      default:
        fail(str("tensor ", quoted_name(tensor_.name), ": data_offsets has ", found,
                 ", expected [BEGIN, END]"));
    }
  }

  [[noreturn]] void fail(const std::string& what) { throw CheckpointError(str(file_, ": ", what)); }

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
    throw CheckpointError(
        str(file, ": tensor ", quoted_name(tensor.name), " has ", tensor.bytes, " bytes of data, expected ",
            overflow ? std::string("more than 2^63") : str(bytes), " for ", kTypes[rank_of(tensor.type)].word,
            " and shape ", describe_shape(tensor.shape)));
}

}  // namespace

void place_tensors(std::vector<SafetensorsTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    const size_t rank_a = rank_of(a.type), rank_b = rank_of(b.type);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  int64_t offset = 0;
  for (SafetensorsTensor& tensor : tensors) {
    tensor.offset = offset;
    tensor.bytes = size_bytes(tensor.type);
    for (const int64_t size : tensor.shape) tensor.bytes *= size;
    offset += tensor.bytes;
  }
}

std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file) {
  std::string json = "{";
  const char* separator = "";
  if (!header.metadata.empty()) {
    json += str("\"", kMetadata, "\":", nlohmann::json(header.metadata).dump());
    separator = ",";
  }
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.name == kMetadata)
      throw CheckpointError(str(file, ": a safetensors file cannot hold a tensor named ", kMetadata));
    json += str(separator, json_string(tensor.name), ":{\"dtype\":\"", kTypes[rank_of(tensor.type)].word,
                "\",\"shape\":[", join(tensor.shape, ","), "],\"data_offsets\":[", tensor.offset, ",",
                tensor.offset + tensor.bytes, "]}");
    separator = ",";
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(json.size()) > kMaxSafetensorsHeaderBytes)
    throw CheckpointError(str(file, ": the header has ", json.size(), " bytes, and readers take ",
                              kMaxSafetensorsHeaderBytes,
                              " at most; the model has too many tensors for one file, shards can hold it"));
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return out + json;
}

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
