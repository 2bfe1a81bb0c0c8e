#include "checkpoint/manifest/saved_layout.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "core/numel.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

std::string unit_name(int unit) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "unit_%05d", unit);
  return digits;
}

}  // namespace

int64_t SavedParameter::numel() const { return numel_of(shape); }

SavedPlace SavedLayout::place(int parameter, int64_t first) const {
  const SavedParameter& one = parameters[static_cast<size_t>(parameter)];
  const int64_t shard = shard_numel(one.unit), element = one.offset + first;
  const auto rank = static_cast<int>(element / shard);
  const int64_t end = std::min(one.range().end, (rank + int64_t{1}) * shard);
  return {rank, element - rank * shard, end - element};
}

SavedLayout saved_layout(const zero::Layout& layout, bool with_frozen) {
  SavedLayout saved{.world_size = layout.world_size(), .units = {}, .parameters = {}};
  std::vector<int> number_of;  // by unit of the layout; -1: left out
  for (const zero::UnitSpec& unit : layout.units()) {
    const bool is_saved = unit.trainable || with_frozen;
    number_of.push_back(is_saved ? saved.num_units() : -1);
    if (is_saved) saved.units.push_back({unit.dtype, unit.trainable, unit.numel});
  }
  for (size_t i = 0; i < layout.parameters().size(); ++i) {
    const zero::ParameterSpec& spec = layout.parameters()[i];
    const zero::UnitSlice& slice = layout.slice(static_cast<int>(i));
    const int unit = number_of[static_cast<size_t>(slice.unit)];
    if (unit >= 0)
      saved.parameters.push_back({spec.name, spec.shape, spec.group, spec.aliases, unit, slice.offset});
  }
  return saved;
}

std::string weights_dataset(const SavedLayout& layout, int unit) {
  return str(layout.units[unit].trainable ? "/master/" : "/parameter/", unit_name(unit));
}

std::string state_dataset(const std::string& state_name, int unit) {
  return str("/", state_name, "/", unit_name(unit));
}

bool is_state_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  constexpr std::array<std::string_view, 4> kTaken{"master", "parameter", "buffers", "blobs"};
  return !name.empty() && name.size() <= 100 && std::all_of(name.begin(), name.end(), allowed) &&
         std::find(kTaken.begin(), kTaken.end(), name) == kTaken.end();
}

}  // namespace tessera::checkpoint
