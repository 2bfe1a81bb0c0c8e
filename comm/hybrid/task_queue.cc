#include "comm/hybrid/task_queue.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/liveness.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::hybrid {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kSleep{100};
/// On one host, a wait longer than this looks whether the other ranks are alive, and again after every such
/// time.
constexpr milliseconds kPollInterval{20};
/// How often a call that is not wait() calls `watch` while it waits.
constexpr milliseconds kWatchInterval{100};
/// On one host, a wait first looks this often without sleeping, some microseconds in all: most waits are
/// short.
constexpr int kNumSpins = 200;
/// Gloo counts a collective a moment before it says that it is done.
constexpr std::chrono::microseconds kMoment{50};

}  // namespace

// ------------------------------------------------------------------------------------ the rank's own thread

TaskQueue::TaskQueue(std::shared_ptr<const Hosts> hosts, int rank, std::shared_ptr<shm::PeerSockets> peers,
                     milliseconds timeout, FailureHook on_failure, const MakeColumns& make_columns)
    : hosts_(std::move(hosts)),
      rank_(rank),
      peers_(std::move(peers)),
      timeout_(timeout),
      on_failure_(std::move(on_failure)),
      // With more ranks than cores, spinning takes the time of the rank that is waited for.
      num_spins_(static_cast<unsigned>(peers_->size()) > std::thread::hardware_concurrency() ? 1 : kNumSpins),
      regions_(peers_, timeout) {
  const int64_t bytes = shm::whole_pages(shm::ProgressCounters::bytes(peers_->size()));
  counters_memory_ = shm::share_memory(*peers_, bytes, timeout_, [] {});
  counters_.emplace(counters_memory_.data(), peers_->rank(), peers_->size());
  make_staging();
  if (on_one_host()) return;
  const auto on_end = [this] {
    num_ended_.fetch_add(1);
    counters_->notify();
  };
  columns_ = make_columns(
      on_end, [this](const std::string& cause, uint32_t) { on_failure_(cause, oldest_tag_.load()); });
  thread_ = std::thread([this] { run(); });
}

void TaskQueue::make_staging() {
  staging_.slot_bytes = Staging::bytes_for(*hosts_);
  const auto region = allocate(Staging::kNumSlots * staging_.slot_bytes, /*common=*/false);
  staging_.memory = {region->address(0), region->stride};
  staging_.location = *regions_.find(region->address(peers_->rank()), 1);
  const auto memory = std::make_shared<std::shared_ptr<shm::SharedRegion>>(region);
  staging_.owner = at::for_blob(region->address(0), {1})
                       .deleter([memory](void*) {})
                       .options(at::TensorOptions().dtype(at::kByte))
                       .make_tensor();
  slot_users_.resize(Staging::kNumSlots);
}

