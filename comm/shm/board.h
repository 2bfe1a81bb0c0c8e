// Board: the page on which the ranks of one group tell each other how far they are. Each rank writes its own
// counters only; a doorbell wakes who sleeps.
//
// [Note: three counters]
// Operations are numbered from 1, equally on all ranks. A rank that says
//   posted >= n  has its input of operation n in memory that the others can read;
//   served >= n  has summed its slice of n: it reads no other rank's input of n any more, and its slice is in
//   place; done >= n    reads nothing of operation n any more.
// Counters are written with release and read with acquire order, so what they promise is visible.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "comm/shm/shared_memory.h"

namespace tessera::comm::shm {

/// What must be equal on all ranks for an operation to make sense.
struct Entry {
  uint32_t tag = 0;     // says which collective, and of what
  int32_t region = -1;  // where the input lies
  int64_t offset = 0;
  bool operator==(const Entry&) const = default;
};

/// How many operations can be under way.
inline constexpr uint64_t kMaxUnderWay = 64;

/// A view of shared memory, which must outlive it. One thread at a time, but for ring().
class Board {
 public:
  Board(std::byte* memory, int rank, int size) : memory_(memory), rank_(rank), size_(size) {}
  static int64_t bytes(int size);

  enum class Counter { kPosted, kServed, kDone };
  uint64_t get(Counter counter, int rank) const;
  bool all_at(Counter counter, uint64_t number) const;
  /// This rank's; rings the bell.
  void set(Counter counter, uint64_t number);

  /// This rank's entry; to be written before posting, read after.
  void write(uint64_t number, const Entry& entry);
  const Entry& entry(uint64_t number, int rank) const;

  /// This rank leaves the group: whoever waits is to give up.
  void leave();
  bool has_left(int rank) const;

  uint32_t bell() const;
  void ring();
  /// Sleeps until the bell is rung again after it was at `seen`, or for `limit`.
  void sleep(uint32_t seen, std::chrono::microseconds limit);

 private:
  struct Header;
  struct Line;
  Header& header() const;
  Line& line(int rank) const;
  static const std::atomic<uint64_t>& counter_of(const Line& line, Counter counter);

  std::byte* memory_;
  int rank_, size_;
};

}  // namespace tessera::comm::shm
