// Flags: host memory through which the ranks of a group tell each other how far they are. Streams write and
// wait for the counters; the host writes the rest.
//
// [Note: flags]
// Operations are numbered from 1, equally on all ranks. The stream of a rank whose flag
//   posted  >= n  has its input of operation n in memory that the others can read;
//   reduced >= n  has reduced its part of n, which the others may read;
//   done    >= n  reads nothing of operation n any more.
// A flag is 64 bits, of which a stream writes the lower half (both where the number passes 2^32) and waits
// for the whole. The host releases it by a bit in the upper half, which no later number of a stream
// overwrites: so a wait that is released stays released, also those that are yet to come.
//
// [Note: released]
// A stream cannot see that a rank has ended, and whoever waits for that stream in the driver cannot either
// (a loss that is read, memory that is freed). So the first rank that finds the group at an end releases all
// flags of the group. Streams then run out on all ranks, with whatever was in the buffers, and write flags as
// ever. Before it releases, a rank says so, and up to which operation all ranks had done their part by then.
// So whoever sees the end of an operation, and then that no rank has released, or only after that operation,
// knows that it was carried out as it should be. Otherwise it takes the operation as failed, and with it the
// group. A rank that leaves when its stream has nothing to do releases nothing: its flags are true.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/p2p/limits.h"
#include "comm/shm/progress_counters.h"

namespace tessera::comm::p2p {

/// How many operations can have been issued that a rank has not compared with the others' yet.
inline constexpr uint64_t kMaxUnchecked = 1024;

/// A counter in a cache line of its own. 0 at first.
struct alignas(64) Flag {
  std::atomic<uint32_t> low, high;  // in this order a 64-bit number on every machine we run on

  /// The upper half first: while a stream passes 2^32 it writes the lower half first, so that what is
  /// read is never too large.
  uint64_t value() const {
    const uint64_t upper = high.load(std::memory_order_acquire);
    return upper << 32 | low.load(std::memory_order_acquire);
  }
  bool has_reached(uint64_t number) const { return value() >= number; }
  bool is_released() const { return (high.load(std::memory_order_acquire) & kReleased) != 0; }
  void release() { high.store(kReleased, std::memory_order_release); }

  static constexpr uint32_t kReleased = 1u << 30;
};
static_assert(sizeof(Flag) == 64 && std::atomic<uint32_t>::is_always_lock_free);

/// A view of shared memory, zeros at first, which must outlive it. Thread-safe where atomic.
class Flags {
 public:
  Flags(std::byte* memory, int rank, int size) : memory_(memory), rank_(rank), size_(size) {}
  static int64_t bytes(int size);

  enum Counter { kPosted, kReduced, kDone, kNumCounters };
  Flag& flag(Counter counter, int rank) const;
  /// Lets every stream of every rank run out. May be repeated.
  void release_all() const;

  /// Of this rank: it has left the group, and the others must not wait for it.
  void leave() const;
  bool has_left(int rank) const;
  /// Of this rank, before release_all(): it leaves and releases.
  void announce_release() const;
  bool has_released(int rank) const;
  /// What all ranks have done, lies of released streams left out.
  uint64_t done_by_all() const;
  /// No rank has released before operation `number` was done by all.
  bool is_true(uint64_t number) const;

  /// What this rank issues as operation `number`, before issued(): the others compare.
  void write_key(uint64_t number, const shm::OperationKey& key) const;
  const shm::OperationKey& key(uint64_t number, int rank) const;
  /// How many operations the host of a rank has issued, and compared with all others'. A key stays until all
  /// ranks have compared it.
  std::atomic<uint64_t>& issued(int rank) const;
  std::atomic<uint64_t>& checked(int rank) const;

 private:
  struct RankFlags;
  RankFlags& of(int rank) const;

  std::byte* memory_;
  int rank_, size_;
};

}  // namespace tessera::comm::p2p
