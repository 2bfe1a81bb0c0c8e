#include "core/memory/memory_use.h"

#include <array>
#include <utility>

namespace tessera {
namespace {

// Allocators have no parameter for it, so it is thread-local.
thread_local std::optional<MemoryUse> current_use;

/// By MemoryUse: its name and its key.
constexpr std::array<std::pair<std::string_view, std::string_view>, kNumMemoryUses> kWords = {{
    {"parameters", "parameters"},
    {"gradients", "gradients"},
    {"master weights", "master"},
    {"optimizer state", "optimizer"},
    {"checkpoint snapshot", "snapshot"},
    {"communication buffers", "communication"},
    {"buffers for the disk", "disk_buffers"},
    {"activations and temporaries", "activations"},
    {"buffers and data", "other"},
}};

}  // namespace

std::string_view name_of(MemoryUse use) { return kWords[static_cast<size_t>(use)].first; }

std::string_view key_of(MemoryUse use) { return kWords[static_cast<size_t>(use)].second; }

MemoryFor::MemoryFor(MemoryUse use) : outer_(std::exchange(current_use, use)) {}
MemoryFor::~MemoryFor() { current_use = outer_; }
std::optional<MemoryUse> MemoryFor::current() { return current_use; }

}  // namespace tessera
