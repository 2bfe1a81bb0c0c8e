// MemoryUse: the purpose of an allocation. Code that allocates sets it for a scope, and a memory meter
// (engine/profile/memory_meter.h) counts the allocation under it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class MemoryUse : uint8_t {
  kParameters,
  kGradients,  ///< accumulated ones; temporary ones of autograd are kActivations
  kMaster,     ///< fp32 weights beside bf16 or fp16 parameters
  kOptimizer,
  kSnapshot,       ///< the copy that asynchronous checkpoints are written from
  kCommunication,  ///< buffers of gradients being reduced and of gathered units
  kDiskBuffers,    ///< what state on disk is read into and written from (zero/offload/offloaded_tensor.h)
  kActivations,    ///< activations, temporary tensors, and all else that a step allocates
  kOther,          ///< allocated before the first step: buffers of the model, data
};
inline constexpr size_t kNumMemoryUses = 9;

/// "optimizer state", "activations and temporaries" …
std::string_view name_of(MemoryUse use);
/// The same as a key: "optimizer", "activations" …
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

/// Says what this thread's allocations are for during its lifetime. The innermost scope counts.
class MemoryFor {
 public:
  explicit MemoryFor(MemoryUse use);
  ~MemoryFor();
  MemoryFor(const MemoryFor&) = delete;
  MemoryFor& operator=(const MemoryFor&) = delete;

  /// The use of this thread's innermost scope.
  static std::optional<MemoryUse> current();

 private:
  std::optional<MemoryUse> outer_;
};

}  // namespace tessera
