// The steps of a piece: see [Note: each step in order] in task_queue.h.
#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/hybrid/task_queue.h"
#include "comm/shm/reduce.h"
#include "comm/torch_dtype.h"
#include "core/error.h"

namespace tessera::comm::hybrid {
namespace {

/// How many pieces may be between the local reduction and the end of the exchange: each has a buffer.
constexpr uint64_t kMaxExchanges = 8;

uint32_t column_tag(const Operation& operation, uint32_t& counter) {
  return (operation.tag & 0xffff0000u) | (counter++ & 0xffffu);  // see [Note: tags] in gloo_group.h
}

}  // namespace

std::byte* TaskQueue::user_address(const Task& task, const Range& slice) const {
  return static_cast<std::byte*>(task.operation->full.data_ptr()) +
         slice.begin * element_bytes(*task.operation);
}

bool TaskQueue::is_own_input(const Operation& operation, int slice) const {
  if (operation.kind == Kind::kBroadcast) return operation.root == rank_;
  return reduces(operation.kind) || slice == rank_;
}

/// The input is where the ranks of this host can read it.
bool TaskQueue::begin(uint64_t number) {
  Task& task = this->task(number);
  const Operation& operation = *task.operation;
  if (number > shm::kMaxInFlight && !counters_->all_at(Counter::kDone, number - shm::kMaxInFlight))
    return false;
  if (task.staged()) {
    const int slot = next_slot_;
    if (!counters_->all_at(Counter::kDone, slot_users_[slot])) return false;
    slot_users_[slot] = number;
    next_slot_ = (slot + 1) % Staging::kNumSlots;
    task.memory.first += slot * staging_.slot_bytes;
    task.location.offset += slot * staging_.slot_bytes;
    const int64_t bytes = element_bytes(operation);
    const int count = operation.kind == Kind::kBroadcast ? hosts_->num_columns() : hosts_->num_ranks();
    for (int i = 0; i < count; ++i) {
      const Range from = task.user.of(i), to = task.work.of(i);
      if (is_own_input(operation, i))
        shm::copy_bytes(task.memory.of(index()) + to.begin * bytes, user_address(task, from),
                        from.numel * bytes);
    }
  }
  counters_->write_key(number, {operation.tag, task.location.region, task.location.offset});
  counters_->set(Counter::kPosted, number);
  return true;
}

bool TaskQueue::all_posted(uint64_t number) const {
  if (!counters_->all_at(Counter::kPosted, number)) return false;
  const shm::OperationKey& mine = counters_->key(number, index());
  for (int other = 0; other < peers_->size(); ++other)
    if (counters_->key(number, other) != mine)
      throw CommError("rank ", peers_->number_of(index()), " and rank ", peers_->number_of(other),
                      " issued different collectives");
  return true;
}

void TaskQueue::reduce_on_host(const Task& task, const Range& range, const shm::ReduceOutput& output) const {
  if (range.numel == 0) return;
  const DType dtype = from_torch(task.operation->full.scalar_type());
  std::vector<const void*> inputs;
  for (int other = 0; other < peers_->size(); ++other)
    inputs.push_back(task.memory.of(other) + range.begin * size_bytes(dtype));
  shm::reduce({.dtype = dtype,
               .inputs = inputs.data(),
               .num_inputs = peers_->size(),
               .numel = range.numel,
               .output = output});
}

/// All inputs are on this host: one pass, straight to where the result is wanted. A staged piece of an
/// all-reduce is summed up whole by every rank, so that none waits for another one once more.
void TaskQueue::reduce_to_result(const Task& task) const {
  const Operation& operation = *task.operation;
  const DType dtype = from_torch(operation.full.scalar_type());
  const Range mine = task.work.of(rank_);
  const ReduceInto& into = operation.into;
  if (operation.kind == Kind::kReduceScatter) {
    auto* const shard = static_cast<std::byte*>(into.shard.data_ptr());
    reduce_on_host(task, mine,
                   {shard + task.into_begin * into.shard.element_size(), from_torch(into.shard.scalar_type()),
                    into.scale, into.add});
  } else if (task.staged()) {
    reduce_on_host(task, {task.work.begin, task.work.end - task.work.begin},
                   {user_address(task, {task.user.begin, 0}), dtype, into.scale});
  } else {
    reduce_on_host(task, mine, {task.memory.of(index()) + mine.begin * size_bytes(dtype), dtype, into.scale});
  }
}

void TaskQueue::reduce_columns(Task& task) const {
  const DType dtype = from_torch(task.operation->full.scalar_type());
  for (const ColumnPart& part : column_parts(*hosts_, rank_, task.work)) {
    at::Tensor sums = reduction_buffer(part.numel() * size_bytes(dtype));
    auto* sum = static_cast<std::byte*>(sums.data_ptr());
    for (const Range& slice : part.slices) {
      reduce_on_host(task, slice, {sum, dtype});
      sum += slice.numel * size_bytes(dtype);
    }
    task.partial_sums.push_back(std::move(sums));
  }
}

bool TaskQueue::reduce(uint64_t number) {
  Task& task = this->task(number);
  if (!on_one_host() && number > exchanged_ + kMaxExchanges) return false;
  if (!all_posted(number)) return false;
  if (reduces(task.operation->kind)) {
    if (on_one_host())
      reduce_to_result(task);
    else
      reduce_columns(task);
  }
  counters_->set(Counter::kReduced, number);
  return true;
}

bool TaskQueue::start_exchange(uint64_t number) {
  Task& task = this->task(number);
  const Operation& operation = *task.operation;
  if (!reduces(operation.kind)) return true;
  const std::vector<ColumnPart> parts = column_parts(*hosts_, rank_, task.work);
  const at::ScalarType dtype = operation.full.scalar_type();
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t numel = parts[i].numel();
    if (numel == 0) continue;
    const bool owner = hosts_->owner(host(), parts[i].column) == rank_;
    const Range mine = owner ? parts[i].slices[static_cast<size_t>(host())] : Range{};
    ReduceInto into = operation.into;
    if (owner && operation.kind == Kind::kReduceScatter) {
      into.shard = plain_view(operation.into.shard, task.into_begin, mine.numel);
    } else {
      std::byte* const address = task.memory.of(index()) + mine.begin * element_bytes(operation);
      into.shard = plain_view_at(address, mine.numel, dtype, task.staged() ? staging_.owner : operation.full);
    }
    std::vector<int64_t> numels;
    for (const Range& slice : parts[i].slices) numels.push_back(slice.numel);
    const at::Tensor sums =
        plain_view_at(task.partial_sums[i].data_ptr(), numel, dtype, task.partial_sums[i]);
    Column& column = columns_[i];
    task.exchanges.push_back(
        column.reduce->reduce_scatter(sums, numels, into, column_tag(operation, column.num_reduced)));
  }
  return true;
}

