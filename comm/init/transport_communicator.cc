#include "comm/init/transport_communicator.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <utility>
#include <vector>

#include "comm/control/error_message.h"
#include "comm/gloo/gloo.h"
#include "comm/init/self.h"
#include "core/ascii.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

/// A wait longer than this compares collectives with the other ranks, and again after every such time.
constexpr milliseconds kStallInterval{5000};
/// And one longer than this checks whether all ranks are alive, and again after every such time.
constexpr milliseconds kLivenessInterval{500};
/// And a thread that stands in the driver is looked after at this interval.
constexpr milliseconds kWatchInterval{1000};
/// Connecting takes seconds once all ranks have met; this limit is for a rank that hangs meanwhile.
constexpr milliseconds kOpenTimeout = std::chrono::minutes(2);

/// Gloo and NCCL say "Timed out" or "timeout" in some form when the time ran out on this rank. Gloo's message
/// for the other operations of a group one of whose operations timed out is "Application timeout".
Fault fault_of(const std::string& cause) {
  const std::string lower = ascii_lower(cause);
  const bool timeout = lower.find("timed out") != lower.npos || lower.find("timeout") != lower.npos;
  return timeout ? Fault::kTimeout : Fault::kClosed;
}

CollectiveDesc describe(const char* op, std::string_view label) {
  return {.op = op, .label = std::string(label), .dtype = "", .numel = 0};
}

CollectiveDesc describe(const char* op, std::string_view label, const at::Tensor& buffer) {
  return {.op = op,
          .label = std::string(label),
          .dtype = c10::toString(buffer.scalar_type()),
          .numel = buffer.numel()};
}

/// Stands for the transport of a group that only exchanges small things over the store. Collectives throw
/// Error.
class NoTransport final : public Transport {
 public:
  std::string_view name() const override { return "store"; }
  bool wait_blocks() const override { return true; }
  PendingPtr all_gather(const at::Tensor&, const at::Tensor&, uint32_t) override { refuse(); }
  PendingPtr reduce_scatter(const at::Tensor&, const ReduceInto&, uint32_t) override { refuse(); }
  PendingPtr all_reduce(const at::Tensor&, double, uint32_t) override { refuse(); }
  PendingPtr broadcast(const at::Tensor&, int, uint32_t) override { refuse(); }
  PendingPtr barrier(uint32_t) override { refuse(); }
  void abort() override {}
  std::unique_ptr<Transport> duplicate(const GroupStore&, FailureHook) override {
    return std::make_unique<NoTransport>();
  }
  std::unique_ptr<Transport> split(const std::vector<int>&, const GroupStore&, FailureHook) override {
    return std::make_unique<NoTransport>();
  }

 private:
  [[noreturn]] static void refuse() { throw Error("this group is for exchange() alone"); }
};

}  // namespace

// ------------------------------------------------------------------------------------------- collectives

// [Note: the GIL and the backend's threads] A thread of Gloo or NCCL destroys an operation, with the tensors
// and the thread-local state that it holds, after it is done. To free one that Python knows it takes the GIL,
// and Gloo's does so with the lock held that posting needs. So a thread that posts or waits does not keep the
// GIL (JoinOptions::on_block). Most of libtorch's operators let go of it; autograd.Function.apply does not.

/// Waits for a collective in flight. The communicator keeps it, and with it the buffers, until it is done,
/// even if the caller drops it.
class PendingCollective final : public Work {
 public:
  PendingCollective(std::weak_ptr<TransportCommunicator> owner, int64_t number, PendingPtr pending,
                    std::vector<at::Tensor> buffers)
      : owner_(std::move(owner)),
        number_(number),
        pending_(std::move(pending)),
        buffers_(std::move(buffers)) {}

  bool test() override {
    try {
      return is_done();
    } catch (const std::exception&) {
      return true;
    }
  }

  void wait() override {
    const auto owner = owner_.lock();
    if (!owner) throw CommError("a collective is waited for whose communicator is gone");
    owner->wait(*this);
  }

 private:
  friend class TransportCommunicator;

  /// Throws when it has failed.
  bool is_done() { return !pending_ || pending_->poll(); }
  bool has_succeeded() {
    try {
      return is_done();
    } catch (const std::exception&) {
      return false;
    }
  }

  const std::weak_ptr<TransportCommunicator> owner_;
  const int64_t number_;
  PendingPtr pending_;  ///< null once the result is there
  std::vector<at::Tensor> buffers_;
};

