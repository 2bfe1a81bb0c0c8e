#include "checkpoint/formats/torch_pickle.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

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

// Opcodes of Python's pickle.py. Nothing is memoized: a reader needs no memo,
// and a state_dict's pickle is small.
class Pickle {
 public:
  Pickle& op(std::string_view opcode) {
    bytes_ += opcode;
    return *this;
  }
  Pickle& proto() { return op("\x80\x02"); }
  Pickle& global(std::string_view module, std::string_view name) {
    return op("c").op(module).op("\n").op(name).op("\n");
  }
  Pickle& text(std::string_view value) {
    return op("X").little_endian(value.size(), 4).op(value);
  }  // BINUNICODE
  Pickle& number(int64_t value) {
    if (value <= 0xff) return op("K").little_endian(static_cast<uint64_t>(value), 1);    // BININT1
    if (value <= 0xffff) return op("M").little_endian(static_cast<uint64_t>(value), 2);  // BININT2
    if (value <= std::numeric_limits<int32_t>::max())
      return op("J").little_endian(static_cast<uint64_t>(value), 4);       // BININT
    return op("\x8a\x08").little_endian(static_cast<uint64_t>(value), 8);  // LONG1
  }
  Pickle& tuple(const std::vector<int64_t>& values) {
    if (values.empty()) return op(")");  // EMPTY_TUPLE
    op("(");                             // MARK
    for (const int64_t value : values) number(value);
    return op("t");  // TUPLE
  }
  Pickle& ordered_dict() { return global("collections", "OrderedDict").op(")R"); }  // EMPTY_TUPLE REDUCE

  std::string take() { return std::move(bytes_); }

 private:
  Pickle& little_endian(uint64_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
    return *this;
  }
  std::string bytes_;
};

// As torch counts them: a size of zero counts as one.
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

// torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks), or
// torch._utils._rebuild_tensor_v3(…, dtype) of a storage of bytes.
void rebuild_tensor(Pickle& pickle, const ModelTensor& tensor, size_t index) {
  const char* const storage = storage_class(tensor.type);
  pickle.global("torch._utils", storage != nullptr ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").op("(");
  pickle.op("(").text("storage");
  storage != nullptr ? pickle.global("torch", storage) : pickle.global("torch.storage", "UntypedStorage");
  pickle.text(std::to_string(index)).text("cpu");
  pickle.number(storage != nullptr ? tensor.bytes() / size_bytes(tensor.type) : tensor.bytes());
  pickle.op("tQ");  // TUPLE BINPERSID
  pickle.number(0).tuple(tensor.shape).tuple(strides_of(tensor.shape));
  pickle.op("\x89").ordered_dict();  // NEWFALSE
  if (storage == nullptr) pickle.global("torch", name_of(tensor.type));
  pickle.op("tR");  // TUPLE REDUCE
}

}  // namespace

std::string state_dict_pickle(const std::vector<ModelTensor>& tensors) {
  Pickle pickle;
  pickle.proto().ordered_dict().op("(");
  for (size_t i = 0; i < tensors.size(); ++i) {
    pickle.text(tensors[i].name);
    rebuild_tensor(pickle, tensors[i], i);
    for (const std::string& alias : tensors[i].aliases) {
      pickle.text(alias);
      rebuild_tensor(pickle, tensors[i], i);
    }
  }
  pickle.op("u.");  // SETITEMS STOP
  return pickle.take();
}

}  // namespace tessera::checkpoint
