// LabelledCommunicator: another user of a group's collectives, whose labels say which one it is.
//
// Several engines may use one group. Units and buffers of two models have the same names and sizes, so a rank
// that is in a call of its first engine while another is in the same call of its second would exchange with
// it. Ranks compare labels: with the user's number in each the difference is an error.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

/// Calls another communicator, with `suffix` behind each label. Owns a share of it, and nothing else. Tests
/// derive theirs from it.
class LabelledCommunicator : public Communicator {
 public:
  LabelledCommunicator(CommunicatorPtr group, std::string suffix);

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  int global_rank(int rank) const override { return group_->global_rank(rank); }
  std::string_view backend() const override { return group_->backend(); }
  std::chrono::milliseconds timeout() const override { return group_->timeout(); }
  bool wait_blocks() const override { return group_->wait_blocks(); }
  bool buffers_reductions() const override { return group_->buffers_reductions(); }
  HostRank host_rank() const override { return group_->host_rank(); }
  int64_t bytes_from_other_hosts() const override { return group_->bytes_from_other_hosts(); }
  at::Tensor peer_view(const at::Tensor& mine, int rank) override { return group_->peer_view(mine, rank); }

  void barrier(std::string_view label) override;
  at::Tensor allocate_symmetric(int64_t bytes, at::Device device, std::string_view label) override;
  at::Tensor allocate_shared(int64_t bytes, std::string_view label) override;
  using Communicator::exchange;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override;
  CommunicatorPtr duplicate(std::string_view name) override;
  CommunicatorPtr duplicate_for_exchange(std::string_view name) override;
  CommunicatorPtr split(const std::vector<int>& ranks, std::string_view name) override;

 protected:
  WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override;
  WorkPtr do_reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label) override;
  WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override;
  WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override;

 private:
  std::string with_suffix(std::string_view label) const;

  const CommunicatorPtr group_;
  const std::string suffix_;
};

}  // namespace tessera::comm