WorkPtr TransportCommunicator::issue(CollectiveDesc desc, std::vector<at::Tensor> buffers,
                                     const Begin& begin) {
  const auto aside = context_->on_block();
  check_usable();
  reap();
  const uint32_t fingerprint = desc.fingerprint();
  const int64_t number = recorder_->record(std::move(desc));
  const uint32_t tag = (fingerprint << 16) | recorder_->tag_of(number);  // [Note: tags] in gloo_group.h
  PendingPtr pending;
  try {
    pending = begin(tag);
  } catch (const std::exception& error) {
    if (was_interrupted_) throw;
    fail(number, error_message(error), timeout_);
  }
  in_flight_.push_back(
      std::make_shared<PendingCollective>(weak_from_this(), number, std::move(pending), std::move(buffers)));
  return in_flight_.back();
}

void TransportCommunicator::reap() {
  check_watch(in_flight_.empty() ? recorder_->num_issued() : in_flight_.front()->number_);
  while (!in_flight_.empty()) {
    const std::shared_ptr<PendingCollective> oldest = in_flight_.front();
    try {
      if (!oldest->is_done()) return;
    } catch (const std::exception& error) {
      fail(oldest->number_, error_message(error), timeout_);
    }
    in_flight_.pop_front();
  }
}

void TransportCommunicator::wait(PendingCollective& collective) {
  if (error_ && !collective.has_succeeded()) throw_error();
  if (!collective.pending_) return;
  const auto aside = context_->on_block();
  const milliseconds stall = std::min(kStallInterval, std::max(timeout_ / 2, milliseconds(1)));
  const auto is_done = [&, limit = std::min(kLivenessInterval, stall)] {
    try {
      return collective.pending_->wait(limit);
    } catch (const std::exception& error) {
      fail(collective.number_, error_message(error), timeout_);
    }
  };
  for (auto next_comparison = Clock::now() + stall; !is_done();) {
    check_interrupt();
    check_all_alive(collective.number_);
    if (Clock::now() < next_comparison && !context_->has_news_of_waits()) continue;
    check_stalled(collective.number_);
    next_comparison = Clock::now() + stall;
  }
  check_watch(collective.number_);
  context_->end_wait();
  collective.buffers_.clear();
  // On CUDA the operation is only ordered: it stays pending, so that reap() can notice a later failure.
  if (transport_->wait_blocks()) collective.pending_.reset();
}

WorkPtr TransportCommunicator::do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                                             std::string_view label) {
  if (full.numel() == 0) return finished_work();
  return issue(describe("all_gather", label, full), {full, shard},
               [&](uint32_t tag) { return transport_->all_gather(full, shard, tag); });
}

WorkPtr TransportCommunicator::do_reduce_scatter(const at::Tensor& full, const ReduceInto& into,
                                                 std::string_view label) {
  if (full.numel() == 0) return finished_work();
  return issue(describe("reduce_scatter", label, full), {full, into.shard},
               [&](uint32_t tag) { return transport_->reduce_scatter(full, into, tag); });
}

WorkPtr TransportCommunicator::do_all_reduce(const at::Tensor& full, double scale, std::string_view label) {
  if (full.numel() == 0) return finished_work();
  CollectiveDesc desc = describe("all_reduce", label, full);
  if (scale != 1) desc.op += scale * size() == 1 ? std::string(" (mean)") : str(" (times ", scale, ")");
  return issue(std::move(desc), {full},
               [&](uint32_t tag) { return transport_->all_reduce(full, scale, tag); });
}

WorkPtr TransportCommunicator::do_broadcast(const at::Tensor& buffer, int root, std::string_view label) {
  if (buffer.numel() == 0) return finished_work();
  CollectiveDesc desc = describe("broadcast", label, buffer);
  desc.op += str(" from rank ", root);
  return issue(std::move(desc), {buffer},
               [&](uint32_t tag) { return transport_->broadcast(buffer, root, tag); });
}

void TransportCommunicator::barrier(std::string_view label) {
  issue(describe("barrier", label), {}, [&](uint32_t tag) { return transport_->barrier(tag); })->wait();
}

// ------------------------------------------------------------------------------------------------ memory

at::Tensor TransportCommunicator::allocate(const char* op, std::string_view label, int64_t bytes,
                                           bool common) {
  check_usable();
  CollectiveDesc desc = describe(op, label);
  desc.numel = bytes;
  const int64_t number = recorder_->record(std::move(desc));
  try {
    return transport_->allocate(bytes, common);
  } catch (const CommError& error) {
    recorder_->report_fault(fault_of(error.what()), number);
    fail_with(str("memory for ", label, ": ", error.what()), kind_of(error));
  }
}

