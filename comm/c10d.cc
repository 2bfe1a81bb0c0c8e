#include "comm/c10d.h"

#include <ATen/ATen.h>

#include <exception>
#include <numeric>
#include <vector>

#include "comm/c10d_group.h"
#include "comm/self.h"
#include "comm/waits.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kFarewell{5000};
constexpr std::chrono::milliseconds kFarewellAfterError{1000};

Call call_of(const char* op, std::string_view label, const at::Tensor& buffer) {
  return {.op = op,
          .label = std::string(label),
          .dtype = c10::toString(buffer.scalar_type()),
          .numel = buffer.numel()};
}

}  // namespace

void Family::leave(std::string_view reason) {
  {
    std::lock_guard lock(mutex_);
    if (left_) return;
    left_ = true;
  }
  try {
    store_.set(str("left/", rank_), std::string(reason));
  } catch (const CommError&) {
    // Nobody is left to tell.
  }
}

void Family::enroll(const std::string& group, std::weak_ptr<const Ledger> ledger) {
  const std::lock_guard lock(mutex_);
  ledgers_[group] = std::move(ledger);
}

// A group that another thread uses (an asynchronous checkpoint's) is left out:
// while this thread waits, that one goes on.
std::optional<std::string> Family::compare_waits(const std::string& group, int64_t number) {
  Waiting mine{.group = group, .number = number, .text = "", .issued = {}};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, weak] : ledgers_) {
      const auto ledger = weak.lock();
      if (!ledger) continue;
      if (name == group) mine.text = ledger->text_of(number);
      if (const auto issued = ledger->issued_by_this_thread()) mine.issued[name] = *issued;
    }
  }
  std::vector<std::optional<Waiting>> waiting(static_cast<size_t>(size_));
  try {
    said_waiting_ = true;
    store_.set(str("waits/", rank_), mine.encode());
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || !store_.has(str("waits/", r))) continue;
      if (const std::string theirs = store_.get(str("waits/", r)); !theirs.empty())
        waiting[static_cast<size_t>(r)] = Waiting::decode(theirs);
    }
  } catch (const CommError&) {
    return std::nullopt;  // a store that is gone shows elsewhere
  }
  waiting[static_cast<size_t>(rank_)] = std::move(mine);
  return describe_circle(waiting, rank_);
}

void Family::stop_waiting() {
  if (!said_waiting_.exchange(false)) return;
  try {
    store_.set(str("waits/", rank_), "");
  } catch (const CommError&) {
  }
}

std::chrono::steady_clock::time_point Family::patience_ends() {
  // Half of the two seconds that a launcher gives it to end (a rank that was killed never reports): the rest
  // is for what it still has to say, to MLflow's server for one.
  constexpr std::chrono::milliseconds kPatience{1000};
  const std::lock_guard lock(mutex_);
  if (!patience_ends_) patience_ends_ = std::chrono::steady_clock::now() + kPatience;
  return *patience_ends_;
}

Family::~Family() {
  const bool in_order = !left_ && std::uncaught_exceptions() == 0;
  leave(in_order ? kLeftInOrder : std::string_view("an error ended it"));
  if (!serves_) return;
  const auto deadline = std::chrono::steady_clock::now() + (in_order ? kFarewell : kFarewellAfterError);
  std::vector<int> others(static_cast<size_t>(size_));
  std::iota(others.begin(), others.end(), 0);
  while (std::chrono::steady_clock::now() < deadline) {
    try {
      store_.await_ranks(
          "left/", others,
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()), [] {});
      return;
    } catch (const RankIsGone& gone) {
      std::erase(others, gone.rank());
    } catch (const CommError&) {
      return;
    }
  }
}

C10dCommunicator::C10dCommunicator(std::shared_ptr<Family> family, std::chrono::milliseconds timeout,
                                   const MakeTransport& make)
    : exceptions_at_birth_(std::uncaught_exceptions()) {
  const GroupStore store = family->store().under("group");
  group_ = std::make_shared<Group>(std::move(family), store, timeout, "main");
  group_->open(make);
}

