// The part of Group that belongs to the hosts: comparing what ranks issue, waiting, failing, ending.
#include <algorithm>
#include <utility>
#include <vector>

#include "comm/control/error_message.h"
#include "comm/control/liveness.h"
#include "comm/p2p/group.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::p2p {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLookInterval{10};
/// How often a wait of the group's own calls `watch`.
constexpr milliseconds kOwnWatchInterval{100};
/// How long a stream may take to run out once the flags are released. It ends what it does; only work of the
/// caller, which may wait for another group, can hold it up longer.
constexpr milliseconds kDrainLimit{3000};
constexpr std::chrono::microseconds kDrainInterval{100};
/// How long a rank that is about to release lets the others end what it has done itself.
constexpr milliseconds kGrace{50};

}  // namespace

// -------------------------------------------------------------------------------------------- the caller

bool Group::poll(const Issued& issued) {
  {
    const std::lock_guard lock(mutex_);
    if (issued.number <= finished_) return true;
  }
  const bool passed = issued.end->passed();
  compare_keys();
  check_part_of_all(issued.number);  // after the end was seen: [Note: released]
  return passed;
}

bool Group::wait(const Issued& issued, milliseconds limit) {
  const bool ordered = issued.end->order_current(limit);
  compare_keys();
  check_part_of_all(issued.number);
  return ordered;
}

void Group::await_room(uint64_t number) {
  if (number < options_.first_number + kMaxUnchecked) return;
  auto next_watch = steady_clock::now() + kOwnWatchInterval;
  const auto deadline = steady_clock::now() + options_.timeout;
  for (int other = 0; other < size(); ++other) {
    while (flags_->checked(other).load(std::memory_order_acquire) < number - kMaxUnchecked) {
      compare_keys();
      check_all_there();
      std::this_thread::sleep_for(kDrainInterval);
      const auto now = steady_clock::now();
      if (now >= deadline) throw CommError(str("timed out after ", name_duration(options_.timeout)));
      if (now < next_watch) continue;
      watch_();
      next_watch = now + kOwnWatchInterval;
    }
  }
}

void Group::compare_keys() {
  const std::lock_guard lock(mutex_);
  const auto all_issued = [&](uint64_t number) {
    for (int other = 0; other < size(); ++other)
      if (flags_->issued(other).load(std::memory_order_acquire) < number) return false;
    return true;
  };
  for (; all_issued(checked_ + 1); ++checked_) {
    const shm::OperationKey& mine = flags_->key(checked_ + 1, rank());
    for (int other = 0; other < size(); ++other)
      if (flags_->key(checked_ + 1, other) != mine)
        throw CommError(str("rank ", rank(), " and rank ", other, " issued different collectives"));
  }
  flags_->checked(rank()).store(checked_, std::memory_order_release);
}

void Group::check_own() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Group::check_all_there() const {
  check_own();
  for (int other = 0; other < size(); ++other)
    if (flags_->has_left(other)) throw CommError(str("rank ", other, " left"));
}

void Group::check_part_of_all(uint64_t number) const {
  check_own();
  for (int other = 0; other < size(); ++other) {
    const bool left = flags_->has_left(other);  // before its flag, which is final then
    if (left && !flags_->flag(Flags::kDone, other).has_reached(number))
      throw CommError(str("rank ", other, " left"));
  }
  for (int other = 0; other < size() && !flags_->is_true(number); ++other)
    if (flags_->has_released(other)) throw CommError(str("rank ", other, " left"));
}

bool Group::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

// --------------------------------------------------------------------------------------- the end of a group

/// The failure is known here, and in the store, before a stream is released.
void Group::fail(const std::exception_ptr& cause, uint32_t tag) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = cause;
  }
  if (options_.on_failure) options_.on_failure(error_message(cause), tag);
  release();
}

void Group::release() {
  // The others may still be at what this rank has done, and end it within this time.
  const uint64_t mine = flags_->flag(Flags::kDone, rank()).value();
  const auto deadline = steady_clock::now() + kGrace;
  while (!flags_->has_released(rank()) && flags_->done_by_all() < mine && steady_clock::now() < deadline)
    std::this_thread::sleep_for(kDrainInterval);
  flags_->announce_release();
  flags_->release_all();
}

bool Group::drain() {
  const auto deadline = steady_clock::now() + kDrainLimit;
  // Before the device is asked: a call to it may be held up until its stream, which waits, is idle.
  const uint64_t issued = flags_->issued(rank()).load(std::memory_order_acquire);
  if (!flags_->has_released(rank()) && flags_->flag(Flags::kDone, rank()).value() < issued) release();
  while (true) {
    try {
      if (stream_->idle()) return true;
    } catch (const std::exception&) {
      return true;  // a device that has failed carries out nothing
    }
    if (steady_clock::now() >= deadline) return false;
    release();  // again and again: a stream that passes 2^32 writes the upper half
    std::this_thread::sleep_for(kDrainInterval);
  }
}

void Group::abort() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::make_exception_ptr(CommError(str("rank ", rank(), " has left the group")));
  }
  flags_->leave();
  drain();
}

struct Group::Kept {
  std::unique_ptr<Stream> stream;
  PeerMemory memory;
  shm::SharedMemory flags;
  std::shared_ptr<void> registration;
};

void Group::close() {
  if (!watcher_.joinable()) return;
  try {
    while (!has_failed() && !stream_->idle()) std::this_thread::sleep_for(kDrainInterval);
  } catch (const std::exception&) {
    // A device that has failed carries out nothing.
  }
  if (has_failed()) has_ended_ = drain();
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  watcher_.join();
}

Group::~Group() {
  close();
  if (!has_ended_)  // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): then nothing is left to run
    new Kept{std::move(stream_), std::move(memory_), std::move(flags_memory_),
             std::move(flags_registration_)};
}

// -------------------------------------------------------------------------------------------- the watcher

void Group::watch() {
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kLookInterval, [&] { return stop_; })) {
    if (failure_) continue;
    const uint32_t tag = unfinished_.empty() ? 0 : unfinished_.front().tag;
    lock.unlock();
    try {
      compare_keys();
      look_at_others();
    } catch (const CommError&) {
      fail(std::current_exception(), tag);
    }
    lock.lock();
  }
}

void Group::look_at_others() {
  std::vector<bool> gone(static_cast<size_t>(size()));
  Unfinished oldest;
  uint64_t last = 0;
  {
    const std::lock_guard lock(mutex_);
    if (unfinished_.empty()) return;
    for (int other = 0; other < size(); ++other) gone[static_cast<size_t>(other)] = peers_->is_gone(other);
    oldest = unfinished_.front();
    last = unfinished_.back().number;
    const uint64_t done = flags_->done_by_all();
    finished_ = std::max(finished_, std::min(done, issued_));
    while (!unfinished_.empty() && unfinished_.front().number <= done) unfinished_.pop_front();
    if (!unfinished_.empty()) oldest = unfinished_.front();
  }
  check_part_of_all(last);
  // A rank that has ended in order has done its part, which was visible before its socket was closed.
  for (int other = 0; other < size(); ++other)
    if (gone[static_cast<size_t>(other)] && !flags_->flag(Flags::kDone, other).has_reached(last))
      throw RankIsGone(peers_->number_of(other));
  if (flags_->done_by_all() < oldest.number && steady_clock::now() >= oldest.deadline)
    throw CommError(str("timed out after ", name_duration(options_.timeout)));
}

}  // namespace tessera::comm::p2p