at::Tensor TransportCommunicator::allocate_symmetric(int64_t bytes, at::Device device,
                                                     std::string_view label) {
  const at::Tensor memory = allocate("allocate_symmetric", label, bytes, /*common=*/false);
  return memory.defined() ? memory : Communicator::allocate_symmetric(bytes, device, label);
}

at::Tensor TransportCommunicator::allocate_shared(int64_t bytes, std::string_view label) {
  return allocate("allocate_shared", label, bytes, /*common=*/true);
}

at::Tensor TransportCommunicator::peer_view(const at::Tensor& mine, int rank) {
  return transport_->peer_view(mine, rank);
}

// ---------------------------------------------------------------------------------------------- exchange

std::vector<std::string> TransportCommunicator::exchange(const std::string& value, std::string_view label,
                                                         milliseconds timeout) {
  const auto aside = context_->on_block();
  check_usable();
  if (!transport_->wait_blocks()) reap();  // what ranks agree on must not come from a collective that failed
  const int64_t number = recorder_->record(describe("exchange", label));
  auto next_comparison = Clock::now() + std::min(kStallInterval, timeout / 2);
  const auto watch = [&] {
    check_interrupt();
    const auto check_arrived = [&](const std::vector<int>& ranks) {
      for (const int r : ranks)
        if (!exchange_.has_arrived(r)) throw CommError("a rank left");
      return !ranks.empty();
    };
    // Mostly the last one that has failed has not come.
    if (check_arrived(recorder_->last_failed_or_left())) check_arrived(recorder_->failed_or_left());
    if (Clock::now() < next_comparison && !context_->has_news_of_waits()) return;
    check_stalled(number);
    next_comparison = Clock::now() + kStallInterval;
  };
  const std::string plain_label = without_controls(std::string(label)), head = plain_label + '\n';
  StoreExchange::Result result;
  try {
    result = exchange_.run(head + value, timeout, watch);
  } catch (const CommError& error) {  // the store is gone
    check_usable();
    fail_with(error.what(), kind_of(error));
  }
  check_usable();
  if (result.values.empty()) fail(number, result.cause, timeout, std::move(result.missing));
  context_->end_wait();
  for (size_t r = 0; r < result.values.size(); ++r) {
    std::string& text = result.values[r];
    if (!text.starts_with(head))
      fail_with(str("rank ", global_rank(rank_), " exchanges \"", plain_label, "\" but rank ",
                    global_rank(static_cast<int>(r)), " exchanges \"", text.substr(0, text.find('\n')), '"'),
                Kind::kRanksDiffer);
    text.erase(0, head.size());
  }
  return std::move(result.values);
}

// ------------------------------------------------------------------------------------------------ groups

TransportCommunicator::TransportCommunicator(std::shared_ptr<GroupContext> context, milliseconds timeout,
                                             const MakeTransport& make, at::Device device)
    : Communicator(device),
      context_(std::move(context)),
      ranks_(all_ranks(context_->size())),
      rank_(context_->rank()),
      store_(context_->store().under("group")),
      recorder_(std::make_shared<FlightRecorder>(rank_, ranks_, store_, context_->store())),
      exchange_(store_.under("exchange"), rank(), size()),
      timeout_(timeout),
      name_("main"),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  open(make);
}

TransportCommunicator::TransportCommunicator(const TransportCommunicator& original,
                                             const std::vector<int>& ranks, std::string name,
                                             GroupStore store, const MakeTransport& make)
    : Communicator(original.device()),
      context_(original.context_),
      ranks_(chosen_from(original.ranks_, ranks)),
      rank_(place_of(ranks, original.rank_)),
      store_(std::move(store)),
      recorder_(std::make_shared<FlightRecorder>(rank_, ranks_, store_, context_->store())),
      exchange_(store_.under("exchange"), rank(), size()),
      timeout_(original.timeout_),
      name_(std::move(name)),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  open(make);
}

std::shared_ptr<Communicator> TransportCommunicator::duplicate(std::string_view name) {
  return duplicate(name, [this](const GroupStore& store, FailureHook on_failure) {
    return transport_->duplicate(store, std::move(on_failure));
  });
}

std::shared_ptr<Communicator> TransportCommunicator::duplicate_for_exchange(std::string_view name) {
  return duplicate(name,
                   [](const GroupStore&, const FailureHook&) { return std::make_unique<NoTransport>(); });
}

std::shared_ptr<Communicator> TransportCommunicator::duplicate(std::string_view name,
                                                               const MakeTransport& make) {
  exchange("", str("duplicate \"", name, '"'), timeout_);
  ++num_duplicates_;
  return make_group(all_ranks(size()), str(num_duplicates_, " ", name), str("duplicate/", num_duplicates_),
                    make);
}

