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
      regions_(peers_, timeout) {
  TESSERA_CHECK(hosts_->num_hosts() > 1);
  const int64_t bytes = shm::whole_pages(shm::ProgressCounters::bytes(peers_->size()));
  counters_memory_ = shm::share_memory(*peers_, bytes, timeout_, [] {});
  counters_.emplace(counters_memory_.data(), peers_->rank(), peers_->size());
  make_staging();
  const auto on_end = [this] {
    num_ended_.fetch_add(1);
    counters_->notify();
  };
  columns_ = make_columns(
      on_end, [this](const std::string& cause, uint32_t) { on_failure_(cause, oldest_tag_.load()); });
  thread_ = std::thread([this] { run(); });
}

void TaskQueue::make_staging() {
  staging_.slot_bytes = Staging::bytes_for(hosts_->num_ranks());
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
  if (std::exchange(closed_, true)) return;
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
  if (index() == 0) check_alive();
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
  counters_->notify();
}

std::string TaskQueue::timed_out() const { return str("timed out after ", name_duration(timeout_)); }

bool TaskQueue::wait(const Operation& operation, milliseconds limit) {
  const auto is_done = [&] { return operation.done.load(std::memory_order_acquire); };
  if (is_done()) return true;
  const auto now = steady_clock::now();
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, std::min(operation.deadline, now + limit),
                      [&] { return is_done() || error_ || stop_; });
  if (is_done()) return true;
  if (error_) throw CommError(*error_);
  if (stop_) throw CommError("rank ", rank_, " has left the group");
  if (steady_clock::now() >= operation.deadline) throw CommError(timed_out());
  return false;
}

void TaskQueue::check_alive() const {
  for (int other = 0; other < peers_->size(); ++other)
    if (counters_->has_left(other))
      throw CommError("rank ", peers_->number_of(other), other == index() ? " has left the group" : " left");
}

/// A rank that has done its part of the oldest piece may have ended in order.
void TaskQueue::check_peers() const {
  check_alive();
  for (int other = 0; other < peers_->size(); ++other)
    if (peers_->is_gone(other) && !counters_->has_reached(other, Counter::kDone, finished_ + 1))
      throw RankIsGone(peers_->number_of(other));
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
  bool moved = false;
  while (finished_ < done_ && finish(finished_ + 1)) moved = true;
  moved |= advance(done_, gathered_, &TaskQueue::share);
  moved |= advance(gathered_, gathering_, &TaskQueue::finish_gather);
  moved |= advance(gathering_, exchanged_, &TaskQueue::start_gather);
  moved |= advance(exchanged_, exchanging_, &TaskQueue::finish_exchange);
  moved |= advance(exchanging_, reduced_, &TaskQueue::start_exchange);
  moved |= advance(reduced_, posted_, &TaskQueue::reduce);
  moved |= advance(posted_, finished_ + tasks_.size(), &TaskQueue::begin);
  if (!tasks_.empty()) oldest_tag_ = tasks_.front().operation->tag;
  return moved;
}

}  // namespace tessera::comm::hybrid
