#include "checkpoint/read/reshard.h"

#include <algorithm>
#include <span>
#include <tuple>
#include <unordered_map>

#include "core/check.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using zero::Range;

/// "2 parameters that …: a, b".
void describe_list(const std::vector<std::string>& names, const char* what, std::string& text) {
  if (names.empty()) return;
  constexpr size_t kShown = 5;
  const auto shown = std::span(names).first(std::min(names.size(), kShown));
  text += str(text.empty() ? "" : "; ", names.size(), " ", what, ": ", join(shown, ", "));
  if (names.size() > kShown) text += str(" and ", names.size() - kShown, " more");
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
  struct Placed {
    int saved_unit;
    int64_t saved_begin;
    Piece piece;
  };
  std::vector<Placed> placed;
  for (const Match& match : matches) {
    const zero::UnitSlice& slice = current.slice(match.current);
    const int saved_unit = saved.parameters[static_cast<size_t>(match.saved)].unit;
    const Range range = intersect(slice.range(), wanted[slice.unit]);
    for (int64_t next = range.begin; next < range.end;) {
      const int64_t first = next - slice.offset;
      const SavedPlace at = saved.place(match.saved, first);
      const int64_t numel = std::min(range.end - next, at.numel);
      placed.push_back({saved_unit, at.begin, {at.rank, match.saved, first, numel, slice.unit, next}});
      next += numel;
    }
  }
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.piece.file, a.saved_unit, a.saved_begin, a.piece.unit, a.piece.begin) <
           std::tie(b.piece.file, b.saved_unit, b.saved_begin, b.piece.unit, b.piece.begin);
  });
  std::vector<Piece> pieces;
  pieces.reserve(placed.size());
  for (const Placed& one : placed) pieces.push_back(one.piece);
  return pieces;
}

}  // namespace tessera::checkpoint