/// All are asked: one that has failed may be the reason why another one never ends.
bool TaskQueue::all_ended(Task& task) {
  num_collected_ += std::erase_if(task.exchanges, [](const PendingPtr& exchange) {
    return exchange->poll() && exchange->wait(std::chrono::milliseconds(1));
  });
  return task.exchanges.empty();
}

bool TaskQueue::finish_exchange(uint64_t number) {
  Task& task = this->task(number);
  if (!all_ended(task)) return false;
  const Operation& operation = *task.operation;
  if (reduces(operation.kind))
    received_bytes_ += received_by_reduce(*hosts_, rank_, task.work) * element_bytes(operation);
  task.partial_sums.clear();
  return true;
}

/// `range` of the buffer of the rank with that index on the root's host; of this rank's on the others.
void TaskQueue::broadcast(Column& column, Task& task, const Range& range, int from_index, int root) {
  if (range.numel == 0) return;
  const Operation& operation = *task.operation;
  const int64_t bytes = element_bytes(operation);
  std::byte* const address = task.memory.of(host() == root ? from_index : index()) + range.begin * bytes;
  const at::Tensor view =
      plain_view_at(address, range.numel * bytes, at::kByte, task.staged() ? staging_.owner : operation.full);
  task.exchanges.push_back(column.gather->broadcast(view, root, column_tag(operation, column.num_gathered)));
  if (host() != root) received_bytes_ += range.numel * bytes;
}

