#include "checkpoint/formats/pickle_writer.h"

#include "core/numel.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace tessera::checkpoint {
namespace {

/// Null: torch has no class for the type, and writes bytes and the type's name.
const char* storage_class(DType type) {
  switch (type) {
    case DType::kFloat64: return "DoubleStorage";
    case DType::kFloat32: return "FloatStorage";
    case DType::kBFloat16: return "BFloat16Storage";
    case DType::kFloat16: return "HalfStorage";
    case DType::kInt64: return "LongStorage";
    case DType::kInt32: return "IntStorage";
    case DType::kInt16: return "ShortStorage";
    case DType::kInt8: return "CharStorage";
    case DType::kUInt8: return "ByteStorage";
    case DType::kBool: return "BoolStorage";
    case DType::kComplex64: return "ComplexFloatStorage";
    case DType::kComplex128: return "ComplexDoubleStorage";
    default: return nullptr;
  }
}

// Returns the strides as torch counts them: a size of zero counts as one.
std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride))
      stride = 1;  // only where a size is zero
  }
  return strides;
}

}  // namespace

// Opcodes of Python's pickle.py.

PickleWriter& PickleWriter::little_endian(uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
  return *this;
}

PickleWriter& PickleWriter::integer(int64_t value) {
  const auto bits = static_cast<uint64_t>(value);
  if (value >= 0 && value <= 0xff) return op("K").little_endian(bits, 1);    // BININT1
  if (value >= 0 && value <= 0xffff) return op("M").little_endian(bits, 2);  // BININT2
  if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max())
    return op("J").little_endian(bits, 4);       // BININT
  return op("\x8a\x08").little_endian(bits, 8);  // LONG1
}

PickleWriter& PickleWriter::number(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  op("G");  // BINFLOAT, big-endian
  for (int i = 7; i >= 0; --i) bytes_ += static_cast<char>(bits >> (8 * i) & 0xff);
  return *this;
}

PickleWriter& PickleWriter::text(std::string_view value) {
  return op("X").little_endian(value.size(), 4).op(value);  // BINUNICODE
}

PickleWriter& PickleWriter::global(std::string_view module, std::string_view name) {
  return op("c").op(module).op("\n").op(name).op("\n");
}

PickleWriter& PickleWriter::dtype(DType type) {
  switch (type) {
    case DType::kFloat64: return global("torch", "float64");
    case DType::kFloat32: return global("torch", "float32");
    case DType::kBFloat16: return global("torch", "bfloat16");
    case DType::kFloat16: return global("torch", "float16");
    default: return global("torch", name_of(type));
  }
}

PickleWriter& PickleWriter::tuple(std::span<const int64_t> values) {
  if (values.empty()) return op(")");  // EMPTY_TUPLE
  begin_tuple();
  for (const int64_t value : values) integer(value);
  return end_tuple();
}

PickleWriter& PickleWriter::size(std::span<const int64_t> values) {
  return global("torch", "Size").begin_tuple().tuple(values).end_tuple().call();
}

// torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks), or
// torch._utils._rebuild_tensor_v3(…, dtype) of a storage of bytes.
PickleWriter& PickleWriter::tensor(DType type, const std::vector<int64_t>& shape, size_t storage) {
  const char* const typed = storage_class(type);
  const int64_t numel = numel_of(shape);
  global("torch._utils", typed != nullptr ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").begin_tuple();
  begin_tuple().text("storage");
  typed != nullptr ? global("torch", typed) : global("torch.storage", "UntypedStorage");
  text(std::to_string(storage)).text("cpu");
  integer(typed != nullptr ? numel : numel * size_bytes(type));
  end_tuple().op("Q");  // BINPERSID
  integer(0).tuple(shape).tuple(strides_of(shape));
  boolean(false).ordered_dict();
  if (typed == nullptr) dtype(type);
  return end_tuple().call();
}

}  // namespace tessera::checkpoint
