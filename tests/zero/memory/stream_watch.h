// StreamWatch: the streams of a CUDA rank, without a device. Everything is carried out in the host's order;
// what is recorded is in which order a device would have to carry it out. Two accesses to one memory, at
// least one of which writes, must be ordered by what the device is told: the order within a stream, events,
// and what the host has waited for. So a missing edge is found whatever the timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/comm/memory/host_only_transfer.h"
#include "tests/support/forwarding_communicator.h"

namespace tessera::zero::testing {

/// What is known to come before: of each stream, up to which access.
using Clock = std::map<std::string, int64_t>;

/// Of one rank. Thread-safe.
class StreamWatch {
 public:
  enum class Access { kRead, kWrite };
  /// Edges that are left out, to see that they are missed.
  enum class Edge {
    kNone,
    kIssue,   ///< a collective comes after what the stream that it is issued on was given
    kWait,    ///< what a stream is given after the wait comes after the collective
    kFollow,  ///< the same of a copy
    kAfter,   ///< a copy, or what issue_after() issues, comes after the event it is given
  };
  explicit StreamWatch(Edge dropped = Edge::kNone) : dropped_(dropped) {}

  /// "compute", unless the calling thread is in a StreamScope.
  static std::string current_stream();

  /// The memory is accessed by what is now given to the stream.
  void note(const std::string& stream, const at::Tensor& tensor, Access access, const std::string& who);
  /// All that the stream has been given so far.
  Clock event(const std::string& stream);
  /// What the stream is given from now on comes after the event.
  void block(const std::string& stream, const Clock& event, Edge edge);
  /// The host has waited for it: so has what it gives to any stream from now on. How its threads wait for
  /// each other is not seen: what one has waited for counts for all.
  void synchronize(const Clock& event);

  /// Pairs of accesses that nothing orders, each once.
  std::set<std::string> violations() const;
  /// How many accesses have been compared with others: for tests of the test.
  int64_t num_noted() const;

 private:
  struct Range {
    std::string stream;
    Access access;
    uintptr_t begin, end;
    auto operator<=>(const Range&) const = default;
  };
  struct Last {
    int64_t number;
    std::string who;
  };

  const Edge dropped_;
  mutable std::mutex mutex_;
  std::map<std::string, Clock> streams_;
  Clock host_;
  std::map<Range, Last> accesses_;  // the last of its kind
  std::set<std::string> violations_;
  int64_t num_noted_ = 0;
};

/// The calling thread's current stream.
class StreamScope {
 public:
  explicit StreamScope(std::string name);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;

 private:
  std::string outer_;
};

/// While one lives, every operator of this thread is an access by its current stream: the model's, and the
/// engine's own.
class WatchOperators {
 public:
  explicit WatchOperators(StreamWatch& watch);
  ~WatchOperators();
  WatchOperators(const WatchOperators&) = delete;
};

/// A group as NCCL over c10d has it (comm/nccl/nccl.cc: [Note: streams]): a stream of its own, no memory that
/// ranks share, and waits that only order streams. `inner` moves the bytes. `done`: what Work::test() says.
class StreamedCommunicator final : public tessera::testing::ForwardingCommunicator {
 public:
  StreamedCommunicator(comm::CommunicatorPtr inner, std::shared_ptr<StreamWatch> watch, bool done,
                       std::string stream = "nccl")
      : ForwardingCommunicator(std::move(inner)),
        watch_(std::move(watch)),
        done_(done),
        stream_(std::move(stream)) {}

  bool wait_blocks() const override { return false; }
  bool buffers_reductions() const override { return false; }
  at::Tensor allocate_symmetric(int64_t bytes, at::Device device, std::string_view label) override;
  at::Tensor allocate_shared(int64_t, std::string_view) override { return {}; }
  at::Tensor peer_view(const at::Tensor&, int) override { return {}; }
  comm::HostRank host_rank() const override { return {}; }
  comm::CommunicatorPtr duplicate(std::string_view name) override;
  comm::CommunicatorPtr split(const std::vector<int>& ranks, std::string_view name) override;

 protected:
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                              std::string_view label) override;
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override;
  comm::WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override;
  comm::WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override;

 private:
  class StreamedWork;
  std::string begin(const char* operation, std::string_view label);
  comm::WorkPtr work(comm::WorkPtr inner, std::function<void()> finish = {});

  const std::shared_ptr<StreamWatch> watch_;
  const bool done_;
  const std::string stream_;
};

/// The streams of a CudaHostTransfer. A HostOnlyTransfer carries the copies out, at once.
class StreamedTransfer final : public comm::HostTransfer {
 public:
  explicit StreamedTransfer(std::shared_ptr<StreamWatch> watch) : watch_(std::move(watch)) {}

  at::Tensor host_memory(int64_t bytes) override;
  int64_t pinned_bytes() const override { return inner_.pinned_bytes(); }
  comm::EventPtr record() override;
  comm::EventPtr d2h(const at::Tensor& host, const at::Tensor& device, const comm::EventPtr& after) override;
  comm::EventPtr h2d(const at::Tensor& device, const at::Tensor& host, const comm::EventPtr& after) override;
  void wait(const comm::EventPtr& event) override;
  comm::EventPtr issue_after(const comm::EventPtr& event, c10::function_ref<void()> issue) override;
  bool query(const comm::EventPtr&) override { return true; }
  void synchronize(const comm::EventPtr& event) override;
  void synchronize() override;

 private:
  class ClockEvent;
  comm::EventPtr copy(const char* stream, const at::Tensor& to, const at::Tensor& from,
                      const comm::EventPtr& after);

  const std::shared_ptr<StreamWatch> watch_;
  comm::testing::HostOnlyTransfer inner_{comm::testing::HostOnlyTransfer::Mode::kAtOnce};
};

}  // namespace tessera::zero::testing
