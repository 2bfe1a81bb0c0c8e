// FlightRecorder: notes the collectives that this rank issues on a group. When one fails, it publishes them
// in the store and compares them with the other ranks', to tell which are missing and which issued something
// else. (PyTorch's word, and idea; that one dumps to a file.)
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/control/diagnosis.h"
#include "comm/control/group_store.h"

namespace tessera::comm {

/// What a rank writes when it leaves the group: its last CommError is in its failure report …
inline constexpr std::string_view kLeftByFault = "!";
/// … or it is done.
inline constexpr std::string_view kLeftInOrder = "it has ended";

/// Its keys are `fault/R` (a failure of rank R, with R's collectives) in the group's store, and `left/R` (by
/// its number in the GroupContext) in the store of that. `fault/any` and `left/any` name the last rank that
/// has written its own, so that one question each is enough while there is no failure, and `left/fault` the
/// last one that did not leave in order. The first rank that fails reads the reports of all and writes them,
/// packed together, under `fault/all`, which each other rank reads. Thread-safe: a backend's threads report
/// failures while the rank's own thread is busy elsewhere.
class FlightRecorder {
 public:
  /// `ranks`: of the group, by their numbers in the GroupContext; this one is at `rank`.
  FlightRecorder(int rank, std::vector<int> ranks, GroupStore group_store, GroupStore context_store);

  /// Notes a collective. Returns its number, from 1 on.
  int64_t record(CollectiveDesc desc);
  /// The lower 16 bits of a collective's tag, and the number of the most recent collective that has
  /// them.
  uint32_t tag_of(int64_t number) const { return static_cast<uint32_t>(number * size_) & 0xffffu; }
  int64_t number_of(uint32_t tag) const;
  /// A collective by its number; none when it is no longer remembered.
  std::optional<CollectiveDesc> find(int64_t number) const;
  /// The number of the last collective; 0: none.
  int64_t num_issued() const;
  /// What this rank has issued. `issuer`: null, or set to the thread that has issued the last collective.
  RankReport report(std::thread::id* issuer = nullptr) const;

  /// Publishes that collective `number` failed on this rank; the first report stands. Never throws.
  void report_fault(Fault fault, int64_t number);
  /// The last rank that has reported a failure, and the last one that has left the group.
  std::vector<int> last_failed_or_left() const;
  /// All such ranks, each of which is asked for.
  std::vector<int> failed_or_left() const;
  /// The last rank that has failed, or left otherwise than in order; none: this is not so of any other rank.
  std::optional<int> broken() const;
  /// Why `rank` left the group; nothing while it is there.
  std::optional<std::string> why_left(int rank) const;

  /// The ranks of the group whose processes have ended.
  std::vector<int> gone() const;

  /// Waits until all ranks have reported, left or ended, at most until `deadline`, and says who is to
  /// blame. Fills in the reports and the ranks that are gone. `compare`: called by the rank that reads for
  /// all, once they have reported. Throws StoreIsGone.
  std::string diagnose(Failure& failure, std::chrono::steady_clock::time_point deadline,
                       const std::function<void()>& compare = {}) const;

 private:
  /// Reads what `rank` has said of itself since a collective failed; false: nothing yet.
  bool read_report(int rank, RankReport& report) const;
  /// Adds to `failure` what the ranks say that have not said anything in its reports, until all of them have,
  /// have ended, or the time is over. `again`: they are asked until then, and not only once, at the end.
  void collect_reports(Failure& failure, std::chrono::steady_clock::time_point deadline, bool again) const;
  std::vector<int> of_group(const std::vector<int>& ranks) const;

  const int rank_;
  const int size_;
  const std::vector<int> ranks_;  ///< numbers in the context, by rank
  const GroupStore store_;
  const GroupStore context_store_;
  mutable std::mutex mutex_;                                       ///< guards what follows
  RankReport report_;                                              ///< of this rank
  std::deque<std::chrono::steady_clock::time_point> issue_times_;  ///< of report_.recent
  std::thread::id issuer_;                                         ///< of the last collective
};

}  // namespace tessera::comm
