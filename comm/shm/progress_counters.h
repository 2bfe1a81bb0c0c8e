// ProgressCounters: shared memory in which the ranks of one group publish how far they are. Each rank writes
// its own counters only; every change wakes the ranks that sleep.
//
// Counters.
// Operations are numbered from 1, equally on all ranks. A rank whose counter
//   posted   >= n  has its input of operation n in memory that the others can read;
//   reduced  >= n  knows that all ranks have posted n. Of a reduction it has summed its slice up: it reads no
//                  other rank's input any more;
//   gathered >= n  has what it brings from other hosts in memory that the others can read;
//   done     >= n  reads nothing of operation n any more.
// Counters are written with release and read with acquire order, so what they promise is visible.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tessera::comm::shm {

/// Has what must be equal on all ranks for an operation to make sense.
struct OperationKey {
  uint32_t tag = 0;     ///< which collective, and of what
  int32_t region = -1;  ///< which memory the input is in
  int64_t offset = 0;   ///< and where
  bool operator==(const OperationKey&) const = default;
};

/// How many operations can be in flight.
inline constexpr uint64_t kMaxInFlight = 64;

/// Publishes and reads counters in shared memory, zeros at first, which must outlive it. One thread at a
/// time, except leave() and notify().
class ProgressCounters {
 public:
  ProgressCounters(std::byte* memory, int rank, int size) : memory_(memory), rank_(rank), size_(size) {}
  static int64_t bytes(int size);

  enum class Counter { kPosted, kReduced, kGathered, kDone };
  bool all_at(Counter counter, uint64_t number) const;
  bool has_reached(int rank, Counter counter, uint64_t number) const;
  /// This rank's counter; notifies.
  void set(Counter counter, uint64_t number);

  /// A rank writes its key before posting the operation; the others read it after.
  void write_key(uint64_t number, const OperationKey& key);
  const OperationKey& key(uint64_t number, int rank) const;

  /// This rank leaves the group: the others must not wait for it.
  void leave();
  bool has_left(int rank) const;

  /// Wakes the ranks that sleep.
  void notify();
  /// How often any rank has notified.
  uint32_t num_notifications() const;
  /// Sleeps until num_notifications() is no longer `seen`, at most for `limit`.
  void sleep(uint32_t seen, std::chrono::microseconds limit);

 private:
  struct Shared;
  struct RankCounters;
  Shared& shared() const;
  RankCounters& of(int rank) const;

  std::byte* memory_;
  int rank_, size_;
};

}  // namespace tessera::comm::shm
