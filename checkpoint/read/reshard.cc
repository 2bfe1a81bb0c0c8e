#include "checkpoint/read/reshard.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "core/check.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using zero::Range;

constexpr int64_t kAlignmentBytes = 64;  // of each parameter, saved and current

/// "2 parameters that …: a, b".
void describe_list(const std::vector<std::string>& names, const char* what, std::string& text) {
  if (names.empty()) return;
  constexpr size_t kShown = 5;
  const std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kShown)));
  text += str(text.empty() ? "" : "; ", names.size(), " ", what, ": ", join(shown, ", "));
  if (names.size() > kShown) text += str(" and ", names.size() - kShown, " more");
}

/// Whether a gap between two pieces is too small to contain a parameter.
bool is_padding(int64_t numel, int64_t element_bytes) {
  return numel >= 0 && numel * element_bytes < kAlignmentBytes;
}

/// Appends the pieces of one parameter that a rank needs.
void add_pieces(const SavedLayout& saved, const SavedParameter& from, const zero::UnitSlice& to, Range wanted,
                std::vector<Piece>& pieces) {
  const Range current = intersect(to.range(), wanted);
  const int64_t shift = from.offset - to.offset;  // from the current unit's elements to the saved one's
  const int64_t shard_numel = saved.shard_numel(from.unit);
  for (int64_t next = current.begin; next < current.end;) {
    const int64_t file = (next + shift) / shard_numel;
    const int64_t end = std::min(current.end, (file + 1) * shard_numel - shift);
    pieces.push_back({.file = static_cast<int>(file),
                      .saved_unit = from.unit,
                      .saved_begin = next + shift - file * shard_numel,
                      .numel = end - next,
                      .unit = to.unit,
                      .begin = next});
    next = end;
  }
}

}  // namespace

std::string Comparison::describe() const {
  std::string text;
  describe_list(missing, "of the model's parameters are not in the checkpoint", text);
  describe_list(extra, "of the checkpoint's parameters are not in the model", text);
  describe_list(reshaped, "have another shape", text);
  describe_list(unfrozen, "are trainable now but were saved frozen, without optimizer state", text);
  return text;
}

Comparison compare(const SavedLayout& saved, const zero::Layout& current) {
  std::unordered_map<std::string, int> by_name;
  for (int i = 0; i < static_cast<int>(saved.parameters.size()); ++i) {
    by_name.emplace(saved.parameters[i].name, i);
    for (const std::string& alias : saved.parameters[i].aliases) by_name.emplace(alias, i);
  }
  Comparison result;
  std::vector<bool> used(saved.parameters.size(), false);
  for (int i = 0; i < static_cast<int>(current.parameters().size()); ++i) {
    const zero::ParameterSpec& spec = current.parameters()[i];
    auto found = by_name.find(spec.name);
    for (size_t alias = 0; found == by_name.end() && alias < spec.aliases.size(); ++alias)
      found = by_name.find(spec.aliases[alias]);
    if (found == by_name.end()) {
      result.missing.push_back(spec.name);
      continue;
    }
    const SavedParameter& parameter = saved.parameters[found->second];
    used[found->second] = true;
    if (parameter.shape != spec.shape) {
      result.reshaped.push_back(str(spec.name, ": ", describe_shape(parameter.shape), " in the checkpoint, ",
                                    describe_shape(spec.shape), " in the model"));
      continue;
    }
    result.matches.push_back({.saved = found->second, .current = i});
    if (spec.trainable && !saved.is_trainable(parameter)) result.unfrozen.push_back(spec.name);
  }
  for (size_t i = 0; i < used.size(); ++i)
    if (!used[i]) result.extra.push_back(saved.parameters[i].name);
  return result;
}

std::vector<Piece> plan_reads(const SavedLayout& saved, const zero::Layout& current,
                              const std::vector<Match>& matches, const std::vector<Range>& wanted) {
  TESSERA_CHECK(static_cast<int>(wanted.size()) == current.num_units());
  std::vector<Piece> pieces;
  for (const Match& match : matches) {
    const zero::UnitSlice& slice = current.slice(match.current);
    add_pieces(saved, saved.parameters[match.saved], slice, wanted[slice.unit], pieces);
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.file, a.saved_unit, a.saved_begin, a.unit, a.begin) <
           std::tie(b.file, b.saved_unit, b.saved_begin, b.unit, b.begin);
  });
  std::vector<Piece> joined;
  for (const Piece& piece : pieces) {
    if (!joined.empty()) {
      Piece& last = joined.back();
      const int64_t gap = piece.begin - (last.begin + last.numel);
      const int64_t saved_gap = piece.saved_begin - (last.saved_begin + last.numel);
      const bool neighbours = piece.file == last.file && piece.saved_unit == last.saved_unit &&
                              piece.unit == last.unit && gap == saved_gap;
      if (neighbours && is_padding(gap, size_bytes(current.units()[piece.unit].dtype)) &&
          is_padding(gap, size_bytes(saved.units[piece.saved_unit].dtype))) {
        last.numel += gap + piece.numel;
        continue;
      }
    }
    joined.push_back(piece);
  }
  return joined;
}

}  // namespace tessera::checkpoint
