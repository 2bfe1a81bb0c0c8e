// What each rank waits for, over all groups of a family. A group's own list of collectives (ledger.h) shows
// ranks that went different ways on that group. It does not show ranks of which each waits on another group
// for what the other has not issued: there, both lists are right, and both ranks would wait until the
// time-out and then blame each other. Pure values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// A rank that waits. It issues nothing meanwhile, so this stays true until it says otherwise.
struct Waiting {
  std::string group;   ///< on which group
  int64_t number = 0;  ///< for which of the group's collectives
  std::string text;    ///< `all_reduce of "unit 3" (1024 x Float)`
  std::map<std::string, int64_t>
      issued;  ///< by group, of those that the waiting thread uses: how many collectives the rank has issued

  std::string encode() const;
  /// Local. The inverse of encode(). Throws CommError on anything else.
  static Waiting decode(std::string_view text);
};

/// Local. A sentence about the ranks that wait for each other in a circle, if `rank` is one of them.
/// `waiting`: by rank; nothing for those that don't wait. Every collective needs all ranks.
std::optional<std::string> describe_circle(const std::vector<std::optional<Waiting>>& waiting, int rank);

}  // namespace tessera::comm
