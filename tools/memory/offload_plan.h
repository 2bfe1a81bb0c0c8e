// What a GPU's rank keeps in the host's memory, and what it moves and updates in a step, by arithmetic.
#pragma once

#include <cstdint>

#include "tools/memory/counted_model.h"

namespace tessera::tools {

/// What a host does in a second. Measured elsewhere, on a host of one H100 with 16 cores: see
/// docs/offload.md.
struct HostSpeed {
  double link_bytes = 55e9;           ///< each way, page-locked memory
  double updated_parameters = 4.5e9;  ///< by AdamW
};

/// Bytes that one rank moves, and seconds that each takes by itself.
struct OffloadPlan {
  zero::StateBytes device, host, disk;  ///< between steps
  int64_t gradients_down = 0;           ///< in the last micro-step
  int64_t gradients_each_way = 0;       ///< in each micro-step before it
  int64_t values_up = 0;                ///< new values, once a step
  int64_t shards_up = 0;                ///< for the gathers of a micro-step: in forward, and in backward
  double update_s = 0;
};

/// `tiers`: of which the optimizer's is below the device.
OffloadPlan plan_of(const CountedModel& model, int stage, int64_t world, zero::Tiers tiers,
                    const HostSpeed& speed = {});

/// Prints the settings side by side.
void print_offload_plan(const CountedModel& model, int64_t world);

}  // namespace tessera::tools
