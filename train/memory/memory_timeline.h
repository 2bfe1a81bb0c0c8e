// The record of one step's memory as data: categories over time, the peak and what is alive there, and a
// trace for programs of others. The page of `tessera memory` and engine.memory_timeline() of Python show it.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/profile/memory_meter.h"

namespace tessera::train {

/// What a person tells apart: MemoryUse, of which two are divided by what a record knows of their blocks.
/// Gathered units are communication buffers that were allocated for a unit. Workspace are activations and
/// temporaries that were freed before the operator that allocated them returned.
struct MemoryCategory {
  const char* key;
  const char* name;
};
inline constexpr size_t kNumMemoryCategories = 11;
const std::array<MemoryCategory, kNumMemoryCategories>& memory_categories();
size_t category_of(const MemoryBlock& block);

/// "forward", "backward", "step", and when each begins, in seconds.
using Phases = std::vector<std::pair<std::string, double>>;

/// Everything, of which times are nanoseconds from the beginning:
///   {"unit": "bytes", "nanoseconds", "phases": [[name, at], …], "categories": [{"key", "name"}, …], "names",
///    "blocks": [[begin, end, bytes, category, unit, module, operator], …], "peak": {…}}
/// A block's begin is 0 where it was there before, and its end null where it was there afterwards; its unit,
/// module and operator are places in "names", or -1. "peak" has "nanoseconds", "total", "by_category" and
/// "alive", the places of the blocks that were there.
nlohmann::ordered_json timeline_json(const MemoryRecord& record, const Phases& phases);

/// The peak of a timeline_json(), by use.
MemoryBytes peak_by_use(const nlohmann::ordered_json& timeline);

/// What a page needs of timeline_json(): at most kMaxColumns columns, each the largest total of its interval,
/// the largest blocks, and tables of what is alive at the peak.
nlohmann::ordered_json timeline_for_page(const nlohmann::ordered_json& timeline);
inline constexpr int64_t kMaxColumns = 400;
inline constexpr size_t kMaxBlocks = 900;

/// Chrome's trace format, which Perfetto reads too: for each named timeline a process with a counter of all
/// categories, the phases, and the blocks of at least a thousandth of the peak.
std::string memory_trace(const std::vector<std::pair<std::string, nlohmann::ordered_json>>& timelines);

}  // namespace tessera::train
