#include "checkpoint/formats/safetensors_header.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/safetensors_types.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {

void place_tensors(std::vector<SafetensorsTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    const size_t rank_a = safetensors_rank(a.type), rank_b = safetensors_rank(b.type);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  int64_t offset = 0;
  for (SafetensorsTensor& tensor : tensors) {
    tensor.offset = offset;
    tensor.bytes = numel_of(tensor.shape) * size_bytes(tensor.type);
    offset += tensor.bytes;
  }
}

std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file) {
  std::string json = "{";
  const char* separator = "";
  if (!header.metadata.empty()) {
    json += str("\"", kSafetensorsMetadata, "\":", nlohmann::json(header.metadata).dump());
    separator = ",";
  }
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.name == kSafetensorsMetadata)
      throw CheckpointError(file, ": a safetensors file cannot hold a tensor named ", kSafetensorsMetadata);
    json += str(separator, nlohmann::json(tensor.name).dump(), ":{\"dtype\":\"",
                safetensors_type(tensor.type), "\",\"shape\":[", join(tensor.shape, ","),
                "],\"data_offsets\":[", tensor.offset, ",", tensor.offset + tensor.bytes, "]}");
    separator = ",";
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(json.size()) > kMaxSafetensorsHeaderBytes)
    throw CheckpointError(file, ": the header has ", json.size(), " bytes, and readers take ",
                          kMaxSafetensorsHeaderBytes,
                          " at most; the model has too many tensors for one file, shards can hold it");
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return out + json;
}

namespace {

constexpr size_t kMaxDimensions = 64;  // libtorch's limit

/// Reads the header into the struct itself: a tree of the JSON could be many times as large as its text.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& file) : in_(text), file_(file) {}

  SafetensorsHeader read() {
    std::set<std::string> names;
    bool has_metadata = false;
    in_.enter_object();
    while (in_.next_key(name_)) {
      if (name_ == kSafetensorsMetadata) {
        if (std::exchange(has_metadata, true)) fail(kSafetensorsMetadata, " occurs twice");
        read_metadata();
      } else {
        if (!names.insert(name_).second) fail("tensor ", quoted_name(name_), " occurs twice");
        header_.tensors.push_back(read_tensor());
      }
    }
    in_.finish();
    return std::move(header_);
  }

 private:
  void read_metadata() {
    if (in_.next() != JsonKind::kObject) fail(kSafetensorsMetadata, " is ", found(), ", expected an object");
    in_.enter_object();
    for (std::string key; in_.next_key(key);) {
      if (header_.metadata.contains(key)) fail(kSafetensorsMetadata, " has ", quoted_name(key), " twice");
      if (in_.next() != JsonKind::kString)
        fail(kSafetensorsMetadata, ": ", quoted_name(key), " is ", found(), ", expected a string");
      header_.metadata.emplace(key, in_.string());
    }
  }

