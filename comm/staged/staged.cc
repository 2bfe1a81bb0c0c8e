#include "comm/staged/staged.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/memory/host_thread.h"
#include "core/error.h"
#include "core/memory/memory_use.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// Owns the transport of CPU tensors, which only the group's thread uses, except abort() and what is
/// constant.
class StagedTransport final : public Transport {
 public:
  StagedTransport(std::unique_ptr<Transport> host, int rank, at::Device device,
                  std::shared_ptr<HostTransfer> transfer, FailureHook on_failure)
      : rank_(rank),
        device_(device),
        transfer_(std::move(transfer)),
        on_failure_(std::move(on_failure)),
        host_(std::move(host)),
        thread_(std::make_shared<HostThread>(device_)) {
    host_->set_watch([this] { check_here(); });
  }
  StagedTransport(const StagedTransport&) = delete;
  StagedTransport& operator=(const StagedTransport&) = delete;
  /// Pendings, which share the thread, may be destroyed later.
  ~StagedTransport() override { thread_->stop(); }

  std::string_view name() const override { return "staged"; }
  /// The group's thread has copied the result by then: see [Note: staged collectives].
  bool wait_blocks() const override { return true; }
  bool waits_at_end() const override { return !aborted_; }
  int64_t bytes_from_other_hosts() const override { return host_->bytes_from_other_hosts(); }

  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    return issue(tag, [=, this, to = plain_bytes(full), from = plain_bytes(shard)](const EventPtr& issued) {
      const at::Tensor staged = buffer(to.numel());
      const at::Tensor mine = plain_view(staged, rank_ * from.numel(), from.numel());
      copy_down(mine, from, issued);
      run(*host_->all_gather(staged, mine, tag));
      copy_up(to, staged, issued);
    });
  }

  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return issue(tag, [=, this, from = plain_bytes(full),
                       to = plain_bytes(into.shard)](const EventPtr& issued) {
      const int64_t begin = (from.numel() + kAlignment - 1) / kAlignment * kAlignment;
      const at::Tensor both = buffer(begin + to.numel());
      const at::Tensor staged = plain_view(both, 0, from.numel()),
                       shard = plain_view(both, begin, to.numel());
      copy_down(staged, from, issued);
      if (into.add) copy_down(shard, to, issued);
      run(*host_->reduce_scatter(typed(staged, full), {typed(shard, into.shard), into.scale, into.add}, tag));
      copy_up(to, shard, issued);
    });
  }

  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    return issue(tag, [=, this, both = plain_bytes(full)](const EventPtr& issued) {
      const at::Tensor staged = buffer(both.numel());
      copy_down(staged, both, issued);
      run(*host_->all_reduce(typed(staged, full), scale, tag));
      copy_up(both, staged, issued);
    });
  }

  PendingPtr broadcast(const at::Tensor& given, int root, uint32_t tag) override {
    return issue(tag, [=, this, bytes = plain_bytes(given)](const EventPtr& issued) {
      const at::Tensor staged = buffer(bytes.numel());
      if (root == rank_) copy_down(staged, bytes, issued);
      run(*host_->broadcast(staged, root, tag));
      if (root != rank_) copy_up(bytes, staged, issued);
    });
  }

  PendingPtr barrier(uint32_t tag) override {
    return issue(tag, [=, this](const EventPtr&) { run(*host_->barrier(tag)); });
  }

  void abort() override {
    aborted_ = true;
    host_->abort();
  }

  std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) override {
    return staged_over(rank_, on_failure, [&] { return host_->duplicate(store, on_failure); });
  }

  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook on_failure) override {
    return staged_over(place_of(ranks, rank_), on_failure,
                       [&] { return host_->split(ranks, store, on_failure); });
  }

 private:
  static constexpr int64_t kAlignment = 64;

  /// `body` runs on the thread. It gets the point of the stream that is current now; the device's buffers, of
  /// bytes, may be read and written after it.
  template <class Body>
  PendingPtr issue(uint32_t tag, Body body) {
    const auto task = [this, tag, body = std::move(body), issued = transfer_->record(),
                       debug_info = c10::ThreadLocalDebugInfo::current()] {
      const c10::DebugInfoGuard as_the_issuer(debug_info);  // the memory meter counts by it
      try {
        check_here();
        body(issued);
      } catch (const std::exception& error) {
        if (on_failure_ && !aborted_) on_failure_(error_message(error), tag);
        throw;
      }
    };
    return std::make_unique<PendingCall>([thread = thread_, number = thread_->post(task)](
                                             milliseconds limit) { return thread->wait_for(number, limit); });
  }

  /// The thread makes it, behind what is in flight.
  template <class Make>
  std::unique_ptr<Transport> staged_over(int rank, const FailureHook& on_failure, const Make& make) {
    std::unique_ptr<Transport> host;
    thread_->wait(thread_->post([&] { host = make(); }));
    return std::make_unique<StagedTransport>(std::move(host), rank, device_, transfer_, on_failure);
  }

  // What the thread calls.

  void check_here() const {
    if (aborted_) throw CommError("this rank has left the group");
  }

  void run(Pending& collective) const {
    while (!collective.wait(milliseconds(100))) check_here();
  }

  /// (bytes) uint8
  at::Tensor buffer(int64_t bytes) {
    if (!memory_.defined() || static_cast<int64_t>(memory_.nbytes()) < bytes) {
      const MemoryFor use(MemoryUse::kCommunication);
      const at::DisableRecordFunctionGuard our_own_operators;
      memory_.reset();
      memory_ = transfer_->host_memory(bytes);
    }
    return plain_view(memory_, 0, bytes);
  }

  static at::Tensor typed(const at::Tensor& bytes, const at::Tensor& like) {
    return plain_view_at(bytes.data_ptr(), like.numel(), like.scalar_type(), bytes);
  }

  void copy_down(const at::Tensor& host, const at::Tensor& device, const EventPtr& issued) const {
    transfer_->synchronize(transfer_->d2h(host, device, issued));
  }

  /// The host waits for it: whatever any stream is given from then on comes after it.
  void copy_up(const at::Tensor& device, const at::Tensor& host, const EventPtr& issued) const {
    transfer_->synchronize(transfer_->h2d(device, host, issued));
  }

  const int rank_;
  const at::Device device_;
  const std::shared_ptr<HostTransfer> transfer_;
  const FailureHook on_failure_;
  std::atomic<bool> aborted_ = false;
  const std::unique_ptr<Transport> host_;
  at::Tensor memory_;  // the thread's
  const std::shared_ptr<HostThread> thread_;
};

}  // namespace

std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> host, int rank, at::Device device,
                                                 std::shared_ptr<HostTransfer> transfer,
                                                 FailureHook on_failure) {
  return std::make_unique<StagedTransport>(std::move(host), rank, device, std::move(transfer),
                                           std::move(on_failure));
}

}  // namespace tessera::comm