std::shared_ptr<Communicator> TransportCommunicator::split(const std::vector<int>& ranks,
                                                           std::string_view name) {
  TESSERA_CHECK(std::is_sorted(ranks.begin(), ranks.end()) && !ranks.empty());
  const std::vector<std::vector<int>> given = exchange(ranks, str("split \"", name, '"'));
  for (const int other : ranks)
    if (given[static_cast<size_t>(other)] != ranks)
      fail_with(str("split \"", name, "\": rank ", global_rank(rank_), " counts rank ", global_rank(other),
                    " in its group, which it is not in"));
  ++num_duplicates_;
  if (ranks.size() == 1)
    return std::make_shared<SelfCommunicator>(SimulatedGroup{.timeout = timeout_, .device = device()});
  const std::string place = str(num_duplicates_, "/", ranks[0]);
  const bool is_whole = static_cast<int>(ranks.size()) == size();
  return make_group(ranks, str(place, " ", name), str("split/", place),
                    [&](const GroupStore& store, FailureHook on_failure) {
                      return is_whole ? transport_->duplicate(store, std::move(on_failure))
                                      : transport_->split(ranks, store, std::move(on_failure));
                    });
}

std::shared_ptr<Communicator> TransportCommunicator::make_group(const std::vector<int>& ranks,
                                                                const std::string& name,
                                                                const std::string& place,
                                                                const MakeTransport& make) {
  try {
    return std::make_shared<TransportCommunicator>(*this, ranks, str(name_, "/", without_controls(name)),
                                                   store_.under(place), make);
  } catch (const CommError& error) {
    fail_with(error.what(), kind_of(error));
  }
}

// --------------------------------------------------------------------------------------- life and failure

// A rank that is done early must not leave while others still connect to each other.
void TransportCommunicator::open(const MakeTransport& make) {
  context_->add_group(name_, recorder_);
  transport_ = make(store_, [recorder = recorder_](const std::string& cause, uint32_t tag) {
    recorder->report_fault(fault_of(cause), recorder->number_of(tag));
  });
  transport_->set_watch([this] { check_interrupt(); });
  const auto watch = [&] {
    check_interrupt();
    if (recorder_->last_failed_or_left().empty()) return;
    for (const int r : recorder_->failed_or_left())
      if (const auto why = recorder_->why_left(r); why && !exchange_.has_arrived(r))
        throw PeerFailure("rank ", global_rank(r), " left the group while it was set up: ", *why);
  };
  const StoreExchange::Result result = exchange_.run("", kOpenTimeout, watch);
  if (!result.missing.empty())
    throw CommError(named(result.missing), result.missing.size() == 1 ? " has" : " have",
                    " not connected within ", name_duration(kOpenTimeout));
  if (result.values.empty())
    result.fail(str("rank ", global_rank(rank_), ", while the group was set up: ", result.cause));
  if (!transport_->wait_blocks())
    watch_ = std::jthread([this](const std::stop_token& stop) { watch_peers(stop); });
}

TransportCommunicator::~TransportCommunicator() {
  const auto aside = context_->on_block();
  if (!error_ && (std::uncaught_exceptions() > exceptions_at_birth_ || context_->has_failed()))
    abort(context_->why_it_failed());
  if (!error_ && transport_->waits_at_end()) finish_in_flight();
  if (error_) context_->leave(kLeftByFault);
  watch_ = {};
  transport_.reset();
}

/// Works that the caller dropped. The transport's destructor would wait for them too, but without noticing
/// that a rank has ended.
void TransportCommunicator::finish_in_flight() {
  try {
    for (; !in_flight_.empty(); in_flight_.pop_front()) {
      const std::shared_ptr<PendingCollective> oldest = in_flight_.front();
      wait(*oldest);
    }
  } catch (const std::exception&) {  // the group has failed, which nobody asks for any more
    transport_->abort();
  }
}

void TransportCommunicator::abort(std::string_view reason) {
  context_->leave(error_ ? kLeftByFault : reason);
  if (!error_) error_ = str("rank ", global_rank(rank_), " has left the group: ", reason);
  transport_->abort();
}

void TransportCommunicator::check_usable() const {
  if (error_) throw_error();
}

void TransportCommunicator::throw_error() const {
  if (error_kind_ == Kind::kRanksDiffer) throw RanksDiffer(*error_);
  if (error_kind_ == Kind::kPeer) throw PeerFailure(*error_);
  throw CommError(*error_);
}

void TransportCommunicator::check_interrupt() {
  try {
    context_->check_interrupt();
  } catch (const std::exception&) {
    was_interrupted_ = true;
    abort("it was interrupted");
    throw;
  }
}

