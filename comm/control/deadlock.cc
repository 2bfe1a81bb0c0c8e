#include "comm/control/deadlock.h"

#include <algorithm>

#include "core/str.h"

namespace tessera::comm {
namespace {

/// Whether `a`, which waits, needs `b` to issue something first, while `b` waits as well. (A group that `b`
/// does not list belongs to another thread of `b`, which may be at work.)
bool needs(const WaitState& a, const WaitState& b) {
  const auto report = b.reports.find(a.group);
  return report != b.reports.end() && report->second.num_issued < a.number;
}

/// Extends `path` to a circle back to its first rank: a depth-first search that visits each rank once.
bool close_circle(const std::vector<std::optional<WaitState>>& states, std::vector<int>& path,
                  std::vector<bool>& visited) {
  const WaitState& last = *states[static_cast<size_t>(path.back())];
  for (size_t next = 0; next < states.size(); ++next) {
    if (!states[next] || static_cast<int>(next) == path.back() || !needs(last, *states[next])) continue;
    if (static_cast<int>(next) == path.front()) return true;
    if (visited[next]) continue;
    visited[next] = true;
    path.push_back(static_cast<int>(next));
    if (close_circle(states, path, visited)) return true;
    path.pop_back();
  }
  return false;
}

}  // namespace

std::string WaitState::description() const {
  const auto report = reports.find(group);
  const CollectiveDesc* desc = report == reports.end() ? nullptr : report->second.find(number);
  return desc != nullptr ? desc->text() : str("collective ", number);
}

std::string WaitState::encode() const {
  std::string out = str(group, '\n', number, '\n');
  for (const auto& [name, report] : reports) out += str(name, '\n', report.encode());
  return out;
}

WaitState WaitState::decode(std::string_view text) {
  WaitState state;
  state.group = take(text, '\n');
  state.number = parse_integer(take(text, '\n'));
  while (!text.empty()) {
    const std::string name(take(text, '\n'));
    state.reports[name] = RankReport::decode(text);
  }
  return state;
}

std::optional<std::string> find_difference(const std::vector<std::optional<WaitState>>& states, int rank) {
  const auto& mine = states[static_cast<size_t>(rank)];
  if (!mine || !mine->reports.contains(mine->group)) return std::nullopt;
  const RankReport& own = mine->reports.at(mine->group);
  for (size_t r = 0; r < states.size(); ++r) {
    if (static_cast<int>(r) == rank || !states[r] || !states[r]->reports.contains(mine->group)) continue;
    const RankReport& other = states[r]->reports.at(mine->group);
    if (const auto number = first_difference(own, other))
      return describe_difference(*number, rank, own, static_cast<int>(r), other);
  }
  return std::nullopt;
}

std::optional<std::string> find_deadlock(const std::vector<std::optional<WaitState>>& states, int rank) {
  if (!states[static_cast<size_t>(rank)]) return std::nullopt;
  std::vector<int> path{rank};
  std::vector<bool> visited(states.size(), false);
  visited[static_cast<size_t>(rank)] = true;
  if (!close_circle(states, path, visited)) return std::nullopt;
  // The circle begins at its lowest rank, so that all ranks say the same.
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
  std::string out = "the ranks wait for each other: ";
  for (size_t i = 0; i < path.size(); ++i) {
    const int next = path[(i + 1) % path.size()];
    out +=
        str(i == 0 ? "" : "; ", "rank ", path[i], " waits in ",
            states[static_cast<size_t>(path[i])]->description(), ", which rank ", next, " has not come to");
  }
  return out;
}

}  // namespace tessera::comm
