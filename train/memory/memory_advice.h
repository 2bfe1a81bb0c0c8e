// What would make room where memory has run out: computed from the model's layout and the arithmetic of
// model state (zero/plan/memory_model.h). No collectives.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "zero/plan/layout.h"
#include "zero/plan/memory_model.h"

namespace tessera::train {

/// "134.2 MB", of 10^6 bytes.
std::string megabytes(int64_t bytes);

/// An allocation that failed, beside what one rank held. Bytes.
struct Shortage {
  int64_t wanted = 0;
  int64_t available = 0;               ///< of what was wanted
  std::optional<int64_t> activations;  ///< in use then; unset: not known
  bool for_activations = false;        ///< what was wanted would have been activations too
  /// The key by which activations become smaller, in proportion, and its value; empty: they cannot.
  std::string batch_key = {};
  int64_t batch = 0;
  bool trains = false;  ///< activations are kept for backward

  /// What has to be given up. Where enough was free, it was not in one piece.
  int64_t missing() const { return available < wanted ? wanted - available : wanted; }
};

/// What of the model's state this rank has on its device with these settings on `world` ranks, with
/// the buffers that units are gathered into and that gradients are reduced from, where there are such.
int64_t held_bytes(const zero::Layout& layout, const zero::StateModel& model, const EngineConfig& config,
                   int64_t world);

/// What would make room, one change each, the simplest first: "zero_optimization.stage 3 (model state
/// of a rank 220.6 MB, now 606.8 MB)". Only what frees Shortage::missing(); empty: nothing alone does.
/// `model`: of the run as it is.
std::vector<std::string> memory_advice(const Shortage& shortage, const EngineConfig& config,
                                       const zero::Layout& layout, const zero::StateModel& model);

}  // namespace tessera::train
