// Hyper-parameters and a step count become a rule's fp32 scalars.
#pragma once

#include <cstdint>

#include "zero/kernels/hyper.h"
#include "zero/kernels/update_rules.h"

namespace tessera::kernels {

/// `step` counts from 1; every kind but LAMB and Muon.
Rule make_rule(OptimizerKind kind, const Hyper& hyper, int64_t step);
LambRule make_lamb_rule(const Hyper& hyper, int64_t step);

}  // namespace tessera::kernels
