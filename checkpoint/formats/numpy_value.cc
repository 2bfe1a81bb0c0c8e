#include "checkpoint/formats/numpy_value.h"

#include <bit>

#include "checkpoint/formats/pickle_text.h"
#include "core/float_bits.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using Kind = PickleValue::Kind;
using std::string_view;

constexpr size_t kMostDimensions = 64;  // numpy's limit

struct NumpyType {
  char kind = 0;  // numpy's dtype.kind
  size_t width = 0;
  bool is_big_endian = false;

  std::string name() const { return str(width == 1 ? '|' : is_big_endian ? '>' : '<', kind, width); }
};

bool has_text(const PickleValue& value) { return value.kind == Kind::kString || value.kind == Kind::kBytes; }

/// dtype("f8", False, True) with the state (VERSION, "<", …), in which "|" and "=" are this machine's order.
std::optional<NumpyType> type_of(const PickleValue& dtype) {
  if (dtype.kind != Kind::kObject || dtype.global() != "numpy.dtype" || dtype.arguments == nullptr ||
      dtype.arguments->items.empty() || !has_text(*dtype.arguments->items[0]))
    return std::nullopt;
  string_view name = dtype.arguments->items[0]->text;
  NumpyType type;
  if (!name.empty() && string_view("<>|=").find(name[0]) != name.npos) {
    type.is_big_endian = name[0] == '>';
    name.remove_prefix(1);
  }
  if (const PickleValue* state = dtype.state;
      state != nullptr && state->items.size() > 1 && has_text(*state->items[1]))
    type.is_big_endian = state->items[1]->text == ">";
  if (name.size() < 2 || name.size() > 8) return std::nullopt;
  type.kind = name[0];
  for (const char digit : name.substr(1)) {
    if (digit < '0' || digit > '9') return std::nullopt;
    type.width = type.width * 10 + static_cast<size_t>(digit - '0');
  }
  const bool is_power = type.width == 1 || type.width == 2 || type.width == 4 || type.width == 8;
  switch (type.kind) {
    case 'b': return type.width == 1 ? std::optional(type) : std::nullopt;
    case 'i':
    case 'u': return is_power ? std::optional(type) : std::nullopt;
    case 'f': return is_power && type.width > 1 ? std::optional(type) : std::nullopt;
    case 'U': type.width *= 4; return type;
    default: return std::nullopt;
  }
}

uint64_t read_bits(string_view bytes, bool is_big_endian) {
  uint64_t bits = 0;
  for (size_t i = 0; i < bytes.size(); ++i)
    bits = bits << 8 | static_cast<uint8_t>(bytes[is_big_endian ? i : bytes.size() - 1 - i]);
  return bits;
}

std::optional<NumpyScalar> element(const NumpyType& type, string_view bytes) {
  if (bytes.size() != type.width) return std::nullopt;
  NumpyScalar out;
  if (type.kind == 'U') {  // UTF-32
    out.kind = Kind::kString;
    for (size_t i = 0; i < bytes.size(); i += 4)
      append_utf8(out.text, static_cast<uint32_t>(read_bits(bytes.substr(i, 4), type.is_big_endian)));
    return is_utf8(out.text) ? std::optional(std::move(out)) : std::nullopt;
  }
  const uint64_t bits = read_bits(bytes, type.is_big_endian);
  const int unused = 64 - 8 * static_cast<int>(type.width);
  switch (type.kind) {
    case 'b':
      out.kind = Kind::kBool;
      out.integer = bits != 0 ? 1 : 0;
      break;
    case 'i':
      out.kind = Kind::kInt;
      out.integer = static_cast<int64_t>(bits << unused) >> unused;
      break;
    case 'u':
      out.kind = bits <= static_cast<uint64_t>(INT64_MAX) ? Kind::kInt : Kind::kLong;
      if (out.kind == Kind::kInt)
        out.integer = static_cast<int64_t>(bits);
      else
        out.text = std::to_string(bits);
      break;
    default:
      out.kind = Kind::kFloat;
      out.number = type.width == 8   ? std::bit_cast<double>(bits)
                   : type.width == 4 ? static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits)))
                                     : static_cast<double>(float_of_fp16(static_cast<uint16_t>(bits)));
  }
  return out;
}

