// StoreExchange: each rank gives a string and receives those of all ranks, over the store.
//
// Requests to the store: Each rank writes its value and counts itself. Rank 0, which mostly is the one beside
// the server, reads all values with one request and writes them, packed together, under a key of this
// exchange, which each other rank reads with one request. So an exchange costs the store's server some three
// requests a rank, for any number of ranks, and a rank that comes last two round trips. Where rank 0 has been
// interrupted meanwhile, the rank that came last does it. That key is written by compare-and-set, and a rank
// that gives up writes it too: an exchange succeeds on all ranks or on none, also on a rank that arrives
// later. A rank that waits makes sure that what it has written is still there, about once a second, and
// passes on what all have said where the key was removed.
//
// Long values: c10d's store takes 8 MiB at once. Values that are longer than a rank's share of half of
// that are sent in pieces, one exchange each.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/group_store.h"

namespace tessera::comm {

/// Exchanges strings between all ranks, once a call. One thread at a time. Requires: the store is of its own
/// (GroupStore::under).
class StoreExchange {
 public:
  StoreExchange(GroupStore store, int rank, int size) : store_(std::move(store)), rank_(rank), size_(size) {}

  struct Result {
    std::vector<std::string> values;  ///< by rank; empty: the exchange has failed
    std::string cause;         ///< why it has failed, on the first rank that gave up if not on this one
    std::vector<int> missing;  ///< the ranks that had not arrived after `timeout`
    bool of_peer = false;      ///< another rank gave up first, or has ended
    /// Throws the failure, as a PeerFailure where it is of_peer.
    [[noreturn]] void fail(const std::string& message) const;
  };
  /// Collective. `timeout`: of each piece. `watch` is called about every 100 ms of waiting, and may throw a
  /// CommError to give up. Throws CommError when the store is gone.
  Result run(const std::string& value, std::chrono::milliseconds timeout, const std::function<void()>& watch);
  /// Collective. run() at the rendezvous: the values. Throws CommError where there are none. `question`: for
  /// messages.
  std::vector<std::string> ask_all(const std::string& value, std::chrono::milliseconds timeout,
                                   std::string_view question);
  /// Collective. The same; the first value that is not empty, after its rank: "rank 1: no room". Else "".
  std::string first_obstacle(const std::string& mine, std::chrono::milliseconds timeout,
                             std::string_view question);
  /// Tells a `watch` whether `rank` has given its value to the exchange that this rank waits in.
  bool has_arrived(int rank) const;

 private:
  Result run_piece(const std::string& value, std::chrono::milliseconds timeout,
                   const std::function<void()>& watch);
  std::string await_result(int64_t arrived, std::chrono::milliseconds timeout,
                           const std::function<void()>& watch, Result& failure) const;
  /// Throws CommError if something of this exchange is gone. `arrived`: what the counter was; what it is now.
  int64_t check_still_there(int64_t arrived) const;

  const GroupStore store_;
  const int rank_;
  const int size_;
  int64_t round_ = 0;  ///< number of this exchange, from 1 on
};

}  // namespace tessera::comm
