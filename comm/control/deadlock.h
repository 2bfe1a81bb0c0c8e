// What ranks that wait publish, and what that shows: ranks that issue different collectives on one group, and
// ranks that wait for each other on different groups. (Of two ranks, each may wait on one group for what the
// other has not issued there. Both groups are in order then, and both ranks would wait until the timeout and
// blame each other.) Pure values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/diagnosis.h"

namespace tessera::comm {

/// Says what a rank waits for. The rank issues nothing meanwhile, so this stays true until the rank withdraws
/// it.
struct WaitState {
  std::string group;   ///< on which group
  int64_t number = 0;  ///< for which of the group's collectives
  /// Has what the rank has issued, by group, for the groups that the waiting thread uses.
  std::map<std::string, RankReport> reports;

  /// Describes what the rank waits for: `all_reduce of "unit 3" (1024 x Float)`
  std::string description() const;
  std::string encode() const;
  /// The inverse of encode(). Throws CommError on anything else.
  static WaitState decode(std::string_view text);
};

/// By rank; nothing for those that do not wait. Every collective needs all ranks of its group.
using WaitStates = std::vector<std::optional<WaitState>>;

/// A sentence about two ranks that have issued different collectives on a group in which a rank waits.
std::optional<std::string> find_difference(const WaitStates& states);
/// A sentence about ranks that wait for each other in a circle.
std::optional<std::string> find_deadlock(const WaitStates& states);

}  // namespace tessera::comm
