// GroupStore: the rendezvous store (c10d's TCPStore or HashStore) as the rest of comm/ sees it: strings under
// keys, its errors turned into CommError, and waits that never hold the connection and notice ranks that have
// ended.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/liveness.h"

namespace tessera::comm {

/// Says that the store does not answer: its server has ended, or the rank that serves it.
class StoreIsGone : public PeerFailure {
 public:
  using PeerFailure::PeerFailure;
};

/// 0 … size - 1: the ranks of a whole group, and what messages call them.
std::vector<int> all_ranks(int size);

/// The error of a value that was there: of what everybody who can connect may do, only removing and
/// overwriting changes what ranks find (comm/control/sealed_store.h).
CommError removed_from_store(const std::string& key);
/// A rank that waits looks at this interval for what it has written itself.
inline constexpr std::chrono::seconds kStoreCheckInterval{1};

/// Reads and writes a part of the store. Copies share the connection. Thread-safe as far as the c10d store is
/// (TCPStore and HashStore are). Every call is local to this rank and the server, and throws StoreIsGone when
/// the server is gone.
class GroupStore {
 public:
  /// `where` names the server in errors: "rank 0 is gone: its store at 10.0.0.1:29500".
  GroupStore(c10::intrusive_ptr<c10d::Store> store, std::string where)
      : store_(std::move(store)), watched_store_(store_), where_(std::move(where)) {}

  void set(const std::string& key, const std::string& value) const;
  /// The key's value, with one round trip; none: the key does not exist.
  std::optional<std::string> find(const std::string& key) const;
  /// The values of the keys `prefix`R, with three round trips. Throws CommError for one that is not there.
  std::vector<std::string> get_all(const std::string& prefix, const std::vector<int>& ranks) const;
  bool has(const std::string& key) const;
  void erase(const std::string& key) const;
  /// Sets the key unless it exists; returns the value it then has.
  std::string claim(const std::string& key, const std::string& value) const;
  /// Adds to a key that holds a number (0 before the first call); returns the sum.
  int64_t add(const std::string& key, int64_t amount) const;

  // Waits ask again at growing intervals, up to 10 ms (more where the server is slow), instead of blocking on
  // the server, so that other threads can use the connection. `watch` runs about every 100 ms, or every five
  // round trips, and may throw.

  /// Waits for a key and returns its value; none: it did not appear in time. Throws RankIsGone when any rank
  /// has ended before it appeared.
  std::optional<std::string> await(const std::string& key, std::chrono::milliseconds timeout,
                                   const std::function<void()>& watch) const;
  /// The same for what `has_come` asks the store for; false: not in time.
  bool await(const std::function<bool()>& has_come, std::chrono::milliseconds timeout,
             const std::function<void()>& watch) const;
  /// Waits for the key `prefix`R of each of these ranks R. Returns the ranks whose key did not appear in
  /// time. Throws RankIsGone for one that has ended without its key.
  std::vector<int> await_ranks(const std::string& prefix, const std::vector<int>& ranks,
                               std::chrono::milliseconds timeout, const std::function<void()>& watch) const;

  /// The part of the store under `prefix`.
  GroupStore under(const std::string& prefix) const;
  /// The same store, whose waits notice ranks that have ended.
  GroupStore watched(std::shared_ptr<const Liveness> liveness) const;
  /// The ranks whose processes have ended, as far as this store is watched.
  std::vector<int> gone() const;
  /// Returns those of them whose hosts do not answer.
  std::vector<int> silent() const;
  /// Throws RankIsGone if a rank has ended, or does so within `limit`: after a failed connection to a
  /// rank that ends, its other connections close one by one.
  void check_all_alive(std::chrono::milliseconds limit = {}) const;
  /// Returns the store for c10d's groups: its waits poll like ours, and throw RankIsGone when any rank has
  /// ended.
  const c10::intrusive_ptr<c10d::Store>& c10d_store() const { return watched_store_; }

 private:
  template <class Function>
  auto guarded(Function&& function) const;

  c10::intrusive_ptr<c10d::Store> store_, watched_store_;
  std::string where_;
  /// What the fastest answer took, in microseconds: the link's delay. What others take longer is the load.
  std::shared_ptr<std::atomic<int64_t>> fastest_ =
      std::make_shared<std::atomic<int64_t>>(std::numeric_limits<int64_t>::max());
  std::shared_ptr<const Liveness> liveness_;  ///< null: ranks as threads, or before they know each other
};

}  // namespace tessera::comm
