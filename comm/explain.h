// Turns what the ranks of a failed collective know about each other into one line that names who is to blame.
// Pure text in, text out, so that every case can be tested without a network.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "comm/history.h"

namespace tessera::comm {

/// How a rank's collective ended.
enum class Fault {
  kNone,     ///< no report: the rank is dead, or has not come to the collective yet
  kTimeout,  ///< it waited for the whole timeout
  kClosed,   ///< a connection broke
};

/// What is known of one rank after a failure.
struct Report {
  Fault fault = Fault::kNone;
  std::chrono::milliseconds waited{0};  ///< how long its collective was in flight when it failed
  History history;                      ///< empty without a report
  std::string left;                     ///< why it left the group; empty: it has not said so
};

struct Failure {
  int rank = 0;                          ///< who asks
  int64_t number = 0;                    ///< the collective that failed, in its own history
  std::string cause;                     ///< the backend's own words, for when nobody can be blamed
  std::chrono::milliseconds timeout{0};  ///< how long ranks wait for each other
  std::vector<Report> reports;           ///< one a rank, the asker's included
  std::vector<int> missing;              ///< ranks known not to have come (exchange)
  std::vector<int> gone;                 ///< ranks whose processes are known to have ended (comm/liveness.h)
};

/// Local. `all_reduce of "unit 3" (8 x Float), collective 17: ranks 1, 2 have not arrived within 2 s`
std::string explain(const Failure& failure);

/// Local. "rank 1", "ranks 1, 2 and 5"
std::string name_ranks(const std::vector<int>& ranks);
/// Local. "2 s", "0.5 s", "30 min"
std::string name_duration(std::chrono::milliseconds duration);
/// Local. The first line, without libtorch's source locations and back-traces.
std::string first_line(std::string_view text);

}  // namespace tessera::comm
