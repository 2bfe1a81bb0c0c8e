// The formulas of zero/plan/memory_model.h as a table of coefficients, for a page that computes what a
// setting that was not measured needs. Each coefficient is what zero::state_bytes says of one element, so
// there is one source: a byte count is linear in the elements that a rank holds whole and in those of its
// shard.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "zero/plan/memory_model.h"

namespace tessera::train {

inline constexpr zero::Tiers kOptimizerOnDisk{.optimizer = zero::Tier::kDisk};
inline constexpr zero::Tiers kAllOnDisk{.parameters = zero::Tier::kDisk, .optimizer = zero::Tier::kDisk};
inline constexpr zero::Tiers kOptimizerOnHost{.optimizer = zero::Tier::kHost,
                                              .device_memory_is_separate = true};
inline constexpr zero::Tiers kAllOnHost{
    .parameters = zero::Tier::kHost, .optimizer = zero::Tier::kHost, .device_memory_is_separate = true};
inline constexpr zero::Tiers kDiskBehindHost{
    .parameters = zero::Tier::kDisk, .optimizer = zero::Tier::kDisk, .device_memory_is_separate = true};

struct TierSetting {
  const char* key;
  const char* name;
  zero::Tiers tiers;
};
/// Those that `tessera memory --estimate` prints.
inline constexpr std::array<TierSetting, 6> kTierSettings = {{
    {"memory", "all in memory", {}},
    {"optimizer_disk", "CPU ranks, optimizer on disk", kOptimizerOnDisk},
    {"all_disk", "CPU ranks, parameters on disk too", kAllOnDisk},
    {"gpu_optimizer_host", "GPUs, optimizer in the host's memory", kOptimizerOnHost},
    {"gpu_all_host", "GPUs, parameters in the host's memory too", kAllOnHost},
    {"gpu_all_disk", "GPUs, both on disk", kDiskBehindHost},
}};

/// What the formulas need of a model and its configuration.
struct ModelCount {
  struct OfType {
    DType dtype = DType::kFloat32;
    int64_t num_trainable = 0, num_frozen = 0;
  };
  int64_t num_trainable = 0, num_frozen = 0;  ///< parameters
  int num_states = 0;                         ///< fp32 moments of the optimizer
  int64_t owned_state_bytes = 0;              ///< of an optimizer of whole parameters, which ranks share
  int64_t largest_owned_bytes = 0;            ///< of that, of one parameter, which one rank has; 0: not known
  DType dtype = DType::kFloat32;              ///< of the parameters
  DType accumulate = DType::kFloat32;         ///< of the gradients
  bool async_checkpoints = false;             ///< of CPU ranks: on CUDA the copy is in the host's memory
  /// The parameters by type, where the configuration converts none and some have another than `dtype`.
  std::vector<OfType> by_type = {};

  /// Bytes of one rank of `world` on `tier`, without padding. `num_states` and `async_checkpoints` of
  /// `state` are this model's.
  zero::StateBytes bytes_of(zero::StateModel state, int64_t world, zero::Tier tier) const;
  /// Whether the engine takes the setting: can_offload(), and no optimizer of whole parameters on the host.
  bool can_offload(zero::Sharding sharding, int64_t world, zero::Tiers tiers) const;
};

/// {"num_trainable", "num_frozen", "owned", "largest_owned", "snapshot", "precision", "gradients",
///  "by_type": [{"precision", "num_trainable", "num_frozen"}, …], "tiers": [{"key", "name"}, …],
///  "rows": [{"stage", "tiers", "precision", "gradients", "ranks", "bytes"}, …]}
/// "owned": bytes of ModelCount::owned_state_bytes, on the device, of which a rank has its part, and at least
/// "largest_owned". "snapshot": whether there is one. "by_type": of "precision", if not empty.
/// "ranks": "any", "one" (of one rank alone) or "none": where the stage has what the tiers are for. "bytes"
/// has, for each of "device", "host" and "disk" where something lies there, and for each of "parameters",
/// "gradients", "master", "optimizer" and "snapshot" that is there, four numbers: bytes of each trainable
/// parameter that is whole, of each in a rank's shard, and the same of frozen ones. A shard of n parameters
/// on w ranks has ceil(n / w).
nlohmann::ordered_json state_formulas(const ModelCount& model);

}  // namespace tessera::train
