#include "engine/checkpoint_types.h"

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera {

using checkpoint::ElementType;

at::ScalarType to_torch(ElementType type) {
  switch (type) {
    case ElementType::kFloat64: return at::kDouble;
    case ElementType::kFloat32: return at::kFloat;
    case ElementType::kBFloat16: return at::kBFloat16;
    case ElementType::kFloat16: return at::kHalf;
    case ElementType::kInt64: return at::kLong;
    case ElementType::kInt32: return at::kInt;
    case ElementType::kInt16: return at::kShort;
    case ElementType::kInt8: return at::kChar;
    case ElementType::kUInt8: return at::kByte;
    case ElementType::kBool: return at::kBool;
  }
  return at::kByte;
}

ElementType element_type_of(const at::Tensor& tensor, const std::string& name) {
  for (ElementType type : checkpoint::kElementTypes)
    if (to_torch(type) == tensor.scalar_type()) return type;
  throw CheckpointError(str("buffer ", name, " has the type ", at::toString(tensor.scalar_type()),
                            ", which a checkpoint cannot hold"));
}

}  // namespace tessera
