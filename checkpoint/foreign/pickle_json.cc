#include "checkpoint/foreign/pickle_json.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "checkpoint/formats/numpy_value.h"
#include "checkpoint/value_tag.h"
#include "core/float_bits.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;
using Kind = PickleValue::Kind;

constexpr int64_t kMaxValues = 1 << 20;          // of one text of JSON: values may be shared many times
constexpr int64_t kMostArrayElements = 1 << 16;  // of an array of numpy's

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t three = 0;
    for (size_t k = 0; k < 3; ++k)
      three = three << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0U);
    for (size_t k = 0; k < 4; ++k) out += i + k > bytes.size() ? '=' : kDigits[three >> (18 - 6 * k) & 63];
  }
  return out;
}

class Converter {
 public:
  Converter(const TorchFile* file, std::vector<std::string>& not_read, bool tags)
      : file_(file), not_read_(not_read), tags_(tags) {}

  std::optional<json> convert(const PickleValue& value, const std::string& what, int depth) {
    if (depth > kMaxJsonDepth - 8) return leave_out(what, "nested deeper than JSON may be");
    if (++num_values_ > kMaxValues) return leave_out(what, "too many values");
    switch (value.kind) {
      case Kind::kNone: return json(nullptr);
      case Kind::kBool: return json(value.integer != 0);
      case Kind::kInt: return json(value.integer);
      case Kind::kFloat:
        if (std::isfinite(value.number)) return json(value.number);
        if (!tags_) return leave_out(what, "a number that JSON does not have");
        return tagged("float", std::isnan(value.number) ? "nan" : value.number > 0 ? "inf" : "-inf");
      case Kind::kString:
        if (!is_utf8(value.text)) return leave_out(what, "a text that is not UTF-8");
        return json(std::string(value.text));
      case Kind::kList: return convert_list(value, what, depth);
      case Kind::kTuple: return convert_tagged_list("tuple", value, what, depth);
      case Kind::kSet:
        return convert_tagged_list(value.text.empty() ? "set" : "frozenset", value, what, depth);
      case Kind::kDict:
        return tags_ ? convert_tagged_dict(value, what, depth) : convert_dict(value, what, depth);
      case Kind::kGlobal:
        if (tags_ && torch_dtype(value.text)) return tagged("dtype", std::string(value.text.substr(6)));
        if (value.text.starts_with("torch.")) return json(std::string(value.text));
        return leave_out(what, value.describe());
      default: return convert_tensor(value, what);
    }
  }

 private:
  std::nullopt_t leave_out(const std::string& what, const std::string& why) {
    not_read_.push_back(str(what, ": ", why));
    return std::nullopt;
  }

  static json tagged(const char* type, json value) {
    return {{kValueTag, type}, {"value", std::move(value)}};
  }
  std::optional<json> convert_tagged_list(const char* type, const PickleValue& value, const std::string& what,
                                          int depth) {
    std::optional<json> list = convert_list(value, what, depth + 1);
    if (!list || !tags_) return list;
    return tagged(type, std::move(*list));
  }

  /// A list is whole or not there: its elements are known by their places.
  std::optional<json> convert_list(const PickleValue& value, const std::string& what, int depth) {
    json list = json::array();
    for (size_t i = 0; i < value.items.size(); ++i) {
      std::optional<json> element = convert(*value.items[i], str(what, "[", i, "]"), depth + 1);
      if (!element) return std::nullopt;
      list.push_back(std::move(*element));
    }
    return list;
  }

  static bool is_name(const PickleValue& key) { return key.kind == Kind::kString && is_utf8(key.text); }

