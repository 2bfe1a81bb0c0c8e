// DType <-> libtorch's ScalarType, under zero's name.
#pragma once

#include "comm/torch_dtype.h"

namespace tessera::zero {

using tessera::from_torch;
using tessera::to_torch;

}  // namespace tessera::zero
