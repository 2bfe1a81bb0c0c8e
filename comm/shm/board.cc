#include "comm/shm/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera::comm::shm {

// The memory starts as zeros, which is a valid state of all of these.
struct alignas(64) Board::Header {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> num_sleeping;
};

struct alignas(64) Board::Line {
  std::atomic<uint64_t> posted, served, done;
  std::atomic<uint32_t> left;
  Entry entries[kMaxUnderWay];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

int64_t Board::bytes(int size) { return static_cast<int64_t>(sizeof(Header) + size * sizeof(Line)); }

Board::Header& Board::header() const { return *reinterpret_cast<Header*>(memory_); }
Board::Line& Board::line(int rank) const { return reinterpret_cast<Line*>(memory_ + sizeof(Header))[rank]; }

const std::atomic<uint64_t>& Board::counter_of(const Line& line, Counter counter) {
  return counter == Counter::kPosted ? line.posted : counter == Counter::kServed ? line.served : line.done;
}

uint64_t Board::get(Counter counter, int rank) const {
  return counter_of(line(rank), counter).load(std::memory_order_acquire);
}

bool Board::all_at(Counter counter, uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank)
    if (get(counter, rank) < number) return false;
  return true;
}

void Board::set(Counter counter, uint64_t number) {
  const_cast<std::atomic<uint64_t>&>(counter_of(line(rank_), counter))
      .store(number, std::memory_order_release);
  ring();
}

void Board::write(uint64_t number, const Entry& entry) { line(rank_).entries[number % kMaxUnderWay] = entry; }
const Entry& Board::entry(uint64_t number, int rank) const {
  return line(rank).entries[number % kMaxUnderWay];
}

void Board::leave() {
  line(rank_).left.store(1, std::memory_order_release);
  ring();
}

bool Board::has_left(int rank) const { return line(rank).left.load(std::memory_order_acquire) != 0; }

uint32_t Board::bell() const { return header().bell.load(std::memory_order_seq_cst); }

// Who goes to sleep counts itself before the kernel compares the bell; who rings, rings before it looks for
// sleepers. So one of the two sees the other.
void Board::ring() {
  header().bell.fetch_add(1, std::memory_order_seq_cst);
  if (header().num_sleeping.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header().bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Board::sleep(uint32_t seen, std::chrono::microseconds limit) {
  const timespec time{limit.count() / 1'000'000, (limit.count() % 1'000'000) * 1000};
  header().num_sleeping.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header().bell), FUTEX_WAIT, seen, &time, nullptr, 0);
  header().num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace tessera::comm::shm