  std::optional<json> convert_dict(const PickleValue& value, const std::string& what, int depth) {
    json dict = json::object();
    for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
      const PickleValue& key = *value.items[i];
      if (!is_name(key)) {
        leave_out(what, str("the key ", key.describe()));
        continue;
      }
      const std::string name(key.text);
      if (std::optional<json> member = convert(*value.items[i + 1], child_path(what, name), depth + 1))
        dict[name] = std::move(*member);
    }
    return dict;
  }

  std::optional<json> convert_tagged_dict(const PickleValue& value, const std::string& what, int depth) {
    bool is_plain = value.text.empty();
    for (size_t i = 0; i < value.items.size(); i += 2)
      is_plain = is_plain && is_name(*value.items[i]) && value.items[i]->text != kValueTag;
    if (is_plain) return convert_dict(value, what, depth);
    json items = json::array();
    for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
      const PickleValue& key = *value.items[i];
      const std::string name = child_path(what, is_name(key) ? std::string(key.text) : key.describe());
      const std::optional<json> found = is_key(key, depth) ? convert(key, name, depth + 3) : std::nullopt;
      if (!found) {
        leave_out(what, str("the key ", key.describe()));
        continue;
      }
      if (std::optional<json> member = convert(*value.items[i + 1], name, depth + 3))
        items.push_back(json::array({*found, std::move(*member)}));
    }
    const std::string_view type = value.text.empty() ? "dict" : value.text.substr(value.text.rfind('.') + 1);
    return json{{kValueTag, std::string(type)}, {"items", std::move(items)}};
  }

  /// Whether Python has such a key of a dict, and this class makes the same of it. What is looked at counts.
  bool is_key(const PickleValue& key, int depth) {
    if (++num_values_ > kMaxValues) return false;
    switch (key.kind) {
      case Kind::kNone:
      case Kind::kBool:
      case Kind::kInt:
      case Kind::kFloat: return true;
      case Kind::kString: return is_utf8(key.text);
      case Kind::kTuple:
        return depth < kMaxJsonDepth &&
               std::all_of(
                   key.items.begin(), key.items.end(),
                   [&](const PickleValue* item) { return is_key(*item, depth + 1); });
      default: return false;
    }
  }

  /// With tags an array is one of numpy's again, else a list of lists. One without dimensions is its number.
  std::optional<json> convert_array(const NumpyArray& array, const std::string& what) {
    const std::vector<NumpyScalar> elements = elements_of(array);
    num_values_ += std::ssize(elements);
    if (std::ssize(elements) > kMostArrayElements || num_values_ > kMaxValues)
      return leave_out(what, str("numpy's array of ", array.dtype, " ", describe_shape(array.shape)));
    if (tags_ && !array.shape.empty())
      return json{{kValueTag, "array"},
                  {"dtype", array.dtype},
                  {"shape", array.shape},
                  {"value", base64(array.bytes)}};
    if (elements.empty()) return json::array();
    size_t next = 0;
    return convert_elements(array.shape, 0, elements, next, what);
  }
  std::optional<json> convert_elements(const std::vector<int64_t>& shape, size_t dimension,
                                       const std::vector<NumpyScalar>& elements, size_t& next,
                                       const std::string& what) {
    if (dimension == shape.size()) {
      const NumpyScalar& one = elements[next++];
      PickleValue value;
      value.kind = one.kind, value.integer = one.integer, value.number = one.number;
      return convert(value, what, static_cast<int>(dimension));
    }
    json list = json::array();
    for (int64_t i = 0; i < shape[dimension]; ++i) {
      std::optional<json> inner = convert_elements(shape, dimension + 1, elements, next, what);
      if (!inner) return std::nullopt;
      list.push_back(std::move(*inner));
    }
    return list;
  }

  std::optional<json> convert_tensor(const PickleValue& value, const std::string& what) {
    if (const std::optional<NumpyArray> array = numpy_array(value)) return convert_array(*array, what);
    if (file_ == nullptr) return leave_out(what, value.describe());
    if (const char* unread = TorchFile::unread_tensor(value)) return leave_out(what, unread);
    const std::optional<TorchTensor> tensor = file_->tensor(value);
    if (!tensor) return leave_out(what, value.describe());
    if (std::optional<json> number = number_of(*file_, *tensor)) return number;
    if (tensor->numel() == 1) return leave_out(what, "a number that JSON does not have");
    return leave_out(what, str("a tensor of ", name_of(tensor->type), " ", describe_shape(tensor->shape)));
  }

  const TorchFile* file_;
  std::vector<std::string>& not_read_;
  bool tags_;
  int64_t num_values_ = 0;
};

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

std::optional<json> to_json(const PickleValue& value, const TorchFile* file, const std::string& what,
                            std::vector<std::string>& not_read) {
  return Converter(file, not_read, /*tags=*/false).convert(value, what, 0);
}

std::optional<json> to_tagged_json(const PickleValue& value, const TorchFile* file, const std::string& what,
                                   std::vector<std::string>& not_read) {
  return Converter(file, not_read, /*tags=*/true).convert(value, what, 0);
}

std::optional<json> number_of(const TorchFile& file, const TorchTensor& tensor) {
  if (tensor.numel() != 1) return std::nullopt;
  const std::string element = file.read(tensor.offset, size_bytes(tensor.type));
  const char* const at = element.data();
  double number = 0;
  switch (tensor.type) {
    case DType::kFloat32: number = static_cast<double>(load<float>(at)); break;
    case DType::kFloat64: number = load<double>(at); break;
    case DType::kBFloat16: number = static_cast<double>(float_of_bf16(load<uint16_t>(at))); break;
    case DType::kFloat16: number = static_cast<double>(float_of_fp16(load<uint16_t>(at))); break;
    case DType::kInt64: return json(load<int64_t>(at));
    case DType::kInt32: return json(load<int32_t>(at));
    case DType::kInt16: return json(load<int16_t>(at));
    case DType::kInt8: return json(load<int8_t>(at));
    case DType::kUInt8: return json(load<uint8_t>(at));
    case DType::kBool: return json(load<uint8_t>(at) != 0);
    default: return std::nullopt;
  }
  if (!std::isfinite(number)) return std::nullopt;
  return json(number);
}

std::optional<int64_t> count_of(const json& value) {
  constexpr double kMost = 9007199254740992.0;  // 2^53: doubles have each integer up to here
  if (value.is_number_unsigned())
    return value.get<uint64_t>() <= static_cast<uint64_t>(kMost) ? std::optional(value.get<int64_t>())
                                                                 : std::nullopt;
  if (value.is_number_integer())
    return value.get<int64_t>() >= 0 ? std::optional(value.get<int64_t>()) : std::nullopt;
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (!(number >= 0 && number <= kMost) || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

std::optional<int64_t> count_in(const TorchFile& file, const PickleValue* value) {
  if (value == nullptr) return std::nullopt;
  std::vector<std::string> ignored;
  const std::optional<json> number = to_json(*value, &file, "a count", ignored);
  return number ? count_of(*number) : std::nullopt;
}

}  // namespace tessera::checkpoint
