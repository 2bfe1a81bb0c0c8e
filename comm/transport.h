// Transport: what each collective becomes, in c10d's terms. C10dCommunicator (c10d.h) does everything else.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/group_store.h"

namespace tessera::comm {

using C10dWork = c10::intrusive_ptr<c10d::Work>;
/// Called with the backend's words and the collective's tag when it fails, maybe on a thread of the
/// backend's. Must not throw.
using FailureHook = std::function<void(const std::string& cause, uint32_t tag)>;

/// A collective under way.
struct Issued {
  Issued(std::vector<C10dWork> works, std::function<void()> rest = {})
      : parts(std::move(works)), finish(std::move(rest)) {}  // NOLINT: implicit

  std::vector<C10dWork> parts;   ///< all must finish
  std::function<void()> finish;  ///< what is left to do then, by whoever waits; may be unset
};

/// One process group of one backend.
/// Owns its connections; used by one thread at a time, but for abort().
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  /// True when a work's wait() blocks until the result is there (CPU); false when it only orders streams.
  virtual bool wait_blocks() const = 0;
  /// c10d works a collective may consist of are issued under consecutive tags from `tag` on.
  virtual Issued all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) = 0;
  virtual Issued reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) = 0;
  virtual Issued all_reduce(const at::Tensor& full, double scale, uint32_t tag) = 0;
  /// Collective. See Communicator; undefined: no such memory.
  virtual at::Tensor allocate_symmetric(int64_t) { return {}; }
  virtual at::Tensor allocate_shared(int64_t) { return {}; }
  /// Local. See Communicator.
  virtual at::Tensor peer_view(const at::Tensor&, int) { return {}; }
  virtual bool buffers_reductions() const { return false; }
  virtual Issued broadcast(const at::Tensor& buffer, int root, uint32_t tag) = 0;
  virtual Issued barrier(uint32_t tag) = 0;
  /// Makes everything pending fail, here and, by closing the connections, on the other ranks. Never throws.
  virtual void abort() = 0;
  /// Collective. A group of its own over the same ranks, which meet under `store`.
  virtual std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) = 0;
};

/// Local. Elements [begin, begin + numel) of a 1-D contiguous tensor as a tensor of its own, which keeps
/// `buffer` alive. No operator is dispatched and the storage is another one: whoever listens to operators on
/// the model's storages (zero/residency) does not hear of communication.
at::Tensor plain_view(const at::Tensor& buffer, int64_t begin, int64_t numel);
/// Local. The same of all of it, as bytes.
at::Tensor plain_bytes(const at::Tensor& buffer);
/// Local. The same of a buffer that its owner lets go (buffer->reset()) when the work on it is
/// done, whoever holds the view for longer.
at::Tensor plain_bytes(std::shared_ptr<at::Tensor> buffer);

/// Local. For Issued::finish of a backend that only adds up: takes `sum` to where
/// it is wanted; unset when it is there.
std::function<void()> taking_sum(const at::Tensor& sum, const ReduceInto& into);

}  // namespace tessera::comm
