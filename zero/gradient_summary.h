// GradientSummary: what all ranks know of the accumulated gradients before an update, from one small
// all-gather.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "zero/gradient_reducer.h"
#include "zero/layout.h"
#include "zero/param_unit.h"

namespace tessera::zero {

/// What all ranks know of the accumulated gradients before an update.
struct GradientSummary {
  double norm =
      0;  ///< L2, over all parameters and ranks, of the gradients as accumulated (loss scale included)
  int64_t num_nonfinite = 0;
  std::string first_nonfinite;  ///< name of the first parameter with such an element
  std::vector<bool> used;       ///< by parameter: some rank had a gradient
  std::vector<int>
      late_units;            ///< had gradients that came late on some rank: see GradientReducer::late_units
  bool flag_raised = false;  ///< some rank raised its flag
};

/// Collective. `raise_flag`: see GradientSummary::flag_raised.
GradientSummary summarize(const Layout& layout, std::vector<ParamUnit>& units,
                          const GradientReducer& gradients, comm::Communicator& comm, bool raise_flag);

/// Collective. Every rank's `mine`, of the same length, in rank order. `device`: where the transport's
/// tensors are.
std::vector<std::vector<double>> all_gather_doubles(comm::Communicator& comm, at::Device device,
                                                    const std::vector<double>& mine, std::string_view label);
/// Local. What the ranks gave, in the order of their pieces (mesh.h), in which it is added up.
std::vector<std::vector<double>> in_order_of_pieces(std::vector<std::vector<double>> by_rank,
                                                    const Mesh& mesh);

}  // namespace tessera::zero
