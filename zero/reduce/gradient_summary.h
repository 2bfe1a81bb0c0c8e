// GradientSummary: what all ranks know of the accumulated gradients before an update, from one small
// all-gather.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "zero/plan/layout.h"
#include "zero/reduce/gradient_reducer.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// What all ranks know of the accumulated gradients before an update.
struct GradientSummary {
  /// Is the L2 norm, over all parameters and ranks, of the gradients as accumulated (loss scale included).
  double norm = 0;
  int64_t num_nonfinite = 0;
  std::string first_nonfinite;  ///< name of the first parameter with such an element
  std::vector<bool> used;       ///< by parameter: some rank had a gradient
  /// These units had gradients that came late on some rank: see GradientReducer::late_units.
  std::vector<int> late_units;
  bool flag_raised = false;  ///< some rank raised its flag
  bool is_same_step = true;  ///< all ranks gave the same digest
};

/// What a rank tells the others beside its gradients.
struct RankFlags {
  bool raise_flag = false;  ///< GradientSummary::flag_raised
  double digest = 0;        ///< of what has to be the same on all ranks; GradientSummary::is_same_step
};

/// Collective.
GradientSummary summarize(const Layout& layout, std::vector<ParamUnit>& units,
                          const GradientReducer& gradients, comm::Communicator& comm, const RankFlags& mine);

/// Collective. (ranks, n) fp64 on the host: what the ranks gave, in the order of the parts that they own
/// (mesh.h), in which it is added up. `mine`: flat tensors of fp64, n elements together, in the host's memory
/// (from to_be_copied()) or a device's. `device`: where the transport's tensors are. Waits for the device
/// once, whatever is in flight.
at::Tensor all_gather_owned(comm::Communicator& comm, at::Device device, const std::vector<at::Tensor>& mine,
                            const Mesh& mesh, std::string_view label);
/// (n) fp64 zeros of the host's memory, from which `device` copies without a wait.
at::Tensor to_be_copied(int64_t numel, at::Device device);

}  // namespace tessera::zero
