// SelfCommunicator: a group of which only this rank is there. No network, no threads: every result is there
// at once.
//
// Usually the group has one rank. It may also be one rank of many, to measure what that one would hold: every
// buffer has its real size, and this rank's own data stand in for the others'; the results are then
// meaningless.
#pragma once

#include "comm/communicator.h"

namespace tessera::comm {

/// Says which rank of which group this one is.
struct SimulatedGroup {
  int rank = 0;
  int size = 1;
  bool one_host = false;  ///< as if all ranks shared memory (backend "shm"); else as over a network
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  at::Device device = at::kCPU;
};

/// Returns results at once. Owns nothing. All calls are local.
class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(std::chrono::milliseconds timeout)
      : SelfCommunicator(SimulatedGroup{.timeout = timeout}) {}
  explicit SelfCommunicator(const SimulatedGroup& group) : Communicator(group.device), group_(group) {}

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  /// "self"; "simulated shm" or "simulated network" for one of many.
  std::string_view backend() const override;
  std::chrono::milliseconds timeout() const override { return group_.timeout; }
  void barrier(std::string_view /*label*/) override {}
  at::Tensor peer_view(const at::Tensor& mine, int rank) override;
  at::Tensor allocate_shared(int64_t bytes, std::string_view label) override;
  HostRank host_rank() const override {
    return group_.one_host ? HostRank{group_.rank, group_.size} : HostRank{};
  }
  bool buffers_reductions() const override { return group_.size > 1 && !group_.one_host; }
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override;
  std::shared_ptr<Communicator> duplicate(std::string_view name) override;
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, std::string_view name) override;

 protected:
  WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override;
  WorkPtr do_reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label) override;
  WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override;
  WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override;

 private:
  SimulatedGroup group_;
};

/// A Work whose result is already there.
WorkPtr finished_work();

}  // namespace tessera::comm
