// Ledger: one rank's account of a group, which it publishes in the store when something goes wrong, so that
// the others can tell who is missing and who went another way.
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/explain.h"
#include "comm/group_store.h"
#include "comm/history.h"

namespace tessera::comm {

/// The keys of a ledger: `fault/R` (a failure, with R's history), `stall/R` (R has waited for seconds, with
/// its history) in the group's part of the store, `left/R` in the family's. Nothing is written while all goes
/// well. Thread-safe: Gloo's threads report failures while the rank's own thread is elsewhere.
class Ledger {
 public:
  Ledger(int rank, int size, GroupStore group_store, GroupStore family_store)
      : rank_(rank),
        size_(size),
        store_(std::move(group_store)),
        family_store_(std::move(family_store)),
        issuer_(std::this_thread::get_id()) {}

  /// Local. Notes a call that goes out under `tag`. Returns its number.
  int64_t record(Call call, uint32_t tag = 0);
  /// Local. Of a call noted not long ago; else the last one's.
  int64_t number_of_tag(uint32_t tag) const;

  /// Local. How many collectives this rank has issued; nothing when another
  /// thread than the caller issued the last.
  std::optional<int64_t> issued_by_this_thread() const;
  /// Local. What a call noted not long ago was.
  std::string text_of(int64_t number) const;

  /// Local. Publishes that collective `number` failed on this rank; the first report stands. Never throws.
  void report_fault(Fault fault, int64_t number);
  /// Local. Whether `rank` has reported one.
  bool has_failed(int rank) const;
  /// Local. Publishes this rank's history and compares it with that of the others who wait. Returns what
  /// differs, if anything does. Never throws: a store that is gone shows elsewhere.
  std::optional<std::string> compare_stalled();

  /// Local. Waits until all ranks have reported, left or ended, at the longest until `give_up`, and explains.
  /// Throws CommError when the store is gone.
  std::string explain_failure(int64_t number, const std::string& cause, const std::vector<int>& missing,
                              std::chrono::milliseconds timeout,
                              std::chrono::steady_clock::time_point give_up);
  /// Local. Why `rank` left the group; nothing while it is there.
  std::optional<std::string> departure(int rank) const;

 private:
  struct Issue {
    uint32_t tag;
    std::chrono::steady_clock::time_point time;
  };

  std::string encoded_history() const;
  /// mutex_ must be held.
  std::chrono::milliseconds age(int64_t number) const;

  const int rank_;
  const int size_;
  const GroupStore store_;
  const GroupStore family_store_;
  mutable std::mutex mutex_;  ///< guards what follows
  History history_;
  std::deque<Issue> issues_;  ///< of the last calls, the newest at the back
  std::thread::id issuer_;    ///< of the last call
  Fault fault_ = Fault::kNone;
  std::chrono::milliseconds waited_{0};  ///< how long what failed had been in flight
};

/// What a rank writes under `left/R` when a CommError took it out of the group:
/// the reason is in its fault report.
inline constexpr std::string_view kLeftByFault = "!";
inline constexpr std::string_view kLeftInOrder = "it has finished";

}  // namespace tessera::comm
