// StreamTransport: a backend as NCCL is where a rank ends that it does not notice: its wait() only orders a
// stream, and what it has begun never ends, until abort().
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "comm/transport.h"

namespace tessera::comm::testing {

/// Stands for the device's queue.
class Stream {
 public:
  /// Blocks until all that was issued has ended, as cudaStreamSynchronize() does.
  void synchronize() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return has_ended_; });
  }
  void end() {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    ended_.notify_all();
  }
  bool has_ended() {
    const std::lock_guard lock(mutex_);
    return has_ended_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
};

class StreamTransport final : public Transport {
 public:
  explicit StreamTransport(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  std::string_view name() const override { return "stream"; }
  bool wait_blocks() const override { return false; }
  PendingPtr all_gather(const at::Tensor&, const at::Tensor&, uint32_t) override { return issue(); }
  PendingPtr reduce_scatter(const at::Tensor&, const ReduceInto&, uint32_t) override { return issue(); }
  PendingPtr all_reduce(const at::Tensor&, double, uint32_t) override { return issue(); }
  PendingPtr broadcast(const at::Tensor&, int, uint32_t) override { return issue(); }
  PendingPtr barrier(uint32_t) override { return issue(); }
  /// What is in flight ends, without an error: so a communicator of NCCL that was aborted.
  void abort() override { stream_->end(); }
  std::unique_ptr<Transport> duplicate(const GroupStore&, FailureHook) override {
    return std::make_unique<StreamTransport>(stream_);
  }
  std::unique_ptr<Transport> split(const std::vector<int>&, const GroupStore&, FailureHook) override {
    return std::make_unique<StreamTransport>(stream_);
  }

 private:
  class Issued final : public Pending {
   public:
    explicit Issued(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}
    bool poll() override { return stream_->has_ended(); }
    bool wait(std::chrono::milliseconds) override { return true; }

   private:
    const std::shared_ptr<Stream> stream_;
  };

  PendingPtr issue() { return std::make_unique<Issued>(stream_); }

  const std::shared_ptr<Stream> stream_;
};

}  // namespace tessera::comm::testing
