// A communicator that notes what is asked of it, and of every group duplicated from it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera::testing {

/// Forwards to `inner`. Its counts(), and those of its duplicates, are what the engine asked for.
class WatchedCommunicator : public comm::Communicator {
 public:
  explicit WatchedCommunicator(comm::CommunicatorPtr inner, std::string name = "main")
      : inner_(std::move(inner)), name_(std::move(name)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view backend() const override { return inner_->backend(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  using Communicator::exchange;
  std::vector<std::string> exchange(const std::string& value, std::string_view label, std::chrono::milliseconds timeout) override {
    ++num_exchanges_;
    return inner_->exchange(value, label, timeout);
  }
  comm::CommunicatorPtr duplicate(std::string_view name) override {
    duplicates_.push_back(std::make_shared<WatchedCommunicator>(inner_->duplicate(name), std::string(name)));
    return duplicates_.back();
  }

  /// The duplicate of that name; there must be one.
  const WatchedCommunicator& named(const std::string& name) const {
    for (const auto& duplicate : duplicates_)
      if (duplicate->name_ == name) return *duplicate;
    throw std::logic_error("no group was duplicated as " + name);
  }
  /// Exchanges over the store, of this group and its duplicates.
  int num_exchanges() const {
    int sum = num_exchanges_;
    for (const auto& duplicate : duplicates_) sum += duplicate->num_exchanges();
    return sum;
  }

 protected:
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) override {
    return inner_->all_gather(full, shard, label);
  }
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, std::string_view label) override {
    return inner_->reduce_scatter(full, label);
  }
  comm::WorkPtr do_all_reduce(const at::Tensor& full, std::string_view label) override { return inner_->all_reduce(full, label); }
  comm::WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) override {
    return inner_->broadcast(buffer, root, label);
  }
  void do_barrier(std::string_view label) override { inner_->barrier(label); }

 private:
  comm::CommunicatorPtr inner_;
  std::string name_;
  int num_exchanges_ = 0;
  std::vector<std::shared_ptr<WatchedCommunicator>> duplicates_;
};

}  // namespace tessera::testing