  SafetensorsTensor read_tensor() {
    constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};
    SafetensorsTensor tensor;
    tensor.name = name_;
    std::array<bool, 3> has = {};
    if (in_.next() != JsonKind::kObject) fail_tensor(" is ", found(), ", expected an object");
    in_.enter_object();
    for (std::string key; in_.next_key(key);) {
      const auto field =
          static_cast<size_t>(std::find(kFields.begin(), kFields.end(), key) - kFields.begin());
      if (field == kFields.size())
        fail_tensor(" has the key ", quoted_name(key), ", expected dtype, shape and data_offsets");
      if (std::exchange(has[field], true)) fail_tensor(" has \"", key, "\" twice");
      if (field == 0) tensor.type = read_type();
      if (field == 1) tensor.shape = read_shape();
      if (field == 2) read_offsets(tensor);
    }
    for (size_t i = 0; i < kFields.size(); ++i)
      if (!has[i]) fail_tensor(" has no \"", kFields[i], "\"");
    return tensor;
  }

  DType read_type() {
    if (in_.next() != JsonKind::kString) fail_tensor(": dtype is ", found(), ", expected a string");
    const std::string word = in_.string();
    for (const auto& [type, name] : kSafetensorsTypes)
      if (name == word) return type;
    std::vector<std::string_view> known;
    for (const auto& [type, name] : kSafetensorsTypes) known.push_back(name);
    fail_tensor(": dtype is ", quoted_name(word), ", expected one of ", join(known, ", "));
  }

  std::vector<int64_t> read_shape() {
    std::vector<int64_t> shape;
    read_numbers("shape", "a list of sizes", [&](int64_t size) {
      shape.push_back(size);
      if (shape.size() > kMaxDimensions) fail_tensor(" has more than ", kMaxDimensions, " dimensions");
    });
    return shape;
  }

  void read_offsets(SafetensorsTensor& tensor) {
    std::vector<int64_t> offsets;
    read_numbers("data_offsets", "[BEGIN, END]", [&](int64_t offset) {
      offsets.push_back(offset);
      if (offsets.size() > 2) fail_tensor(": data_offsets has more than two numbers, expected [BEGIN, END]");
    });
    if (offsets.size() != 2 || offsets[0] > offsets[1])
      fail_tensor(": data_offsets is [", join(offsets, ", "), "], expected [BEGIN, END]");
    tensor.offset = offsets[0];
    tensor.bytes = offsets[1] - offsets[0];
  }

  void read_numbers(const char* field, const char* expected, const std::function<void(int64_t)>& add) {
    if (in_.next() != JsonKind::kArray) fail_tensor(": ", field, " has ", found(), ", expected ", expected);
    in_.enter_array();
    while (in_.next_element()) {
      if (in_.next() != JsonKind::kUnsigned)
        fail_tensor(": ", field, " has ", found(), ", expected ", expected);
      const uint64_t number = in_.unsigned_integer();
      if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        fail_tensor(": ", field, " has ", number, ", expected less than 2^63");
      add(static_cast<int64_t>(number));
    }
  }

  std::string found() { return in_.found("an array"); }

  template <class... What>
  [[noreturn]] void fail(const What&... what) {
    throw CheckpointError(file_, ": ", what...);
  }
  template <class... What>
  [[noreturn]] void fail_tensor(const What&... what) {
    fail("tensor ", quoted_name(name_), what...);
  }

  JsonReader in_;
  const std::string& file_;
  SafetensorsHeader header_;
  std::string name_;  // of the tensor that is being read
};

SafetensorsHeader read_header(std::string_view text, const std::string& file) {
  try {
    return HeaderReader(text, file).read();
  } catch (const JsonError& error) {
    throw CheckpointError(file, ": no JSON at byte ", error.offset() + 1, " of the header");
  }
}

void check_size(const SafetensorsTensor& tensor, const std::string& file) {
  int64_t bytes = size_bytes(tensor.type);
  bool overflow = false;
  for (const int64_t size : tensor.shape) overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  if (overflow || bytes != tensor.bytes)
    throw CheckpointError(file, ": tensor ", quoted_name(tensor.name), " has ", tensor.bytes,
                          " bytes of data, expected ", overflow ? std::string("more than 2^63") : str(bytes),
                          " for ", safetensors_type(tensor.type), " and shape ",
                          describe_shape(tensor.shape));
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           const std::string& file) {
  if (!text.starts_with('{'))
    throw CheckpointError(file, ": no safetensors file: its header does not start with '{'");
  SafetensorsHeader header = read_header(text, file);
  // Tensors without elements come before the one that starts where they do.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
            });
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    check_size(tensor, file);
    if (tensor.offset != end)
      throw CheckpointError(file, ": tensor ", quoted_name(tensor.name), " starts at byte ", tensor.offset,
                            " of the data, expected ", end,
                            tensor.offset < end ? " (it overlaps another)" : " (there is a hole)");
    end += tensor.bytes;
  }
  if (end != data_bytes)
    throw CheckpointError(file, ": the file has ", data_bytes, " bytes of data, expected ", end,
                          data_bytes < end ? " (it is truncated)" : " (something follows the last tensor)");
  return header;
}

}  // namespace tessera::checkpoint
