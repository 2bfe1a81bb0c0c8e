// Communicator: the collectives the engine is built on, for one group of ranks.
//
// Every collective is in place on one flat, contiguous buffer of `size() * shard` elements, which is what a
// unit is (zero/plan/layout.h); so no implementation needs a second buffer of full size, except Gloo's
// reduce_scatter (buffers_reductions()). Calls return at once with a Work (over shared memory, a call with a
// large buffer that is not from allocate_symmetric() or allocate_shared() waits for the other ranks); the
// buffers must stay alive and untouched until wait() returns (on CUDA: until the current stream has passed
// the wait). All ranks must issue the same collectives in the same order, with the same labels: ranks compare
// labels, sizes and types when they disagree.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/error.h"

namespace tessera::comm {

/// Says that ranks have issued different collectives, or wait for each other on different groups. The ranks
/// that find it out throw it.
class RanksDiffer : public CommError {
 public:
  using CommError::CommError;
};

/// Tells whether a collective in flight has ended, and waits for it. Not thread-safe. Dropping it waits for
/// nothing.
class Work {
 public:
  virtual ~Work() = default;
  /// True once wait() would not block (CPU), or the operation has left the device's queue (CUDA). Also
  /// true once it has failed, so that a caller who polls goes on to wait(), which throws.
  virtual bool test() = 0;
  /// Blocks until the result is there (CPU), or makes the current stream wait for it (CUDA). Throws
  /// CommError naming the collective, its label, and the ranks that have not arrived, after the
  /// communicator's timeout or when a peer is gone.
  virtual void wait() = 0;
};
using WorkPtr = std::shared_ptr<Work>;

/// Says where a reduce-scatter leaves its result, and how: shard = scale * sum [+ shard].
struct ReduceInto {
  at::Tensor shard;  ///< (n) elements; fp32, bf16 or fp16 of a sum of any of these, else of the sum's dtype.
                     ///< With `add`, no part of the buffer
  double scale = 1;  ///< for floating point
  bool add = false;
};

/// Names a rank among those that have the memory of Communicator::allocate_shared() in common.
struct HostRank {
  int index = 0;      ///< 0 … num_ranks - 1, in rank order
  int num_ranks = 1;  ///< this one included
};

/// What exchange() can send as bytes.
template <class T>
concept Exchangeable = std::is_trivially_copyable_v<T> && !std::is_array_v<T> && !std::is_pointer_v<T> &&
                       !std::is_convertible_v<T, std::string_view>;

/// Runs collectives with the other ranks of a group. One thread at a time issues collectives on it. Buffers
/// are 1-D and contiguous, of a type that has a DType (core/dtype.h); anything else is a std::logic_error.
/// After a CommError every later call throws the same error.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "gloo", "nccl", "shm", "hybrid", "staged" …
  virtual std::string_view backend() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  /// Where its buffers lie.
  at::Device device() const { return device_; }