// A rank that leaves in order breaks no connection: the others may still be reading what it has sent.
void TaskQueue::close() {
  if (std::exchange(closed_, true) || on_one_host()) return;
  bool in_order = false;
  {
    std::unique_lock lock(mutex_);
    while (num_unfinished_ > 0 && !error_ && !stop_) changed_.wait_for(lock, kSleep);
    in_order = num_unfinished_ == 0 && !error_ && !stop_;
  }
  if (!in_order) return abort();
  stop_ = true;
  counters_->notify();
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

TaskQueue::~TaskQueue() { close(); }

void TaskQueue::abort() {
  aborted_ = true;
  stop_ = true;
  counters_->leave();
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<shm::SharedRegion> TaskQueue::allocate(int64_t bytes, bool common) {
  // The other ranks check while they wait: the first one sends the reason why there is no memory.
  if (index() == 0 || counters_->has_left(index())) check_alive();
  return regions_.allocate(bytes, common, [this] {
    check_alive();
    watch_();
  });
}

void TaskQueue::issue(const OperationPtr& operation) {
  operation->deadline = steady_clock::now() + timeout_;
  std::optional<shm::SharedRegions::Location> location;
  HostMemory memory;
  if (operation->full.defined()) {
    const at::Tensor& full = operation->full;
    location = regions_.find(full.const_data_ptr(), static_cast<int64_t>(full.nbytes()));
    if (location) memory = {regions_.address(*location, 0), regions_.region(*location).stride};
    TESSERA_CHECK(!location || !memory.is_common() || !reduces(operation->kind));
  }
  std::vector<Task> tasks = cut(operation, *hosts_, staging_, location ? &memory : nullptr,
                                location.value_or(shm::SharedRegions::Location{}));
  operation->num_tasks = static_cast<int>(tasks.size());
  {
    const std::lock_guard lock(mutex_);
    if (error_) throw CommError(*error_);
    num_unfinished_ += operation->num_tasks;
    std::move(tasks.begin(), tasks.end(), std::back_inserter(issued_));
  }
  if (on_one_host()) return post(*operation);
  counters_->notify();
}

void TaskQueue::post(const Operation& operation) {
  check_alive();  // no operation with a rank that has given up, even if its input is there
  take_issued();
  const auto are_posted = [this, last = finished_ + tasks_.size()] { return posted_ == last; };
  while (!advance_until(are_posted, std::min(operation.deadline, steady_clock::now() + kWatchInterval))) {
    if (steady_clock::now() >= operation.deadline) throw CommError(timed_out());
    watch_();
  }
}

std::string TaskQueue::timed_out() const { return str("timed out after ", name_duration(timeout_)); }
std::string TaskQueue::has_left() const {
  return str("rank ", peers_->number_of(index()), " has left the group");
}

bool TaskQueue::wait(const Operation& operation, milliseconds limit) {
  const auto is_done = [&] { return operation.done.load(std::memory_order_acquire); };
  if (is_done()) return true;
  const auto until = std::min(operation.deadline, steady_clock::now() + limit);
  if (on_one_host()) {
    if (limit.count() > 0) {
      if (advance_until(is_done, until)) return true;
    } else {
      advance_now();
      if (is_done()) return true;
      check_alive();
    }
  } else {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, until, [&] { return is_done() || error_ || stop_; });
    if (is_done()) return true;
    if (error_) throw CommError(*error_);
    if (stop_) throw CommError(has_left());
  }
  if (steady_clock::now() >= operation.deadline) throw CommError(timed_out());
  return false;
}

void TaskQueue::check_alive() const {
  for (int other = 0; other < peers_->size(); ++other)
    if (counters_->has_left(other))
      throw CommError(other == index() ? has_left() : str("rank ", peers_->number_of(other), " left"));
}

/// A rank that has done its part of all pieces may have ended in order.
void TaskQueue::check_peers() const {
  check_alive();
  for (int other = 0; other < peers_->size(); ++other)
    if (peers_->is_gone(other) && !counters_->has_reached(other, Counter::kDone, posted_))
      throw RankIsGone(peers_->number_of(other));
}

// -------------------------------------------------------------------------- on one host: the caller's calls

/// After a failure the callers' buffers may be gone.
void TaskQueue::advance_now() {
  if (aborted_) throw CommError(has_left());
  while (advance()) {
  }
}

template <class Condition>
bool TaskQueue::advance_until(const Condition& condition, steady_clock::time_point until) {
  for (int spin = 0; spin < num_spins_; ++spin) {
    advance_now();
    if (condition()) return true;
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }
  while (true) {
    const uint32_t seen = counters_->num_notifications();
    advance_now();
    if (condition()) return true;
    check_alive();
    const auto now = steady_clock::now();
    if (now >= until) return false;
    counters_->sleep(seen, std::min<std::chrono::microseconds>(
                               kPollInterval, std::chrono::ceil<std::chrono::microseconds>(until - now)));
    if (steady_clock::now() < now + kPollInterval) continue;
    advance_now();
    if (condition()) return true;
    check_peers();
  }
}

// ------------------------------------------------------------------------------------- the queue's thread

void TaskQueue::run() {
  try {
    work();
  } catch (const std::exception& error) {
    fail(error_message(error));
  }
  if (!aborted_ && !error_) return;
  for (Column& column : columns_) {
    column.reduce->abort();
    column.gather->abort();
  }
}

void TaskQueue::work() {
  while (!stop_) {
    const uint32_t seen = counters_->num_notifications();
    take_issued();
    bool moved = false;
    while (advance()) moved = true;
    if (moved) continue;  // what it has waited for may have been notified before
    if (!tasks_.empty()) check_peers();
    counters_->sleep(seen, num_ended_.load() > num_collected_ ? kMoment : std::chrono::microseconds(kSleep));
  }
}

void TaskQueue::take_issued() {
  const std::lock_guard lock(mutex_);
  std::move(issued_.begin(), issued_.end(), std::back_inserter(tasks_));
  issued_.clear();
}

void TaskQueue::fail(const std::string& cause) {
  if (!aborted_) on_failure_(cause, oldest_tag_.load());
  {
    const std::lock_guard lock(mutex_);
    error_ = cause;
  }
  counters_->leave();
  changed_.notify_all();
}

template <class Step>
bool TaskQueue::advance(uint64_t& passed, uint64_t limit, const Step& step) {
  bool moved = false;
  for (; passed < limit && !stop_; ++passed, moved = true) {
    const c10::DebugInfoGuard guard(task(passed + 1).operation->debug_info);
    if (!(this->*step)(passed + 1)) break;
  }
  return moved;
}

bool TaskQueue::advance() {
  // The last steps first: they free what the first ones need.
  bool moved = finish();
  moved |= advance(done_, on_one_host() ? reduced_ : gathered_, &TaskQueue::share);
  if (!on_one_host()) {
    moved |= advance(gathered_, gathering_, &TaskQueue::finish_gather);
    moved |= advance(gathering_, exchanged_, &TaskQueue::start_gather);
    moved |= advance(exchanged_, exchanging_, &TaskQueue::finish_exchange);
    moved |= advance(exchanging_, reduced_, &TaskQueue::start_exchange);
  }
  moved |= advance(reduced_, posted_, &TaskQueue::reduce);
  moved |= advance(posted_, finished_ + tasks_.size(), &TaskQueue::begin);
  if (!tasks_.empty()) oldest_tag_ = tasks_.front().operation->tag;
  return moved;
}

}  // namespace tessera::comm::hybrid
