// Tasks: a collective, cut into pieces, each of which passes through the same steps.
//
// [Note: pieces]
// On several hosts a collective on a large buffer is cut into pieces of some megabytes, so that a host adds
// up one piece while the one before is on the network. On one host a buffer is one piece. Where the ranks of
// a host have mapped each other's buffers (Communicator::allocate_symmetric, allocate_shared) a piece is
// worked on in place. Any other buffer passes through staging memory, which they have mapped, in pieces of a
// slot of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/control/hosts.h"
#include "comm/hybrid/plan.h"
#include "comm/shm/shared_regions.h"
#include "comm/transport.h"

namespace tessera::comm::hybrid {

enum class Kind { kBarrier, kReduceScatter, kAllReduce, kAllGather, kBroadcast };
constexpr bool reduces(Kind kind) { return kind == Kind::kReduceScatter || kind == Kind::kAllReduce; }
/// What it brings from other hosts is then shared on this one.
constexpr bool gathers(Kind kind) { return kind != Kind::kReduceScatter; }

/// Describes a collective. The caller keeps its buffers alive until it is done.
struct Operation {
  Kind kind = Kind::kBarrier;
  uint32_t tag = 0;
  at::Tensor full;  ///< the buffer; undefined for a barrier
  ReduceInto into;  ///< of a reduce-scatter; of an all-reduce the scale alone
  int root = 0;     ///< of a broadcast
  std::chrono::steady_clock::time_point deadline;
  /// The memory meter counts by this state of the thread that has issued the collective.
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info = c10::ThreadLocalDebugInfo::current();
  int num_tasks = 0;  ///< that are left
  std::atomic<bool> done = false;
};
using OperationPtr = std::shared_ptr<Operation>;

/// Says where each rank of this host has a buffer.
struct HostMemory {
  std::byte* first = nullptr;  ///< that of the rank with index 0
  int64_t stride = 0;          ///< bytes from one rank's to the next's; 0: one for all
  std::byte* of(int index) const { return first + index * stride; }
  bool is_common() const { return stride == 0; }
};

/// Describes a piece of an operation. Slices are in elements of the operation's dtype (gather and broadcast:
/// bytes); one a rank, of a broadcast one a column. (A staged gather on one host has each rank's slice at the
/// beginning of its own slot: all slices of `work` are the same range, in another rank's memory each.)
struct Task {
  OperationPtr operation;
  Slices user;                            ///< in the operation's buffer
  Slices work;                            ///< in `memory`; the same where it is worked on in place
  HostMemory memory;                      ///< of the buffer's first element, or of the staging slot
  shm::SharedRegions::Location location;  ///< of `memory`, as it is compared between ranks
  int slot = -1;                          ///< of the staging memory; -1: in place
  int64_t into_begin = 0;                 ///< of a reduce-scatter: where in `into.shard` the piece goes

  std::vector<at::Tensor> partial_sums;  ///< by column
  std::vector<PendingPtr> exchanges;

  bool finished = false;  ///< its caller may write to the buffer; pieces before it may be under way

  bool staged() const { return slot >= 0; }
};

/// Holds the staging memory of a group.
struct Staging {
  HostMemory memory;
  shm::SharedRegions::Location location;
  int64_t slot_bytes = 0;
  at::Tensor owner;  ///< keeps it alive

  static constexpr int kNumSlots = 2;
  /// Bytes of a slot, for a group of these.
  static int64_t bytes_for(const Hosts& hosts);
};

/// The tasks of an operation, in order. `in_place`: where its buffer is mapped by the ranks of this
/// host; null: it is not.
std::vector<Task> cut(const OperationPtr& operation, const Hosts& hosts, const Staging& staging,
                      const HostMemory* in_place, const shm::SharedRegions::Location& location);

/// Bytes of an element of its slices.
int64_t element_bytes(const Operation& operation);

}  // namespace tessera::comm::hybrid
