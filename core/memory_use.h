// What memory is for: a word that whoever allocates says for the time of a scope, and that a memory meter
// (engine/memory_meter.h) files the allocation under.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class MemoryUse : uint8_t {
  kParameters,
  kGradients,  ///< accumulated ones; what autograd makes on the way there is kActivations
  kMaster,     ///< fp32 weights beside bf16 or fp16 parameters
  kOptimizer,
  kSnapshot,       ///< the copy that asynchronous checkpoints are written from
  kCommunication,  ///< buffers of gradients on their way and of gathered units
  kActivations,    ///< activations and temporary tensors: whatever else a step allocates
  kOther,          ///< what was there before the first step: buffers of the model, data
};
inline constexpr size_t kNumMemoryUses = 8;

/// Local. "optimizer state", "activations and temporaries" …
std::string_view name_of(MemoryUse use);
/// Local. The same as a key: "optimizer", "activations" …
std::string_view key_of(MemoryUse use);

/// Bytes by use.
struct MemoryBytes {
  std::array<int64_t, kNumMemoryUses> by_use{};

  int64_t& operator[](MemoryUse use) { return by_use[static_cast<size_t>(use)]; }
  int64_t operator[](MemoryUse use) const { return by_use[static_cast<size_t>(use)]; }
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t bytes : by_use) sum += bytes;
    return sum;
  }
  bool operator==(const MemoryBytes&) const = default;
};

/// What this thread allocates in this object's lifetime is for `use`. The innermost counts.
class MemoryFor {
 public:
  explicit MemoryFor(MemoryUse use);
  ~MemoryFor();
  MemoryFor(const MemoryFor&) = delete;
  MemoryFor& operator=(const MemoryFor&) = delete;

  /// Local. What this thread's innermost scope says.
  static std::optional<MemoryUse> current();

 private:
  std::optional<MemoryUse> outer_;
};

}  // namespace tessera
