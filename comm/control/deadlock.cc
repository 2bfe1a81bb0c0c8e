#include "comm/control/deadlock.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/str.h"

namespace tessera::comm {
namespace {

/// Whether `a`, which waits, needs `b` to issue something first, while `b` waits as well. (A group that `b`
/// does not list belongs to another thread of `b`, which may be at work.)
bool needs(const WaitState& a, const WaitState& b) {
  const auto report = b.reports.find(a.group);
  return report != b.reports.end() && report->second.num_issued < a.number;
}

/// Follows who needs whom, depth first.
class CircleSearch {
 public:
  explicit CircleSearch(const WaitStates& states)
      : states_(states), is_on_path_(states.size()), is_done_(states.size()) {}

  /// The ranks of a circle that can be reached from `rank`; empty: there is none.
  std::vector<size_t> from(size_t rank) {
    is_on_path_[rank] = true;
    path_.push_back(rank);
    for (size_t next = 0; next < states_.size(); ++next) {
      if (!states_[next] || next == rank || is_done_[next] || !needs(*states_[rank], *states_[next]))
        continue;
      if (is_on_path_[next]) return {std::find(path_.begin(), path_.end(), next), path_.end()};
      if (std::vector<size_t> circle = from(next); !circle.empty()) return circle;
    }
    path_.pop_back();
    is_on_path_[rank] = false;
    is_done_[rank] = true;
    return {};
  }

 private:
  const WaitStates& states_;
  std::vector<bool> is_on_path_, is_done_;
  std::vector<size_t> path_;
};

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

std::optional<std::string> find_difference(const WaitStates& states) {
  std::set<std::string> groups;
  for (const auto& state : states)
    if (state) groups.insert(state->group);
  for (const std::string& group : groups) {
    std::vector<std::pair<int, const RankReport*>> reports;  // with their ranks
    for (size_t rank = 0; rank < states.size(); ++rank)
      if (states[rank] && states[rank]->reports.contains(group))
        reports.emplace_back(static_cast<int>(rank), &states[rank]->reports.at(group));
    // A rank that is behind may have issued nothing yet in which two others differ.
    const auto most = std::max_element(reports.begin(), reports.end(), [](const auto& a, const auto& b) {
      return a.second->num_issued < b.second->num_issued;
    });
    for (const auto& other : reports)
      if (const auto number = first_difference(*most->second, *other.second)) {
        const auto& [first, second] = std::minmax(*most, other);
        return describe_difference(*number, first.first, *first.second, second.first, *second.second);
      }
  }
  return std::nullopt;
}

std::optional<std::string> find_deadlock(const WaitStates& states) {
  CircleSearch search(states);
  std::vector<size_t> circle;
  for (size_t rank = 0; rank < states.size() && circle.empty(); ++rank)
    if (states[rank]) circle = search.from(rank);
  if (circle.empty()) return std::nullopt;
  std::rotate(circle.begin(), std::min_element(circle.begin(), circle.end()), circle.end());
  std::string out = "the ranks wait for each other: ";
  for (size_t i = 0; i < circle.size(); ++i)
    out += str(i == 0 ? "" : "; ", "rank ", circle[i], " waits in ", states[circle[i]]->description(),
               ", which rank ", circle[(i + 1) % circle.size()], " has not come to");
  return out;
}

}  // namespace tessera::comm
