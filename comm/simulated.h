// SimulatedCommunicator: one rank of a group whose other ranks don't exist. Nothing moves: every collective is done at once,
// with this rank's own data where the others' would be, and every buffer has its real size. So one process can hold what one
// rank of a thousand would hold, to measure it; what it computes is worth nothing.
#pragma once

#include "comm/communicator.h"

namespace tessera::comm {

struct SimulatedGroup {
  int rank = 0;
  int size = 1;
  bool one_host = false;  ///< as if all ranks shared memory (backend "shm"); else as over a network
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// Owns nothing. All calls are local.
class SimulatedCommunicator final : public Communicator {
 public:
  explicit SimulatedCommunicator(const SimulatedGroup& group) : group_(group) {}

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  std::string_view backend() const override { return group_.one_host ? "simulated shm" : "simulated network"; }
  std::chrono::milliseconds timeout() const override { return group_.timeout; }
  at::Tensor peer_view(const at::Tensor& mine, int rank) override;
  at::Tensor allocate_shared(int64_t bytes, std::string_view label) override;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override;
  std::shared_ptr<Communicator> duplicate(std::string_view name) override;

 protected:
  WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override;
  WorkPtr do_reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label) override;
  WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override;
  WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override;
  void do_barrier(std::string_view label) override;

 private:
  SimulatedGroup group_;
};

}  // namespace tessera::comm
