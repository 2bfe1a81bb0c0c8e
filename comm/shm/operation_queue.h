// OperationQueue: the operations of one group of ranks in shared memory, in order. Each rank advances them in
// its own calls.
//
// Reduction on demand.
// No rank reduces for another, and no thread works in the background (it would take time from the cores, all
// of which train). Posting a buffer returns at once. Each call into the queue, poll() included, finds the
// operations that all ranks have posted and reduces this rank's slice of those: in one pass over all ranks'
// buffers, straight into where the result is wanted. Only wait() waits, and it advances every operation
// meanwhile, so a rank that waits never delays another.
//
// Where inputs are.
// Memory from allocate() is mapped by all ranks with the same layout, so an input there is read in place.
// Anything else passes through the mailbox, a megabyte a rank, in chunks; those calls wait until the last
// chunk.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/control/peer_sockets.h"
#include "comm/shm/progress_counters.h"
#include "comm/shm/reduce.h"
#include "comm/shm/shared_memory.h"
#include "comm/shm/shared_regions.h"

namespace tessera::comm::shm {

/// Owns its counters and mailbox; shares the sockets with the queues of duplicated groups. One thread at a
/// time, except abort(). Every call may throw CommError: other ranks issued something else, left, or are
/// gone.
class OperationQueue {
 public:
  /// Collective.
  OperationQueue(std::shared_ptr<PeerSockets> peers, std::chrono::milliseconds timeout);
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  int rank() const { return peers_->rank(); }
  int size() const { return peers_->size(); }
  const std::shared_ptr<PeerSockets>& peers() const { return peers_; }

  /// Called about ten times a second while a call other than wait() waits for other ranks: for room in
  /// the mailbox or in the list of operations, or for memory. May throw, which ends the call; the group is
  /// then to be aborted.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

  /// Collective, in one order over this group and all its duplicates. `bytes` a rank, zeros, from a page
  /// boundary on (`common`: the same bytes for all ranks).
  std::shared_ptr<SharedRegion> allocate(int64_t bytes, bool common);
  /// Where `rank` has what this rank has at `mine`; null when that is not in a region with memory for
  /// each rank.
  const void* peer_address(const void* mine, int64_t bytes, int rank) const;

  // Collective. Each returns the number of the operation to wait for. Pointers must stay valid until it is
  // finished.

  /// Slice rank() of the sum over ranks of `full`, (size() * numel), to `output`.
  uint64_t reduce_scatter(const void* full, DType dtype, int64_t numel, const ReduceOutput& output,
                          uint32_t tag);
  /// `full`, (numel), becomes scale * the sum over ranks.
  uint64_t all_reduce(void* full, DType dtype, int64_t numel, double scale, uint32_t tag);
  /// Slice r of `full`, (size() * bytes), becomes rank r's `shard`.
  uint64_t all_gather(void* full, const void* shard, int64_t bytes, uint32_t tag);
  uint64_t broadcast(void* buffer, int64_t bytes, int root, uint32_t tag);
  uint64_t barrier(uint32_t tag);

  /// Advances all operations. True when this one's result is there and its buffers are free again.
  bool poll(uint64_t number);
  /// The same; waits for it. False when it is not finished after `limit`.
  bool wait(uint64_t number, std::chrono::milliseconds limit);

  /// Wakes the others, which give up. Never throws.
  void abort();

 private:
  enum class Kind { kBarrier, kReduceScatter, kAllReduce, kAllGather, kBroadcast, kReduceFromMailbox };
  using InputLocation = SharedRegions::Location;  ///< where each rank's input of an operation is
  struct Operation {
    Kind kind = Kind::kBarrier;
    InputLocation input;
    DType dtype = DType::kFloat32;
    int64_t numel = 0;  ///< of what is reduced or copied (kAllGather, kBroadcast: bytes, as kUInt8)
    ReduceOutput output;
    /// kAllGather: from the input of rank r to that of rank r + 1, beyond the stride of the region.
    int64_t input_stride = 0;
    int64_t output_stride = 0;  ///< kAllGather: from one rank's result to the next
    int root = 0;
    /// The input is the caller's memory: the operation is finished when no rank reads it any more.
    bool buffer_is_input = false;
  };

  uint64_t post(const Operation& operation, uint32_t tag);
  uint64_t post_in_place(Operation operation, const InputLocation& input, uint32_t tag);
  uint64_t post_from_mailbox(const Operation& whole, const void* data, uint32_t tag);

  /// Advances all operations as far as the other ranks allow.
  void progress();
  /// Reduces this rank's slice. False: not all ranks have posted.
  bool reduce_own_slice(uint64_t number);
  /// Copies what the other ranks have. False: they have not come that far.
  bool complete(uint64_t number);
  void reduce_range(const Operation& operation, int64_t begin, int64_t numel,
                    const ReduceOutput& output) const;
  bool all_posted(uint64_t number) const;
  bool is_finished(uint64_t number) const;

  /// Waits until `condition` is true, and calls it often; false after `limit`. Throws when a rank has left or
  /// is gone.
  template <class Condition>
  bool wait_until(const Condition& condition, std::chrono::milliseconds limit);
  void await_all_done(uint64_t number);
  void check_alive() const;

  std::shared_ptr<PeerSockets> peers_;
  const std::chrono::milliseconds timeout_;
  const int num_spins_;
  std::function<void()> watch_ = [] {};
  SharedMemory counters_memory_;
  std::optional<ProgressCounters> counters_;
  SharedRegions regions_;
  static constexpr int kMailbox = 0;        ///< region
  std::array<uint64_t, 2> mailbox_used_{};  ///< the last operation that read each half
  int next_half_ = 0;
  std::array<Operation, kMaxInFlight> operations_;
  uint64_t posted_ = 0, reduced_ = 0, done_ = 0;  ///< this rank's counters
};

}  // namespace tessera::comm::shm
