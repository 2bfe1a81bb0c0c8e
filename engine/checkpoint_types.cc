#include "engine/checkpoint_types.h"

#include "checkpoint/checkpoint_error.h"
#include "core/str.h"

namespace tessera {

DType dtype_of(const at::Tensor& tensor, const std::string& name) {
  if (const auto dtype = find_dtype(tensor.scalar_type())) return *dtype;
  throw CheckpointError(str("buffer ", name, " has the type ", at::toString(tensor.scalar_type()),
                            ", which a checkpoint cannot hold"));
}

}  // namespace tessera
