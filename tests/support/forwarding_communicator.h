// A communicator that passes everything on to another one. Tests override what they observe or make fail.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace tessera::testing {

/// Forwards every virtual member of Communicator to `inner`. Duplicates are the inner one's, unless
/// duplicate() is overridden too; so are parts, and split().
class ForwardingCommunicator : public comm::Communicator {
 public:
  explicit ForwardingCommunicator(comm::CommunicatorPtr inner)
      : Communicator(inner->device()), inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view backend() const override { return inner_->backend(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  using Communicator::exchange;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override {
    return inner_->exchange(value, label, timeout);
  }
  comm::CommunicatorPtr duplicate(std::string_view name) override { return inner_->duplicate(name); }
  comm::CommunicatorPtr split(const std::vector<int>& ranks, std::string_view name) override {
    return inner_->split(ranks, name);
  }
  int global_rank(int rank) const override { return inner_->global_rank(rank); }
  at::Tensor allocate_symmetric(int64_t bytes, at::Device device, std::string_view label) override {
    return inner_->allocate_symmetric(bytes, device, label);
  }
  at::Tensor peer_view(const at::Tensor& mine, int rank) override { return inner_->peer_view(mine, rank); }
  bool wait_blocks() const override { return inner_->wait_blocks(); }
  bool buffers_reductions() const override { return inner_->buffers_reductions(); }
  at::Tensor allocate_shared(int64_t bytes, std::string_view label) override {
    return inner_->allocate_shared(bytes, label);
  }
  comm::HostRank host_rank() const override { return inner_->host_rank(); }
  int64_t bytes_from_other_hosts() const override { return inner_->bytes_from_other_hosts(); }

 protected:
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                              std::string_view label) override {
    return inner_->all_gather(full, shard, label);
  }
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    return inner_->reduce_scatter(full, into, label);
  }
  comm::WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override {
    return inner_->all_reduce(full, label, scale);
  }
  comm::WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override {
    return inner_->broadcast(buffer, root, label);
  }
  void do_barrier(std::string_view label) override { inner_->barrier(label); }

 private:
  comm::CommunicatorPtr inner_;
};

}  // namespace tessera::testing
