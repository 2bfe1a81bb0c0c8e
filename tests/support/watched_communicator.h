// A communicator that counts what is asked of it, and of every group made from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/forwarding_communicator.h"

namespace tessera::testing {

/// How often each collective was issued on this rank, and the bytes of the buffers given to it.
struct CollectiveCounts {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;
  int64_t broadcasts = 0;
  int64_t barriers = 0;
  int64_t bytes = 0;
};

/// Used by the rank's own thread. Calls that the communicator refuses do not count.
class WatchedCommunicator : public ForwardingCommunicator {
 public:
  explicit WatchedCommunicator(comm::CommunicatorPtr inner, std::string name = "main")
      : ForwardingCommunicator(std::move(inner)), name_(std::move(name)) {}

  using Communicator::exchange;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout) override {
    ++num_exchanges_;
    return ForwardingCommunicator::exchange(value, label, timeout);
  }
  comm::CommunicatorPtr duplicate(std::string_view name) override {
    duplicates_.push_back(
        std::make_shared<WatchedCommunicator>(ForwardingCommunicator::duplicate(name), std::string(name)));
    return duplicates_.back();
  }

  comm::CommunicatorPtr split(const std::vector<int>& ranks, std::string_view name) override {
    duplicates_.push_back(
        std::make_shared<WatchedCommunicator>(ForwardingCommunicator::split(ranks, name), std::string(name)));
    return duplicates_.back();
  }

  const CollectiveCounts& counts() const { return counts_; }
  /// The duplicate, or part, of that name. Throws std::logic_error if there is none.
  const WatchedCommunicator& named(const std::string& name) const {
    for (const auto& duplicate : duplicates_)
      if (duplicate->name_ == name) return *duplicate;
    throw std::logic_error("no group was made as " + name);
  }
  /// Of this group and those made from it.
  CollectiveCounts all_counts() const {
    CollectiveCounts sum = counts_;
    for (const auto& duplicate : duplicates_) {
      const CollectiveCounts theirs = duplicate->all_counts();
      sum.all_gathers += theirs.all_gathers;
      sum.reduce_scatters += theirs.reduce_scatters;
      sum.all_reduces += theirs.all_reduces;
      sum.broadcasts += theirs.broadcasts;
      sum.barriers += theirs.barriers;
      sum.bytes += theirs.bytes;
    }
    return sum;
  }
  /// Exchanges over the store, of this group and those made from it.
  int num_exchanges() const {
    int sum = num_exchanges_;
    for (const auto& duplicate : duplicates_) sum += duplicate->num_exchanges();
    return sum;
  }
  void barrier(std::string_view label) override {
    ++counts_.barriers;
    ForwardingCommunicator::barrier(label);
  }

 protected:
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                              std::string_view label) override {
    count(counts_.all_gathers, full);
    return ForwardingCommunicator::do_all_gather(full, shard, label);
  }
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    count(counts_.reduce_scatters, full);
    return ForwardingCommunicator::do_reduce_scatter(full, into, label);
  }
  comm::WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override {
    count(counts_.all_reduces, full);
    return ForwardingCommunicator::do_all_reduce(full, scale, label);
  }
  comm::WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override {
    count(counts_.broadcasts, buffer);
    return ForwardingCommunicator::do_broadcast(buffer, root, label);
  }

 private:
  void count(int64_t& calls, const at::Tensor& buffer) {
    ++calls;
    counts_.bytes += static_cast<int64_t>(buffer.nbytes());
  }

  CollectiveCounts counts_;
  std::string name_;
  int num_exchanges_ = 0;
  std::vector<std::shared_ptr<WatchedCommunicator>> duplicates_;
};

}  // namespace tessera::testing
