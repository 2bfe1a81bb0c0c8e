// C10dCommunicator: a Communicator over a Transport (libtorch's process groups, Gloo for CPU tensors and NCCL
// for CUDA tensors, or shared memory) and c10d's store. It numbers the collectives, keeps buffers alive, and
// explains failures; a Transport moves the bytes.
//
// [Note: failures] A collective that fails on one rank should end the run on all of them, soon, with one line
// that names who is to blame:
//  1. The rank reports its fault in the store (Ledger), also from Gloo's threads while it is busy elsewhere.
//  2. It aborts its transport, which closes its connections; the others' pending collectives fail in turn.
//  3. It waits up to 1 s, once for all its groups, for the others' reports, compares the lists of
//  collectives, and names the ranks that
//     went another way, left the group, are behind, or have said nothing.
// A wait() that lasts also compares lists every few seconds, and who waits for whom
// over all groups (waits.h): ranks that issue different collectives would otherwise
// wait for the timeout, 30 minutes by default.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "comm/group_store.h"
#include "comm/ledger.h"
#include "comm/transport.h"

namespace tessera::comm {

/// What the group and its duplicates share: the store, and the farewell. Thread-safe.
class Family {
 public:
  /// `serves`: this rank's process runs the store's server, and so must be the last to go.
  Family(GroupStore store, int rank, int size, bool serves)
      : store_(std::move(store)), rank_(rank), size_(size), serves_(serves) {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  /// Says goodbye; the server then waits for the others to do so, up to 5 s (1 s after an error).
  ~Family();

  const GroupStore& store() const { return store_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Local. Until when this rank waits for the reports of the others: for a time after its first
  /// failure, in whichever group that was.
  std::chrono::steady_clock::time_point patience_ends();

  /// Local. Tells the other ranks why this one leaves; the first reason stands. Never throws.
  void leave(std::string_view reason);

  /// Local. A new group of the family, under a name that is the same on all ranks.
  void enroll(const std::string& group, std::weak_ptr<const Ledger> ledger);
  /// Local. Says what this rank waits for, until stop_waiting(). Returns a sentence if it is one of a circle
  /// of ranks that wait for each other. Never throws.
  std::optional<std::string> compare_waits(const std::string& group, int64_t number);
  void stop_waiting();

 private:
  const GroupStore store_;
  const int rank_;
  const int size_;
  const bool serves_;
  std::mutex mutex_;  ///< guards what follows
  bool left_ = false;
  std::optional<std::chrono::steady_clock::time_point> patience_ends_;
  std::map<std::string, std::weak_ptr<const Ledger>> ledgers_;
  std::atomic<bool> said_waiting_ = false;
};

/// Makes the transport of a group whose ranks meet under the given store.
using MakeTransport = std::function<std::unique_ptr<Transport>(const GroupStore&, FailureHook on_failure)>;

/// Owns one Group: transport, ledger, works in flight. Not thread-safe, but for abort().
class C10dCommunicator final : public Communicator {
 public:
  class Group;

  /// Collective.
  C10dCommunicator(std::shared_ptr<Family> family, std::chrono::milliseconds timeout,
                   const MakeTransport& make);
  explicit C10dCommunicator(std::shared_ptr<Group> group);
  /// Waits for what is in flight; while an exception unwinds, aborts it instead.
  ~C10dCommunicator() override;
  C10dCommunicator(const C10dCommunicator&) = delete;
  C10dCommunicator& operator=(const C10dCommunicator&) = delete;

  int rank() const override;
  int size() const override;
  std::string_view backend() const override;
  std::chrono::milliseconds timeout() const override;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override;
  using Communicator::exchange;
  std::shared_ptr<Communicator> duplicate(std::string_view name) override;
  at::Tensor allocate_symmetric(int64_t bytes, at::Device device, std::string_view label) override;
  at::Tensor peer_view(const at::Tensor& mine, int rank) override;
  bool wait_blocks() const override;
  bool buffers_reductions() const override;
  at::Tensor allocate_shared(int64_t bytes, std::string_view label) override;

  /// Local. Leaves the group at once: everything pending fails, here and on the other ranks, whose errors
  /// give the reason. (Duplicates do so when an exception destroys them.) Never throws.
  void abort(std::string_view reason);

 protected:
  WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override;
  WorkPtr do_reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label) override;
  WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override;
  WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override;
  void do_barrier(std::string_view label) override;

 private:
  std::shared_ptr<Group> group_;
  int exceptions_at_birth_;
};

}  // namespace tessera::comm
