// Finds ranks that wait for each other in a circle, over all groups of a GroupContext. The collectives of one
// group (flight_recorder.h) show ranks that issue different things on it. They do not show two ranks of which
// each waits on another group for what the other has not issued: there, both groups are in order, and both
// ranks would wait until the timeout and then blame each other. Pure values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// What a rank waits for. It issues nothing meanwhile, so this stays true until the rank withdraws it.
struct WaitState {
  std::string group;        ///< on which group
  int64_t number = 0;       ///< for which of the group's collectives
  std::string description;  ///< `all_reduce of "unit 3" (1024 x Float)`
  /// By group, of those that the waiting thread uses: how many collectives the rank has issued.
  std::map<std::string, int64_t> num_issued;

  std::string encode() const;
  /// Local. The inverse of encode(). Throws CommError on anything else.
  static WaitState decode(std::string_view text);
};

/// Local. A sentence about the ranks that wait for each other in a circle, if `rank` is one of them.
/// `states`: by rank; nothing for those that do not wait. Every collective needs all ranks.
std::optional<std::string> find_deadlock(const std::vector<std::optional<WaitState>>& states, int rank);

}  // namespace tessera::comm
