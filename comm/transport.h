// Transport: what each collective becomes, in c10d's terms. C10dCommunicator (c10d.h) does everything else.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/group_store.h"

namespace tessera::comm {

using C10dWork = c10::intrusive_ptr<c10d::Work>;
/// Called with the backend's words and the collective's tag when it fails, maybe on a thread of the
/// backend's. Must not throw.
using FailureHook = std::function<void(const std::string& cause, uint32_t tag)>;

/// One process group of one backend. Collectives return the c10d works that make them up; all must finish.
/// Owns its connections; used by one thread at a time, but for abort().
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  /// True when a work's wait() blocks until the result is there (CPU); false when it only orders streams.
  virtual bool wait_blocks() const = 0;
  /// c10d works a collective may consist of are issued under consecutive tags from `tag` on.
  virtual std::vector<C10dWork> all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) = 0;
  /// The sum of slice rank() goes to that slice, or, where reduces_into(), to `into`.
  virtual std::vector<C10dWork> reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) = 0;
  virtual std::vector<C10dWork> all_reduce(const at::Tensor& full, double scale, uint32_t tag) = 0;
  /// True when reductions write, scale and add what they are told to; else they only sum, in place.
  virtual bool reduces_into() const { return false; }
  /// Collective. See Communicator; undefined: no such memory.
  virtual at::Tensor allocate_symmetric(int64_t) { return {}; }
  virtual at::Tensor allocate_shared(int64_t) { return {}; }
  /// Local. See Communicator.
  virtual at::Tensor peer_view(const at::Tensor&, int) { return {}; }
  virtual std::vector<C10dWork> broadcast(const at::Tensor& buffer, int root, uint32_t tag) = 0;
  virtual std::vector<C10dWork> barrier(uint32_t tag) = 0;
  /// Makes everything pending fail, here and, by closing the connections, on the other ranks. Never throws.
  virtual void abort() = 0;
  /// Collective. A group of its own over the same ranks, which meet under `store`.
  virtual std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) = 0;
};

/// Local. Elements [begin, begin + numel) of a 1-D contiguous tensor as a tensor of its own, which keeps
/// `buffer` alive. No operator is dispatched and the storage is another one: whoever listens to operators on
/// the model's storages (zero/residency) does not hear of communication.
at::Tensor plain_view(const at::Tensor& buffer, int64_t begin, int64_t numel);

}  // namespace tessera::comm
