// GroupContext: what a group and its duplicates share: the store, what each rank waits for on any of them,
// and the shutdown.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "comm/control/deadlock.h"
#include "comm/control/flight_recorder.h"
#include "comm/control/group_store.h"
#include "comm/join_options.h"

namespace tessera::comm {

/// Holds what a group and its duplicates share. Thread-safe.
class GroupContext {
 public:
  /// `serves_store`: this rank's process runs the store's server, and so must be the last to end.
  GroupContext(GroupStore store, int rank, int size, bool serves_store, const JoinOptions& options = {})
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        serves_store_(serves_store),
        interrupt_(options.interrupt),
        on_block_(options.on_block),
        log_(options.log) {}
  GroupContext(const GroupContext&) = delete;
  GroupContext& operator=(const GroupContext&) = delete;
  /// The shutdown: leave(). A server stays behind, for await_other_ranks().
  ~GroupContext();

  const GroupStore& store() const { return store_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Has to be called while this rank waits for others. Throws what JoinOptions::interrupt does.
  void check_interrupt() const {
    if (interrupt_) interrupt_();
  }
  /// Returns what has to be kept while this rank posts a collective or waits for other ranks.
  std::shared_ptr<void> on_block() const { return on_block_ ? on_block_() : nullptr; }

  /// Returns until when this rank waits for the other ranks' failure reports: 1 s after its first failure in
  /// any of the groups.
  std::chrono::steady_clock::time_point report_deadline();

  /// Tells the other ranks why this one leaves; the first reason stands. Never throws.
  void leave(std::string_view reason);

  /// One of the groups has failed: the others are of no use to this rank either. The first reason stands.
  /// `by_peer`: because another rank had ended or left.
  void set_failed(const std::string& why, bool by_peer);
  bool has_failed() const { return failed_; }
  bool has_failed_by_peer() const { return failed_by_peer_; }
  /// Why this rank leaves because of an error: what failed, as far as a group knows it.
  std::string why_it_failed() const;

  /// Adds a group, under a name that is the same on all ranks.
  void add_group(const std::string& name, std::weak_ptr<const FlightRecorder> recorder);
  // What ranks that wait for long tell each other. Each publishes what it waits for. The first of them reads
  // it for all, again when another one has come: so what is asked of the store grows with the number of ranks
  // and not with its square. It publishes what is wrong, and fails, which the others notice as any failure.

  /// Publishes that this rank waits for a collective of a group, until end_wait(). Returns a sentence if two
  /// ranks that wait have issued different things, or ranks wait for each other in a circle. Never throws.
  std::optional<std::string> publish_wait(const std::string& group, int64_t number);
  /// The same of a rank whose collective has failed: it reads for no other rank from now on. Returns what a
  /// rank has found. Never throws.
  std::optional<std::string> publish_failed_wait(const std::string& group, int64_t number);
  /// Reads what all ranks that wait have published, publishes what is wrong, and returns it. Throws
  /// CommError.
  std::optional<std::string> compare_waits();
  /// What a rank has found so. Never throws.
  std::optional<std::string> problem_of_waits() const;
  /// Whether this rank reads for all, and has to look again by publish_wait(). Never throws.
  bool has_news_of_waits() const;
  void end_wait();

 private:
  WaitState wait_state(const std::string& group, int64_t number) const;
  void publish(const std::string& group, int64_t number);

  const GroupStore store_;
  const int rank_;
  const int size_;
  const bool serves_store_;
  const std::function<void()> interrupt_;
  const std::function<std::shared_ptr<void>()> on_block_;
  const Logger log_;
  mutable std::mutex mutex_;  ///< guards what follows
  bool left_ = false;
  std::string failure_;
  std::optional<std::chrono::steady_clock::time_point> report_deadline_;
  std::map<std::string, std::weak_ptr<const FlightRecorder>> recorders_;  ///< by group
  std::optional<std::string> published_wait_;
  std::string news_read_;  ///< "waits/news" when this rank has read for all
  std::atomic<bool> reads_waits_ = false;
  std::atomic<int64_t> num_published_ = 0;
  std::atomic<bool> failed_ = false, failed_by_peer_ = false;
};

// [Note: the last to end] A server's end shows as an error on every rank that still has a question. So a
// process that serves a store ends when all other ranks have said good-bye, have ended, or no longer answer;
// a rank may evaluate, or save, for an hour after rank 0 is done. It waits at its exit and not before: a rank
// may need something of this one until it leaves, such as a barrier of torch.distributed. After an error it
// stays 1 s.

/// Waits for all ranks of the groups that this process has left and whose stores it serves, and then ends
/// those. Says whom it waits for after 5 s. An exit of the process does it by itself, and signals that end a
/// process then have their default action. `interrupt`: of JoinOptions; what it throws is thrown.
void await_other_ranks(const std::function<void()>& interrupt);

}  // namespace tessera::comm
