#include "comm/deadlock.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

/// Whether `a`, which waits, needs `b` to issue something first, while `b` waits as well. (A group that `b`
/// does not list belongs to another thread of `b`, which may be at work.)
bool needs(const WaitState& a, const WaitState& b) {
  const auto num_issued = b.num_issued.find(a.group);
  return num_issued != b.num_issued.end() && num_issued->second < a.number;
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

std::string WaitState::encode() const {
  std::string out = str(group, '\n', number, '\n', description, '\n');
  for (const auto& [name, count] : num_issued) out += str(count, ' ', name, '\n');
  return out;
}

WaitState WaitState::decode(std::string_view text) {
  std::istringstream in{std::string(text)};
  WaitState state;
  std::string line;
  const bool complete = std::getline(in, state.group) && in >> state.number && in.get() == '\n' &&
                        std::getline(in, state.description);
  int64_t count = 0;
  while (complete && in >> count && in.get() == ' ' && std::getline(in, line)) state.num_issued[line] = count;
  if (!complete || !in.eof())
    throw CommError(str("not a list of what a rank waits for: ", text.substr(0, 80)));
  return state;
}

std::optional<std::string> find_deadlock(const std::vector<std::optional<WaitState>>& states, int rank) {
  if (!states[static_cast<size_t>(rank)]) return std::nullopt;
  std::vector<int> path{rank};
  std::vector<bool> visited(states.size(), false);
  visited[static_cast<size_t>(rank)] = true;
  if (!close_circle(states, path, visited)) return std::nullopt;
  // From the lowest rank on, so that all ranks say the same.
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
  std::string out = "the ranks wait for each other: ";
  for (size_t i = 0; i < path.size(); ++i) {
    const int next = path[(i + 1) % path.size()];
    out += str(i == 0 ? "" : "; ", "rank ", path[i], " waits in ",
               states[static_cast<size_t>(path[i])]->description, ", which rank ", next, " has not come to");
  }
  return out;
}

}  // namespace tessera::comm
