// FlightRecorder: notes the collectives that this rank issues on a group. When one fails or takes long, it
// publishes them in the store and compares them with the other ranks', to tell who is missing and who issued
// something else. (PyTorch's word, and idea; that one dumps to a file.)
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/diagnosis.h"
#include "comm/group_store.h"

namespace tessera::comm {

/// What a rank writes when it leaves the group: its last CommError is in its failure report …
inline constexpr std::string_view kLeftByFault = "!";
/// … or it is done.
inline constexpr std::string_view kLeftInOrder = "it has finished";

/// Its keys are `fault/R` (a failure of rank R, with R's collectives) and `stall/R` (R has waited for
/// seconds) in the group's store, and `left/R` in the store of the GroupContext. Each of `fault/any` and
/// `left/any` exists once any rank has written its own, so that one question is enough while all goes well.
/// Thread-safe: a backend's threads report failures while the rank's own thread is elsewhere.
class FlightRecorder {
 public:
  FlightRecorder(int rank, int size, GroupStore group_store, GroupStore context_store);

  /// Local. Notes a collective that is issued under `tag`. Returns its number, from 1 on.
  int64_t record(CollectiveDesc desc, uint32_t tag = 0);
  /// Local. Of a recent collective; else the last one's.
  int64_t number_of_tag(uint32_t tag) const;
  /// Local. How many collectives this rank has issued; nothing when a thread other than the caller's issued
  /// the last one.
  std::optional<int64_t> num_issued_by_this_thread() const;
  /// Local. The description of a recent collective.
  std::string describe(int64_t number) const;

  /// Local. Publishes that collective `number` failed on this rank; the first report stands. Never throws.
  void report_fault(Fault fault, int64_t number);
  /// Local. Whether any rank has reported a failure or left the group.
  bool any_failed_or_left() const;
  /// Local. Whether this rank has.
  bool has_failed_or_left(int rank) const;
  /// Local. Why `rank` left the group; nothing while it is there.
  std::optional<std::string> departure(int rank) const;

  /// Local. Publishes this rank's collectives and compares them with those of the other ranks that wait.
  /// Returns the difference, if there is one. Never throws: a store that is gone shows elsewhere.
  std::optional<std::string> compare_stalled();
  /// Local. Waits until all ranks have reported, left or ended, at most until `deadline`, and says who is to
  /// blame. Fills in the reports and the ranks that are gone. Throws CommError when the store is gone.
  std::string diagnose(Failure failure, std::chrono::steady_clock::time_point deadline) const;

 private:
  struct Issue {
    uint32_t tag;
    std::chrono::steady_clock::time_point time;
  };

  /// Reads what `rank` has said of itself since a collective failed; false: nothing yet.
  bool read_report(int rank, RankReport& report) const;

  const int rank_;
  const int size_;
  const GroupStore store_;
  const GroupStore context_store_;
  mutable std::mutex mutex_;  ///< guards what follows
  RankReport report_;         ///< of this rank
  std::deque<Issue> issues_;  ///< of report_.recent
  std::thread::id issuer_;    ///< of the last collective
};

}  // namespace tessera::comm
