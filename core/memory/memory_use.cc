#include "core/memory/memory_use.h"

#include <utility>

namespace tessera {
namespace {

// Allocators have no parameter for it, so it is thread-local.
thread_local std::optional<MemoryUse> current_use;

}  // namespace

std::string_view name_of(MemoryUse use) {
  switch (use) {
    case MemoryUse::kParameters: return "parameters";
    case MemoryUse::kGradients: return "gradients";
    case MemoryUse::kMaster: return "master weights";
    case MemoryUse::kOptimizer: return "optimizer state";
    case MemoryUse::kSnapshot: return "checkpoint snapshot";
    case MemoryUse::kCommunication: return "communication buffers";
    case MemoryUse::kDiskBuffers: return "buffers for the disk";
    case MemoryUse::kActivations: return "activations and temporaries";
    case MemoryUse::kOther: return "buffers and data";
  }
  return "";
}

std::string_view key_of(MemoryUse use) {
  switch (use) {
    case MemoryUse::kParameters: return "parameters";
    case MemoryUse::kGradients: return "gradients";
    case MemoryUse::kMaster: return "master";
    case MemoryUse::kOptimizer: return "optimizer";
    case MemoryUse::kSnapshot: return "snapshot";
    case MemoryUse::kCommunication: return "communication";
    case MemoryUse::kDiskBuffers: return "disk_buffers";
    case MemoryUse::kActivations: return "activations";
    case MemoryUse::kOther: return "other";
  }
  return "";
}

MemoryFor::MemoryFor(MemoryUse use) : outer_(std::exchange(current_use, use)) {}
MemoryFor::~MemoryFor() { current_use = outer_; }
std::optional<MemoryUse> MemoryFor::current() { return current_use; }

}  // namespace tessera
