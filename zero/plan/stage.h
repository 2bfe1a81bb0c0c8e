// A ZeRO stage is a value: which of a unit's buffers this rank holds in full and which as a shard. This is
// the only file that compares stage numbers; everything else asks the value.
//
// Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models" (2020), section 5.
#pragma once

namespace tessera::zero {

struct Sharding {
  bool parameters = false;
  bool gradients = false;
  bool optimizer = false;
  /// A rank updates its shard of a unit alone: a trainable unit, or (when weights are loaded) a frozen one.
  constexpr bool updates_shard(bool trainable) const { return trainable ? optimizer : parameters; }
  bool operator==(const Sharding&) const = default;
};

inline constexpr int kMaxStage = 3;

/// Stage in 0 … kMaxStage.
constexpr Sharding sharding_of(int stage) {
  return {.parameters = stage >= 3, .gradients = stage >= 2, .optimizer = stage >= 1};
}

}  // namespace tessera::zero