C10dCommunicator::C10dCommunicator(std::shared_ptr<Group> group)
    : group_(std::move(group)), exceptions_at_birth_(std::uncaught_exceptions()) {}

C10dCommunicator::~C10dCommunicator() {
  if (group_->failed()) {
    group_->family().leave(kLeftByFault);
  } else if (std::uncaught_exceptions() > exceptions_at_birth_) {
    abort("an error ended it");
  }
}

int C10dCommunicator::rank() const { return group_->family().rank(); }
int C10dCommunicator::size() const { return group_->family().size(); }
std::string_view C10dCommunicator::backend() const { return group_->transport().name(); }
std::chrono::milliseconds C10dCommunicator::timeout() const { return group_->timeout(); }

std::vector<std::string> C10dCommunicator::exchange(const std::string& value, std::string_view label,
                                                    std::chrono::milliseconds timeout) {
  return group_->exchange(value, label, timeout);
}

std::shared_ptr<Communicator> C10dCommunicator::duplicate(std::string_view name) {
  return std::make_shared<C10dCommunicator>(group_->duplicate(name));
}

void C10dCommunicator::abort(std::string_view reason) {
  group_->family().leave(group_->failed() ? kLeftByFault : reason);
  group_->abort(reason);
}

WorkPtr C10dCommunicator::do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                                        std::string_view label) {
  if (full.numel() == 0) return finished_work();
  return group_->run(
      call_of("all_gather", label, full), {full, shard},
      [&](Transport& transport, uint32_t tag) { return transport.all_gather(full, shard, tag); });
}

WorkPtr C10dCommunicator::do_reduce_scatter(const at::Tensor& full, const ReduceInto& into,
                                            std::string_view label) {
  if (full.numel() == 0) return finished_work();
  return group_->run(
      call_of("reduce_scatter", label, full), {full, into.shard},
      [&](Transport& transport, uint32_t tag) { return transport.reduce_scatter(full, into, tag); });
}

WorkPtr C10dCommunicator::do_all_reduce(const at::Tensor& full, double scale, std::string_view label) {
  if (full.numel() == 0) return finished_work();
  return group_->run(call_of("all_reduce", label, full), {full}, [&](Transport& transport, uint32_t tag) {
    return transport.all_reduce(full, scale, tag);
  });
}

at::Tensor C10dCommunicator::allocate_symmetric(int64_t bytes, at::Device device, std::string_view label) {
  const at::Tensor memory =
      group_->allocate({.op = "allocate_symmetric", .label = std::string(label), .dtype = "", .numel = bytes},
                       [&](Transport& transport) { return transport.allocate_symmetric(bytes); });
  return memory.defined() ? memory : Communicator::allocate_symmetric(bytes, device, label);
}

at::Tensor C10dCommunicator::peer_view(const at::Tensor& mine, int rank) {
  return group_->transport().peer_view(mine, rank);
}

bool C10dCommunicator::wait_blocks() const { return group_->transport().wait_blocks(); }

bool C10dCommunicator::buffers_reductions() const { return group_->transport().buffers_reductions(); }

at::Tensor C10dCommunicator::allocate_shared(int64_t bytes, std::string_view label) {
  return group_->allocate({.op = "allocate_shared", .label = std::string(label), .dtype = "", .numel = bytes},
                          [&](Transport& transport) { return transport.allocate_shared(bytes); });
}

WorkPtr C10dCommunicator::do_broadcast(const at::Tensor& buffer, int root, std::string_view label) {
  if (buffer.numel() == 0) return finished_work();
  Call call = call_of("broadcast", label, buffer);
  call.op += str(" from rank ", root);
  return group_->run(std::move(call), {buffer}, [&](Transport& transport, uint32_t tag) {
    return transport.broadcast(buffer, root, tag);
  });
}

void C10dCommunicator::do_barrier(std::string_view label) {
  group_
      ->run({.op = "barrier", .label = std::string(label), .dtype = "", .numel = 0}, {},
            [](Transport& transport, uint32_t tag) { return transport.barrier(tag); })
      ->wait();
}

}  // namespace tessera::comm
