// HostOnlyTransfer: a device that is host memory. What its stream is given is carried out at once, by the
// thread that gives it; copies are carried out when the Mode says so, in the order that a device guarantees,
// and no other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/memory/host_transfer.h"

namespace tessera::comm::testing {

/// Thread-safe. Records every copy, and what breaks the rules of [Note: host transfers] in
/// comm/memory/host_transfer.h: memory that another copy still has is copied to or from, and memory that
/// changes while a copy reads it.
class HostOnlyTransfer final : public HostTransfer {
 public:
  enum class Mode {
    kAtOnce,    ///< before the call that begins the copy returns
    kLast,      ///< when something waits for it, or for one behind it
    kOnThreads  ///< on a thread for each direction, a little later
  };
  enum class Direction { kDown, kUp };
  struct Copy {
    Direction direction;
    int64_t bytes;
    const void* device;
    const void* host;
  };

  explicit HostOnlyTransfer(Mode mode);
  ~HostOnlyTransfer() override;

  at::Tensor host_memory(int64_t bytes) override;
  int64_t pinned_bytes() const override { return *host_bytes_; }
  EventPtr record() override { return nullptr; }
  EventPtr d2h(const at::Tensor& host, const at::Tensor& device, const EventPtr& after) override;
  EventPtr h2d(const at::Tensor& device, const at::Tensor& host, const EventPtr& after) override;
  void wait(const EventPtr& event) override;
  EventPtr issue_after(const EventPtr& event, c10::function_ref<void()> issue) override;
  bool query(const EventPtr& event) override;
  void synchronize(const EventPtr& event) override;
  void synchronize() override;

  /// In the order in which they were begun.
  std::vector<Copy> copies() const;
  void forget_copies();
  int64_t bytes(Direction direction) const;
  std::vector<std::string> violations() const;
  /// host_memory() throws Error.
  void refuse_memory() { refuses_memory_ = true; }
  /// The n-th copy that begins from now on fails: it, and what waits for it, throw Error.
  void fail_at(int copy);

 private:
  struct Pending {
    at::Tensor to, from;
    EventPtr after;
    uint64_t digest;              // of `from` when it began
    std::vector<char> read = {};  // what was in `from`, once the device goes on after the copy
  };
  struct Stream {
    std::deque<Pending> pending;
    int64_t num_begun = 0, num_ended = 0;
  };
  class HostEvent;
  using Lock = std::unique_lock<std::mutex>;

  EventPtr begin(Direction direction, const at::Tensor& to, const at::Tensor& from, const EventPtr& after);
  Stream& stream(Direction direction) { return direction == Direction::kDown ? down_ : up_; }
  bool passed_now(const EventPtr& event);
  void carry_out_until(const EventPtr& event, Lock& lock);
  void carry_out_next(Direction direction, Lock& lock);
  void check_free(Direction direction, const at::Tensor& to, const at::Tensor& from, const EventPtr& after);
  void check_unchanged(Direction direction, const Pending& copy);
  void read_until(const HostEvent& event, Lock& lock);
  void run(Direction direction);

  const Mode mode_;
  std::atomic<bool> refuses_memory_ = false;
  const std::shared_ptr<std::atomic<int64_t>> host_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Stream down_, up_;
  std::vector<Copy> copies_;
  std::vector<std::string> violations_;
  int fails_in_ = -1;  // copies
  bool failed_ = false, stops_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tessera::comm::testing
