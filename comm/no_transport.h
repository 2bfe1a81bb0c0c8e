// NoTransport: of a group that only exchanges small things over the rendezvous store.
#pragma once

#include "comm/transport.h"
#include "core/error.h"

namespace tessera::comm {

/// Collectives throw Error. Owns nothing.
class NoTransport final : public Transport {
 public:
  std::string_view name() const override { return "store"; }
  bool wait_blocks() const override { return true; }
  PendingPtr all_gather(const at::Tensor&, const at::Tensor&, uint32_t) override { refuse(); }
  PendingPtr reduce_scatter(const at::Tensor&, const ReduceInto&, uint32_t) override { refuse(); }
  PendingPtr all_reduce(const at::Tensor&, double, uint32_t) override { refuse(); }
  PendingPtr broadcast(const at::Tensor&, int, uint32_t) override { refuse(); }
  PendingPtr barrier(uint32_t) override { refuse(); }
  void abort() override {}
  std::unique_ptr<Transport> duplicate(const GroupStore&, FailureHook) override {
    return std::make_unique<NoTransport>();
  }
  std::unique_ptr<Transport> split(const std::vector<int>&, const GroupStore&, FailureHook) override {
    return std::make_unique<NoTransport>();
  }

 private:
  [[noreturn]] static void refuse() { throw Error("this group is for exchange() alone"); }
};

}  // namespace tessera::comm
