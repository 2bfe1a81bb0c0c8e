#include "engine/checkpoint/checkpoint_types.h"

#include "checkpoint/checkpoint_error.h"
#include "core/str.h"
#include "zero/model/module_state.h"

namespace tessera {

DType dtype_of(const at::Tensor& tensor, const std::string& name) {
  const std::string why = zero::no_bytes(tensor);
  if (const auto dtype = find_dtype(tensor.scalar_type()); dtype && why.empty()) return *dtype;
  throw CheckpointError(
      "buffer ", name, " ", why.empty() ? str("has the type ", at::toString(tensor.scalar_type())) : why,
      ", which files do not hold: keep its values in a dense tensor of plain numbers, or out of the "
      "checkpoint, as a buffer that is not persistent");
}

}  // namespace tessera
