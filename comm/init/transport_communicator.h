// TransportCommunicator: a Communicator over a Transport (libtorch's process groups, Gloo for CPU tensors and
// NCCL for CUDA tensors, or shared memory) and c10d's store. It numbers the collectives, keeps buffers alive,
// and explains failures; a Transport moves the bytes.
//
// Failures: A collective that fails on one rank should end the run on all of them, soon, with one line
// that names who is to blame:
//  1. The rank reports its failure in the store (FlightRecorder), also from Gloo's threads while it is busy
//     elsewhere.
//  2. It aborts its transport, which closes its connections; the others' pending collectives fail in turn.
//  3. It waits up to 1 s, once for all its groups, for the others' reports, which the first rank that failed
//     collects for all, compares the collectives, and names the ranks that issued something else, left the
//     group, are behind, or have reported nothing.
// A rank whose wait() lasts publishes what it waits for, and the first such rank compares the collectives,
// and which rank waits for which over all groups (deadlock.h): ranks that issue different collectives would
// otherwise wait for the timeout, 30 minutes by default.
// Over a backend whose wait() only orders streams (NCCL) the thread that has issued a collective may stand in
// the driver meanwhile, where it sees nothing of this, and NCCL itself does not see the end of a rank
// everywhere. So a thread looks once a second, and aborts the transport, which ends what the device waits
// for.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/communicator.h"
#include "comm/control/flight_recorder.h"
#include "comm/control/group_store.h"
#include "comm/control/store_exchange.h"
#include "comm/init/group_context.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Makes the transport of a group whose ranks find each other through the given store.
using MakeTransport = std::function<std::unique_ptr<Transport>(const GroupStore&, FailureHook on_failure)>;

class PendingCollective;  // the Work that collectives return

/// Runs collectives over a Transport, which it owns. Requires: std::make_shared. One thread at a time, except
/// abort(). Works may outlive it, but wait() then throws.
class TransportCommunicator final : public Communicator,
                                    public std::enable_shared_from_this<TransportCommunicator> {
 public:
  /// Collective. Connects, and returns when all ranks have. Throws CommError.
  TransportCommunicator(std::shared_ptr<GroupContext> context, std::chrono::milliseconds timeout,
                        const MakeTransport& make, at::Device device = at::kCPU);
  /// Collective. A duplicate, or a part of the original: `ranks` of it. `name` and `store` are the same on
  /// all of them, and of this group alone.
  TransportCommunicator(const TransportCommunicator& original, const std::vector<int>& ranks,
                        std::string name, GroupStore store, const MakeTransport& make);
  /// While an exception unwinds, or when a group of this rank has failed, aborts; else waits for what is in
  /// flight, as long as all ranks live.
  ~TransportCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  int global_rank(int rank) const override { return ranks_[static_cast<size_t>(rank)]; }
  std::string_view backend() const override { return transport_->name(); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  bool wait_blocks() const override { return transport_->wait_blocks(); }
  bool buffers_reductions() const override { return transport_->buffers_reductions(); }
  void barrier(std::string_view label) override;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override;
  using Communicator::exchange;
  std::shared_ptr<Communicator> duplicate(std::string_view name) override;
  std::shared_ptr<Communicator> duplicate_for_exchange(std::string_view name) override;
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, std::string_view name) override;
  at::Tensor allocate_symmetric(int64_t bytes, at::Device device, std::string_view label) override;
  at::Tensor allocate_shared(int64_t bytes, std::string_view label) override;
  at::Tensor peer_view(const at::Tensor& mine, int rank) override;
  HostRank host_rank() const override { return transport_->host_rank(); }
  int64_t bytes_from_other_hosts() const override { return transport_->bytes_from_other_hosts(); }

  /// Leaves the group at once: everything pending fails, here and on the other ranks, whose errors
  /// give the reason. (Duplicates do so when an exception destroys them.) Never throws.
  void abort(std::string_view reason);
  /// Whether one of this rank's groups has failed because another rank had ended or left.
  bool has_failed_by_peer() const { return context_->has_failed_by_peer(); }

 protected:
  WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override;
  WorkPtr do_reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label) override;
  WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override;
  WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override;

 private:
  friend class PendingCollective;

  void open(const MakeTransport& make);
  std::shared_ptr<Communicator> duplicate(std::string_view name, const MakeTransport& make);
  /// Makes a group of `ranks` of this one. `place`: of its own in this group's store.
  std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name,
                                           const std::string& place, const MakeTransport& make);
  using Begin = std::function<PendingPtr(uint32_t tag)>;
  WorkPtr issue(CollectiveDesc desc, std::vector<at::Tensor> buffers, const Begin& begin);
  at::Tensor allocate(const char* op, std::string_view label, int64_t bytes, bool common);
  void wait(PendingCollective& collective);
  /// Forgets what has finished, and notices failures of collectives whose Work was dropped.
  void reap();
  void finish_in_flight();

  /// Throws the error of a group that has failed.
  void check_usable() const;
  [[noreturn]] void throw_error() const;
  /// Leaves the group when the caller's JoinOptions::interrupt throws.
  void check_interrupt();
  /// The ranks whose processes have ended and that had not left in order, as messages call them.
  std::vector<int> gone_before_leaving() const;
  /// Fails when there are any.
  void check_all_alive(int64_t number);
  /// Fails when the other ranks that wait have issued something else, or wait for this one.
  void check_stalled(int64_t number);
  /// Aborts the transport, once a rank has ended that had not left in order, has failed or left. A thread's.
  void watch_peers(const std::stop_token& stop);
  /// What watch_peers() looks for; "": nothing. `only_gone`: without a request to the store.
  std::string failure_of_peer(bool only_gone) const;
  /// Fails when watch_peers() has aborted the transport.
  void check_watch(int64_t number);
  /// Reports, aborts, and throws what diagnose() says.
  [[noreturn]] void fail(int64_t number, const std::string& cause, std::chrono::milliseconds timeout,
                         std::vector<int> missing = {});
  enum class Kind { kOwn, kPeer, kRanksDiffer };  ///< what is thrown: CommError, PeerFailure, RanksDiffer
  static Kind kind_of(const CommError& error);
  [[noreturn]] void fail_with(std::string message, Kind kind = Kind::kOwn);
  /// Names ranks as messages call them.
  std::string named(const std::vector<int>& ranks) const;

  const std::shared_ptr<GroupContext> context_;
  const std::vector<int> ranks_;  ///< of this group: their numbers in the context, by rank
  const int rank_;
  const GroupStore store_;
  const std::shared_ptr<FlightRecorder> recorder_;
  StoreExchange exchange_;
  const std::chrono::milliseconds timeout_;
  const std::string name_;
  const int exceptions_at_birth_;
  std::optional<std::string> error_;  ///< once set, every call throws it
  Kind error_kind_ = Kind::kOwn;
  bool was_interrupted_ = false;
  std::deque<std::shared_ptr<PendingCollective>> in_flight_;
  int64_t num_duplicates_ = 0;            ///< and parts
  std::unique_ptr<Transport> transport_;  ///< after what its threads use
  std::mutex watch_mutex_;
  std::string peer_failure_;  ///< why watch_peers() has aborted; guarded by watch_mutex_
  std::jthread watch_;        ///< last: uses all of this
};

}  // namespace tessera::comm
