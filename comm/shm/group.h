// shm::Group: the operations of one group of ranks in shared memory, in order, each moved on by whoever has
// something to contribute, when it comes by.
//
// [Note: reduction on demand]
// Nobody sums for another rank, and no thread works in the background (on a machine whose cores all train, it
// would only take their time). A rank that posts a buffer goes on. Each call into the group, test() of a Work
// included, looks which operations all ranks have posted and sums this rank's slice of those: in one pass
// over all ranks' buffers, straight into where the result is wanted. Only wait() waits, and moves everything
// on meanwhile, so a rank that waits never holds up another.
//
// [Note: where inputs lie]
// Memory from allocate() is mapped by all ranks at the same offsets, so an input there is
// read in place. Anything else passes through the mailbox, a megabyte a rank, piece by piece;
// those calls wait until the last piece.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/shm/board.h"
#include "comm/shm/peers.h"
#include "comm/shm/shared_memory.h"
#include "comm/shm/sum.h"

namespace tessera::comm::shm {

/// How a result is to be written.
struct Into {
  void* output = nullptr;
  Element element = Element::kFloat32;
  double scale = 1;
  bool add = false;
};

/// Owns its board and mailbox; shares the sockets with the groups duplicated from it. One thread at a time,
/// but for abort(). Every call may throw CommError: other ranks issued something else, left, or are gone.
class Group {
 public:
  /// Collective.
  Group(std::shared_ptr<Peers> peers, std::chrono::milliseconds timeout);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return peers_->rank(); }
  int size() const { return peers_->size(); }
  const std::shared_ptr<Peers>& peers() const { return peers_; }

  /// Memory that every rank has mapped: `stride` bytes for each (0, common: the same for all).
  struct Region {
    SharedMemory memory;
    int64_t stride = 0;
    bool common() const { return stride == 0; }
    std::byte* of(int rank) const { return memory.data() + rank * stride; }
  };
  /// Collective, in one order over this group and all it was duplicated from. `bytes` a rank, zeros, from a
  /// page boundary on (`common`: the same bytes for all ranks).
  std::shared_ptr<Region> allocate(int64_t bytes, bool common);

  /// Local. Where `rank` has what this rank has at `mine`; null when that is
  /// not in a region with memory for each.
  const void* peer_address(const void* mine, int64_t bytes, int rank) const;

  // Collective. Each returns the number of the operation to wait for. Pointers
  // must stay valid until finished(number).

  /// Slice rank() of the sum over ranks of `full`, (size() * numel), to `into`.
  uint64_t reduce_scatter(const void* full, Element element, int64_t numel, const Into& into, uint32_t tag);
  /// `full`, (numel), becomes scale * the sum over ranks.
  uint64_t all_reduce(void* full, Element element, int64_t numel, double scale, uint32_t tag);
  /// Slice r of `full`, (size() * bytes), becomes rank r's `shard`.
  uint64_t all_gather(void* full, const void* shard, int64_t bytes, uint32_t tag);
  uint64_t broadcast(void* buffer, int64_t bytes, int root, uint32_t tag);
  uint64_t barrier(uint32_t tag);

  /// Local. Moves on what can be moved on. True when the operation's result is
  /// there and its buffers are free again.
  bool test(uint64_t number);
  /// Local. False when it is not finished after `limit`.
  bool wait(uint64_t number, std::chrono::milliseconds limit);

  /// Local. Wakes the others, who give up. Never throws.
  void abort();

 private:
  enum class Kind { kBarrier, kReduceScatter, kAllReduce, kGather, kBroadcast, kSum };
  /// Where each rank's input of an operation lies.
  struct Place {
    int region = -1;
    int64_t offset = 0;
    bool common = false;
  };
  struct Operation {
    Kind kind = Kind::kBarrier;
    Place place;
    Element element = Element::kFloat32;
    int64_t numel = 0;  // of what is summed or copied (kGather, kBroadcast: bytes)
    Into into;
    int64_t input_stride =
        0;  // kGather: from the place of rank r's input to that of rank r + 1, within their memories
    int64_t into_stride = 0;  // kGather: from one rank's result to the next
    int root = 0;
    bool buffer_is_input = false;  // the input is the caller's memory: finished when nobody reads it any more
  };

  std::optional<Place> find(const void* begin, int64_t bytes) const;
  const std::byte* input(const Place& place, int rank) const;
  uint64_t post(const Operation& operation, uint32_t tag);
  void move_on();
  bool serve(uint64_t number);
  bool complete(uint64_t number);
  void sum(const Operation& operation, int64_t begin, int64_t numel, const Into& into) const;
  template <class Arrived>
  bool await(const Arrived& arrived, std::chrono::milliseconds limit);
  void await_all_done(uint64_t number);
  bool all_posted(uint64_t number) const;
  bool finished(uint64_t number) const;
  void check_alive() const;
  uint64_t post_in_place(Operation operation, const Place& place, uint32_t tag);
  uint64_t post_from_mailbox(Operation operation, const void* data, int64_t bytes, uint32_t tag);

  std::shared_ptr<Peers> peers_;
  std::chrono::milliseconds timeout_;
  SharedMemory board_memory_;
  std::optional<Board> board_;
  std::vector<std::shared_ptr<Region>> regions_;
  static constexpr int kMailbox = 0;        // region
  std::array<uint64_t, 2> mailbox_used_{};  // the last operation that read each half
  int next_half_ = 0;
  std::array<Operation, kMaxUnderWay> operations_;
  uint64_t posted_ = 0, served_ = 0, done_ = 0;
};

}  // namespace tessera::comm::shm