  /// Collective. `full`: (size() * n) elements, `shard`: (n) elements of the same dtype; afterwards slice r
  /// of `full` is rank r's `shard`. `shard` may be slice rank() of `full` itself. `label` names the buffer in
  /// errors; no line breaks.
  WorkPtr all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label);
  /// Collective. `full`: (size() * n) elements; the sum over ranks of slice rank() goes to `into`, whose
  /// shard may be that slice itself. The other slices are unspecified afterwards.
  WorkPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label);
  /// The same, into slice rank() of `full`.
  WorkPtr reduce_scatter(const at::Tensor& full, std::string_view label);
  /// Collective. `full` becomes scale * the sum over ranks (scale: for floating point).
  WorkPtr all_reduce(const at::Tensor& full, std::string_view label, double scale = 1);
  /// Collective. `buffer` becomes rank `root`'s.
  WorkPtr broadcast(const at::Tensor& buffer, int root, std::string_view label);
  /// Collective. Returns when every rank has called it.
  virtual void barrier(std::string_view label) = 0;

  /// Collective. (bytes) uint8, for buffers that are often given to collectives: where ranks share memory,
  /// the others on this host read them in place, and it lasts as long as this group does; elsewhere any
  /// memory. Not initialised. Throws CommError when there is no room.
  virtual at::Tensor allocate_symmetric(int64_t bytes, at::Device device, std::string_view label);
  /// The same part of rank `rank`'s buffer as `mine` is of this rank's, where `mine` lies in memory
  /// from allocate_symmetric(): for reading. Undefined where not all ranks see each other's memory.
  virtual at::Tensor peer_view(const at::Tensor& mine, int rank);

  /// Whether Work::wait() blocks the thread until the result is there. False (CUDA): it makes the current
  /// stream wait; a caller must not rely on more. All groups then have one order of collectives.
  virtual bool wait_blocks() const { return true; }

  /// Whether a reduce_scatter in flight takes memory of its buffer's size: a caller that issues many
  /// should then wait for some.
  virtual bool buffers_reductions() const { return false; }
  /// Collective. (bytes) uint8 zeros: one memory a host, which all its ranks have mapped and may read and
  /// write. An all-gather into it moves nothing within the host. Undefined where ranks share no memory.
  /// Throws CommError when there is no room.
  virtual at::Tensor allocate_shared(int64_t bytes, std::string_view label);
  /// This rank among those of its host, which have allocate_shared()'s memory in common.
  virtual HostRank host_rank() const { return {}; }
  /// Bytes of this group's collectives that this rank has received from other hosts. Counted by
  /// backend "hybrid"; 0 elsewhere.
  virtual int64_t bytes_from_other_hosts() const { return 0; }

  /// Collective, over the rendezvous store rather than the network backend: every rank gives a value and
  /// receives all ranks' values, in rank order. For small things, such as agreement on plans and error
  /// reports. Throws CommError naming the ranks that did not answer within `timeout`.
  virtual std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                            std::chrono::milliseconds timeout) = 0;
  std::vector<std::string> exchange(const std::string& value, std::string_view label) {
    return exchange(value, label, timeout());
  }
  /// The same of a number, an enum or a plain struct without pointers. All ranks run the same build.
  template <Exchangeable T>
  std::vector<T> exchange(const T& mine, std::string_view label) {
    std::vector<T> values;
    for (const std::string& bytes :
         exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof(T)), label)) {
      check_exchanged(bytes.size() == sizeof(T), label);
      T value = mine;
      std::memcpy(&value, bytes.data(), sizeof(T));
      values.push_back(value);
    }
    return values;
  }
  /// The same of several; ranks may give different numbers of them.
  template <Exchangeable T>
    requires(!std::is_same_v<T, bool>)
  std::vector<std::vector<T>> exchange(const std::vector<T>& mine, std::string_view label) {
    std::vector<std::vector<T>> values;
    const std::string sent(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(T));
    for (const std::string& bytes : exchange(sent, label)) {
      check_exchanged(bytes.size() % sizeof(T) == 0, label);
      std::vector<T>& theirs = values.emplace_back(bytes.size() / sizeof(T));
      if (!bytes.empty()) std::memcpy(theirs.data(), bytes.data(), bytes.size());
    }
    return values;
  }

  /// Collective. An independent group over the same ranks, whose collectives need no common order with
  /// this one's (c10d: a process group of its own).
  virtual std::shared_ptr<Communicator> duplicate(std::string_view name) = 0;
  /// Collective. The same for exchange() alone: it needs no connections and no memory of a device, and its
  /// collectives throw Error.
  virtual std::shared_ptr<Communicator> duplicate_for_exchange(std::string_view name) {
    return duplicate(name);
  }
  /// Collective over this group. An independent group of some of its ranks: `ranks`, ascending, this one
  /// among them. Ranks that give the same list form a group, in which a rank's number is its place in the
  /// list. So every rank of a list must give that list. `name` is equal on all ranks of this group.
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& ranks, std::string_view name) = 0;
  /// What messages call `rank` of this group: its number in the group of all ranks (which split()
  /// leaves as it is).
  virtual int global_rank(int rank) const { return rank; }

 protected:
  /// Installs the allocator of CPU tensors (cpu_allocator.h).
  explicit Communicator(at::Device device = at::kCPU);

  virtual WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) = 0;
  virtual WorkPtr do_reduce_scatter(const at::Tensor& full, const ReduceInto& into,
                                    std::string_view label) = 0;
  virtual WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) = 0;
  virtual WorkPtr do_broadcast(const at::Tensor& buffer, int root, std::string_view label) = 0;

 private:
  /// Throws CommError: another build of the program exchanges something else.
  static void check_exchanged(bool fits, std::string_view label);

  const at::Device device_;
};

/// Serves backends whose reductions only sum: writes `sum` (this rank's slice, or the whole of an
/// all-reduce) to where and how it is wanted. Those who listen to operators do not see it.
void write_result(const at::Tensor& sum, const ReduceInto& into);

using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace tessera::comm
