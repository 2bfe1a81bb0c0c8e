// A communicator that notes what is asked of it, and of every group duplicated from it.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/forwarding_communicator.h"

namespace tessera::testing {

/// Its counts(), and those of its duplicates, are what the engine asked for.
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

 private:
  std::string name_;
  int num_exchanges_ = 0;
  std::vector<std::shared_ptr<WatchedCommunicator>> duplicates_;
};

}  // namespace tessera::testing
