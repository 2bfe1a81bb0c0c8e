// Transport: moves the bytes of one group's collectives, over Gloo, NCCL, shared memory, or the last within
// hosts and Gloo between them.
// TransportCommunicator (transport_communicator.h) numbers the collectives, keeps their buffers alive and
// explains failures.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/control/group_store.h"

namespace tessera::comm {

/// Tells whether an operation that a transport has begun has ended. One thread at a time.
class Pending {
 public:
  virtual ~Pending() = default;
  /// True once wait() would not block. Throws when the operation has failed.
  virtual bool poll() = 0;
  /// CPU: blocks until the result is there; false when it is not after `limit`. CUDA: makes the
  /// current stream wait for the operation and returns true; may block as on the CPU (staged). Throws when
  /// the operation has failed.
  virtual bool wait(std::chrono::milliseconds limit) = 0;
};
using PendingPtr = std::unique_ptr<Pending>;

/// Asks a function whether the operation has ended, after at most so long. Asks no more once it has.
class PendingCall final : public Pending {
 public:
  using HasEnded = std::function<bool(std::chrono::milliseconds limit)>;
  explicit PendingCall(HasEnded has_ended) : has_ended_(std::move(has_ended)) {}
  bool poll() override { return wait(std::chrono::milliseconds(0)); }
  bool wait(std::chrono::milliseconds limit) override { return ended_ = ended_ || has_ended_(limit); }

 private:
  const HasEnded has_ended_;
  bool ended_ = false;
};

/// Called with the backend's message and the collective's tag when it fails, maybe on a thread of the
/// backend. Must not throw.
using FailureHook = std::function<void(const std::string& cause, uint32_t tag)>;

/// Carries the collectives of one group over one backend. Owns its connections. One thread at a time, except
/// abort().
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  /// True when Pending::wait() blocks until the result is there (CPU); false when callers may only rely on
  /// the order of streams (CUDA).
  virtual bool wait_blocks() const = 0;
  virtual bool buffers_reductions() const { return false; }
  /// Whether the destructor waits for what is in flight.
  virtual bool waits_at_end() const { return false; }

  // Collective. `tag` is the same on all ranks; the next collective's is higher by at least the number of
  // ranks, so one collective may send under several consecutive tags.
  virtual PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) = 0;
  virtual PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) = 0;
  virtual PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) = 0;
  virtual PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t tag) = 0;
  virtual PendingPtr barrier(uint32_t tag) = 0;

  /// Collective. See Communicator::allocate_symmetric(), and allocate_shared() where it is `common`.
  /// Undefined: no such memory.
  virtual at::Tensor allocate(int64_t /*bytes*/, bool /*common*/) { return {}; }
  /// See Communicator.
  virtual HostRank host_rank() const { return {}; }
  virtual int64_t bytes_from_other_hosts() const { return 0; }
  /// `watch` is called about ten times a second while one of the calls above itself waits for other
  /// ranks, if it ever does, and ends the wait by what it throws.
  virtual void set_watch(std::function<void()>) {}

  /// See Communicator.
  virtual at::Tensor peer_view(const at::Tensor&, int) { return {}; }

  /// Makes everything pending fail, here and, by closing the connections, on the other ranks. Never throws.
  virtual void abort() = 0;
  /// Collective. An independent group over the same ranks, which find each other through `store`.
  virtual std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) = 0;
  /// Collective over `ranks`, at least two of this group's, ascending, this one among them. An independent
  /// group of them, which find each other through `store`.
  virtual std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                           FailureHook on_failure) = 0;
};

/// The place of `rank` in `ranks`, which has it.
int place_of(const std::vector<int>& ranks, int rank);
/// What `numbers` has at these places.
std::vector<int> chosen_from(const std::vector<int>& numbers, const std::vector<int>& places);

/// Elements [begin, begin + numel) of a 1-D contiguous tensor, which is kept alive. Made without an
/// operator and with a storage of its own, so that those who listen to operators on the model's storages
/// (zero/gather/residency) do not see communication.
at::Tensor plain_view(const at::Tensor& buffer, int64_t begin, int64_t numel);
/// The same of (numel) elements at `data`, which `owner` keeps alive.
at::Tensor plain_view_at(void* data, int64_t numel, at::ScalarType dtype, const at::Tensor& owner);
/// The same of the whole buffer, as bytes.
at::Tensor plain_bytes(const at::Tensor& buffer);
/// The same of a buffer that its owner frees by buffer->reset() when the operation is done, even if
/// a backend still holds the view.
at::Tensor plain_bytes(std::shared_ptr<at::Tensor> buffer);

}  // namespace tessera::comm