std::vector<int> TransportCommunicator::gone_before_leaving() const {
  std::vector<int> gone = recorder_->gone();
  // A rank that has left in order has done its part, which may still be on its way.
  std::erase_if(gone, [&](int rank) { return recorder_->why_left(rank) == kLeftInOrder; });
  return chosen_from(ranks_, gone);
}

void TransportCommunicator::check_all_alive(int64_t number) {
  try {
    const std::vector<int> gone = gone_before_leaving();
    if (!gone.empty()) throw RankIsGone(gone);
  } catch (const CommError& error) {  // RankIsGone, or the store has gone with rank 0
    fail(number, error.what(), timeout_);
  }
}

void TransportCommunicator::watch_peers(const std::stop_token& stop) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any stopped;
  std::string failure, suspicion;
  for (int64_t before = -1; failure.empty();) {
    stopped.wait_for(lock, stop, kWatchInterval, [] { return false; });
    if (stop.stop_requested()) return;
    const bool is_at_work = std::exchange(before, recorder_->num_issued()) != recorder_->num_issued();
    // A rank that leaves in order closes its connections a moment before the store has it: a second look
    // decides.
    std::string seen = failure_of_peer(is_at_work);
    if (!suspicion.empty()) failure = seen;
    suspicion = std::move(seen);
  }
  {
    const std::lock_guard guard(watch_mutex_);
    peer_failure_ = failure;
  }
  context_->set_failed(failure, /*by_peer=*/true);
  transport_->abort();
}

std::string TransportCommunicator::failure_of_peer(bool only_gone) const {
  try {
    if (const std::vector<int> gone = gone_before_leaving(); !gone.empty()) return RankIsGone(gone).what();
    if (only_gone) return "";
    if (const auto rank = recorder_->broken()) {
      const std::string why = recorder_->why_left(*rank).value_or(std::string(kLeftByFault));
      const std::string name = str("rank ", global_rank(*rank));
      return why == kLeftByFault ? name + " has failed" : str(name, " left the group: ", why);
    }
    return "";
  } catch (const CommError& error) {  // the store has gone with rank 0
    return error.what();
  }
}

void TransportCommunicator::check_watch(int64_t number) {
  if (!watch_.joinable()) return;
  std::string failure;
  {
    const std::lock_guard guard(watch_mutex_);
    failure = peer_failure_;
  }
  if (!failure.empty()) fail(number, failure, timeout_);
}

void TransportCommunicator::check_stalled(int64_t number) {
  if (auto problem = context_->publish_wait(name_, number)) {
    recorder_->report_fault(Fault::kClosed, number);
    fail_with(*std::move(problem), Kind::kRanksDiffer);
  }
}

void TransportCommunicator::fail(int64_t number, const std::string& cause, milliseconds timeout,
                                 std::vector<int> missing) {
  recorder_->report_fault(fault_of(cause), number);
  if (cause.starts_with(kAlteredData)) {  // the others are told, who may have received what was sent
    context_->leave(cause);
    const std::optional<CollectiveDesc> desc = recorder_->find(number);
    fail_with(str(desc ? desc->text() : "a collective", ", collective ", number, ": ", cause));
  }
  transport_->abort();
  if (auto problem = context_->publish_failed_wait(name_, number))
    fail_with(*std::move(problem), Kind::kRanksDiffer);
  Failure failure;
  failure.number = number;
  failure.cause = cause;
  failure.timeout = timeout;
  failure.missing = std::move(missing);
  std::string message;
  Kind kind = Kind::kOwn;
  try {
    message =
        recorder_->diagnose(failure, context_->report_deadline(), [this] { context_->compare_waits(); });
    if (is_of_peer(failure)) kind = Kind::kPeer;
    if (auto problem = context_->problem_of_waits()) {
      message = *std::move(problem);
      kind = Kind::kRanksDiffer;
    }
  } catch (const CommError& error) {
    message = error.what();
    kind = kind_of(error);
  }
  fail_with(std::move(message), kind);
}

std::string TransportCommunicator::named(const std::vector<int>& ranks) const {
  return name_ranks(chosen_from(ranks_, ranks));
}

TransportCommunicator::Kind TransportCommunicator::kind_of(const CommError& error) {
  return dynamic_cast<const PeerFailure*>(&error) != nullptr ? Kind::kPeer : Kind::kOwn;
}

void TransportCommunicator::fail_with(std::string message, Kind kind) {
  error_ = std::move(message);
  error_kind_ = kind;
  context_->set_failed(*error_, kind == Kind::kPeer);
  transport_->abort();
  in_flight_.clear();
  throw_error();
}

}  // namespace tessera::comm