bool TaskQueue::start_gather(uint64_t number) {
  Task& task = this->task(number);
  const Operation& operation = *task.operation;
  if (operation.kind == Kind::kBarrier) {
    if (index() == 0)
      task.exchanges.push_back(columns_[0].gather->barrier(column_tag(operation, columns_[0].num_gathered)));
  } else if (operation.kind == Kind::kBroadcast) {
    for (Column& column : columns_)
      broadcast(column, task, task.work.of(column.number), hosts_->index_of(operation.root),
                hosts_->host_of(operation.root));
  } else if (gathers(operation.kind)) {
    const std::vector<ColumnPart> parts = column_parts(*hosts_, rank_, task.work);
    for (size_t i = 0; i < parts.size(); ++i)
      for (int root = 0; root < hosts_->num_hosts(); ++root)
        broadcast(columns_[i], task, parts[i].slices[static_cast<size_t>(root)], index(), root);
  }
  return true;
}

bool TaskQueue::finish_gather(uint64_t number) {
  if (!all_ended(task(number))) return false;
  counters_->set(Counter::kGathered, number);
  return true;
}

/// What the ranks of this host are to copy is there. On one host it was there when all had posted, but for
/// the sums of other ranks.
bool TaskQueue::can_share(uint64_t number, const Task& task) const {
  const Kind kind = task.operation->kind;
  if (!gathers(kind)) return true;
  if (!on_one_host()) return counters_->all_at(Counter::kGathered, number);
  return kind != Kind::kAllReduce || task.staged() || counters_->all_at(Counter::kReduced, number);
}

/// The caller's buffer has it without a copy: see reduce_to_result() for a staged sum.
bool TaskQueue::has_result(const Task& task) const {
  if (task.operation->kind == Kind::kBarrier) return true;
  return task.staged() ? on_one_host() && task.operation->kind == Kind::kAllReduce : task.memory.is_common();
}

/// Copies what the ranks of this host have, or have brought from others.
bool TaskQueue::share(uint64_t number) {
  Task& task = this->task(number);
  const Operation& operation = *task.operation;
  if (!can_share(number, task)) return false;
  if (gathers(operation.kind) && !has_result(task)) {
    const bool is_broadcast = operation.kind == Kind::kBroadcast;
    const int count = is_broadcast ? hosts_->num_columns() : hosts_->num_ranks();
    const int64_t bytes = element_bytes(operation);
    for (int i = 0; i < count; ++i) {
      if (!reduces(operation.kind) && is_own_input(operation, i)) continue;
      const int source = is_broadcast ? broadcast_source_of(*hosts_, rank_, operation.root, i)
                                      : source_of(*hosts_, rank_, i);
      const Range from = task.work.of(i), to = task.user.of(i);
      shm::copy_bytes(user_address(task, to), task.memory.of(hosts_->index_of(source)) + from.begin * bytes,
                      from.numel * bytes);
    }
  }
  counters_->set(Counter::kDone, number);
  return true;
}

/// The caller may write to its buffer again.
bool TaskQueue::is_input_free(uint64_t number, const Task& task) const {
  return task.staged() || task.memory.is_common() ||
         counters_->all_at(gathers(task.operation->kind) ? Counter::kDone : Counter::kReduced, number);
}

/// In any order: a rank that is slow to read an earlier input delays no later result.
bool TaskQueue::finish() {
  bool moved = false;
  for (uint64_t number = finished_ + 1; number <= done_; ++number) {
    Task& task = this->task(number);
    if (task.finished || !is_input_free(number, task)) continue;
    task.finished = moved = true;
    Operation& operation = *task.operation;
    const bool is_last = --operation.num_tasks == 0;
    // The caller's references are the last ones: a tensor of Python's must not be freed here.
    if (is_last) operation.full.reset(), operation.into.shard.reset();
    {
      const std::lock_guard lock(mutex_);
      --num_unfinished_;
      if (is_last) operation.done.store(true, std::memory_order_release);
    }
    if (is_last) changed_.notify_all();
  }
  while (!tasks_.empty() && tasks_.front().finished) tasks_.pop_front(), ++finished_;
  return moved;
}

}  // namespace tessera::comm::hybrid
