#include "comm/p2p/flags.h"

#include <algorithm>
#include <bit>

namespace tessera::comm::p2p {

static_assert(std::endian::native == std::endian::little);

static constexpr uint32_t kLeft = 1, kReleases = 2;

// The memory starts as zeros, which is a valid state of all of these.
struct alignas(64) Flags::RankFlags {
  Flag counters[kNumCounters];
  std::atomic<uint32_t> left;
  std::atomic<uint64_t> true_until;  // if this rank has released
  alignas(64) std::atomic<uint64_t> issued;
  alignas(64) std::atomic<uint64_t> checked;
  shm::OperationKey keys[kMaxUnchecked];
};

int64_t Flags::bytes(int size) { return static_cast<int64_t>(sizeof(RankFlags)) * size; }

Flags::RankFlags& Flags::of(int rank) const { return reinterpret_cast<RankFlags*>(memory_)[rank]; }

Flag& Flags::flag(Counter counter, int rank) const { return of(rank).counters[counter]; }

void Flags::release_all() const {
  for (int rank = 0; rank < size_; ++rank)
    for (Flag& flag : of(rank).counters) flag.release();
}

void Flags::leave() const { of(rank_).left.fetch_or(kLeft, std::memory_order_seq_cst); }
bool Flags::has_left(int rank) const { return of(rank).left.load(std::memory_order_seq_cst) != 0; }

void Flags::announce_release() const {
  if (has_released(rank_)) return;
  of(rank_).true_until.store(done_by_all(), std::memory_order_seq_cst);
  of(rank_).left.fetch_or(kLeft | kReleases, std::memory_order_seq_cst);
}
bool Flags::has_released(int rank) const {
  return (of(rank).left.load(std::memory_order_seq_cst) & kReleases) != 0;
}

// First the flags, then who has released: what a rank released between the two is left out.
uint64_t Flags::done_by_all() const {
  uint64_t number = UINT64_MAX;
  for (int rank = 0; rank < size_; ++rank) number = std::min(number, flag(kDone, rank).value());
  for (int rank = 0; rank < size_; ++rank)
    if (has_released(rank)) number = std::min(number, of(rank).true_until.load(std::memory_order_seq_cst));
  return number;
}

bool Flags::is_true(uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank)
    if (has_released(rank) && of(rank).true_until.load(std::memory_order_seq_cst) < number) return false;
  return true;
}

void Flags::write_key(uint64_t number, const shm::OperationKey& key) const {
  of(rank_).keys[number % kMaxUnchecked] = key;
}
const shm::OperationKey& Flags::key(uint64_t number, int rank) const {
  return of(rank).keys[number % kMaxUnchecked];
}

std::atomic<uint64_t>& Flags::issued(int rank) const { return of(rank).issued; }
std::atomic<uint64_t>& Flags::checked(int rank) const { return of(rank).checked; }

}  // namespace tessera::comm::p2p