/// The bytes of an array whose first dimension runs fastest, row-major.
std::string from_fortran(string_view bytes, const std::vector<int64_t>& shape, size_t width) {
  std::string out;
  out.reserve(bytes.size());
  std::vector<int64_t> index(shape.size(), 0);
  for (size_t done = 0; done < bytes.size(); done += width) {
    size_t place = 0;
    for (size_t d = shape.size(); d-- > 0;)
      place = place * static_cast<size_t>(shape[d]) + static_cast<size_t>(index[d]);
    out += bytes.substr(place * width, width);
    for (size_t d = shape.size(); d-- > 0 && ++index[d] == shape[d];) index[d] = 0;
  }
  return out;
}

}  // namespace

std::optional<NumpyScalar> numpy_scalar(const PickleValue& dtype, string_view bytes) {
  const std::optional<NumpyType> type = type_of(dtype);
  return type ? element(*type, bytes) : std::nullopt;
}

// _reconstruct(ndarray, (0,), b"b") with the state (VERSION, SHAPE, DTYPE, IS_FORTRAN, BYTES), and of
// protocol 5 _frombuffer(BYTES, DTYPE, SHAPE, "C" or "F").
std::optional<NumpyArray> numpy_array(const PickleValue& value) {
  const string_view name = value.kind == Kind::kObject ? value.global() : string_view();
  if (!name.starts_with("numpy.") || value.arguments == nullptr) return std::nullopt;
  const PickleValue *shape = nullptr, *dtype = nullptr, *bytes = nullptr;
  bool is_fortran = false;
  if (name.ends_with(".multiarray._reconstruct") && value.state != nullptr &&
      value.state->items.size() == 5) {
    const auto& state = value.state->items;
    shape = state[1], dtype = state[2], bytes = state[4];
    is_fortran = state[3]->integer != 0;
  } else if (name.ends_with(".numeric._frombuffer") && value.arguments->items.size() == 4) {
    const auto& given = value.arguments->items;
    bytes = given[0], dtype = given[1], shape = given[2];
    is_fortran = given[3]->text == "F";
  } else {
    return std::nullopt;
  }
  const std::optional<NumpyType> type = type_of(*dtype);
  if (!type || type->kind == 'U' || bytes->kind != Kind::kBytes || shape->kind != Kind::kTuple ||
      shape->items.size() > kMostDimensions)
    return std::nullopt;
  NumpyArray out{.dtype = type->name(), .shape = {}, .bytes = {}};
  size_t wanted = type->width;
  for (const PickleValue* size : shape->items) {
    if (size->kind != Kind::kInt || size->integer < 0 ||
        __builtin_mul_overflow(wanted, static_cast<size_t>(size->integer), &wanted))
      return std::nullopt;
    out.shape.push_back(size->integer);
  }
  if (wanted != bytes->text.size()) return std::nullopt;
  out.bytes = is_fortran ? from_fortran(bytes->text, out.shape, type->width) : std::string(bytes->text);
  return out;
}

std::vector<NumpyScalar> elements_of(const NumpyArray& array) {
  const NumpyType type{.kind = array.dtype[1],
                       .width = static_cast<size_t>(array.dtype[2] - '0'),
                       .is_big_endian = array.dtype[0] == '>'};
  std::vector<NumpyScalar> out;
  for (size_t at = 0; at + type.width <= array.bytes.size(); at += type.width)
    out.push_back(*element(type, string_view(array.bytes).substr(at, type.width)));
  return out;
}

}  // namespace tessera::checkpoint
