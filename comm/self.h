// SelfCommunicator: the group of one rank. No network, no threads: every result is there at once.
#pragma once

#include "comm/communicator.h"

namespace tessera::comm {

/// Owns nothing. All calls are local.
class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string_view backend() const override { return "self"; }
  std::chrono::milliseconds timeout() const override { return timeout_; }
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
  std::chrono::milliseconds timeout_;
};

/// A Work whose result is already there.
WorkPtr finished_work();

}  // namespace tessera::comm
