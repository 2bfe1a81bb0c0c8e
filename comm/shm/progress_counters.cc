#include "comm/shm/progress_counters.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera::comm::shm {

// The memory starts as zeros, which is a valid state of all of these.
struct alignas(64) ProgressCounters::Shared {
  std::atomic<uint32_t> num_notifications;
  std::atomic<uint32_t> num_sleeping;
};

struct alignas(64) ProgressCounters::RankCounters {
  std::atomic<uint64_t> reached[4];  // by Counter
  std::atomic<uint32_t> left;
  OperationKey keys[kMaxInFlight];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

int64_t ProgressCounters::bytes(int size) {
  return static_cast<int64_t>(sizeof(Shared) + size * sizeof(RankCounters));
}

ProgressCounters::Shared& ProgressCounters::shared() const { return *reinterpret_cast<Shared*>(memory_); }
ProgressCounters::RankCounters& ProgressCounters::of(int rank) const {
  return reinterpret_cast<RankCounters*>(memory_ + sizeof(Shared))[rank];
}

bool ProgressCounters::all_at(Counter counter, uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank)
    if (!has_reached(rank, counter, number)) return false;
  return true;
}

bool ProgressCounters::has_reached(int rank, Counter counter, uint64_t number) const {
  return of(rank).reached[static_cast<size_t>(counter)].load(std::memory_order_acquire) >= number;
}

void ProgressCounters::set(Counter counter, uint64_t number) {
  of(rank_).reached[static_cast<size_t>(counter)].store(number, std::memory_order_release);
  notify();
}

void ProgressCounters::write_key(uint64_t number, const OperationKey& key) {
  of(rank_).keys[number % kMaxInFlight] = key;
}
const OperationKey& ProgressCounters::key(uint64_t number, int rank) const {
  return of(rank).keys[number % kMaxInFlight];
}

void ProgressCounters::leave() {
  of(rank_).left.store(1, std::memory_order_release);
  notify();
}

bool ProgressCounters::has_left(int rank) const { return of(rank).left.load(std::memory_order_acquire) != 0; }

uint32_t ProgressCounters::num_notifications() const {
  return shared().num_notifications.load(std::memory_order_seq_cst);
}

// A rank that goes to sleep counts itself before the kernel compares the number of notifications; a rank that
// notifies counts that before it looks for sleeping ranks. So one of the two sees the other.
void ProgressCounters::notify() {
  Shared& shared = this->shared();
  shared.num_notifications.fetch_add(1, std::memory_order_seq_cst);
  if (shared.num_sleeping.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&shared.num_notifications), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

void ProgressCounters::sleep(uint32_t seen, std::chrono::microseconds limit) {
  Shared& shared = this->shared();
  const timespec time{limit.count() / 1'000'000, (limit.count() % 1'000'000) * 1000};
  shared.num_sleeping.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&shared.num_notifications), FUTEX_WAIT, seen, &time, nullptr,
          0);
  shared.num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace tessera::comm::shm
