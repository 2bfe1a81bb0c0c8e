#include "comm/c10d_group.h"

#include <algorithm>

#include "comm/c10_words.h"
#include "comm/self.h"
#include "core/ascii.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// A wait longer than this compares lists of collectives, and again after every further such time.
constexpr milliseconds kStall{5000};
/// And one longer than this looks whether all ranks are alive, and again after every further such time.
constexpr milliseconds kLook{500};
/// Connecting is a matter of seconds once all ranks have met; this is for a
/// rank that hangs in the middle of it.
constexpr milliseconds kOpening = std::chrono::minutes(2);

/// Gloo and NCCL say "Timed out", "timeout" in some form when the time ran out on this rank. Gloo's word for
/// the other operations of a group one of whose operations ran out of time is "Application timeout".
Fault fault_of(const std::string& cause) {
  const std::string lower = ascii_lower(cause);
  const bool timeout = lower.find("timed out") != lower.npos || lower.find("timeout") != lower.npos;
  return timeout ? Fault::kTimeout : Fault::kClosed;
}

class FlightWork final : public Work {
 public:
  FlightWork(std::shared_ptr<C10dCommunicator::Group> group, std::shared_ptr<Flight> flight)
      : group_(std::move(group)), flight_(std::move(flight)) {}

  bool test() override { return flight_->finished(); }
  void wait() override { group_->wait(*flight_); }

 private:
  std::shared_ptr<C10dCommunicator::Group> group_;
  std::shared_ptr<Flight> flight_;
};

}  // namespace

bool Flight::finished() const {
  return std::all_of(parts.begin(), parts.end(), [](const C10dWork& part) { return part->isCompleted(); });
}

std::optional<std::string> Flight::failure() const {
  for (const C10dWork& part : parts) {
    if (!part->isCompleted()) continue;
    if (const std::exception_ptr error = part->exception()) return words_of(error);
  }
  return std::nullopt;
}

C10dCommunicator::Group::Group(std::shared_ptr<Family> family, GroupStore store, milliseconds timeout,
                               std::string name)
    : family_(std::move(family)),
      store_(std::move(store)),
      ledger_(std::make_shared<Ledger>(family_->rank(), family_->size(), store_, family_->store())),
      timeout_(timeout),
      name_(std::move(name)) {
  family_->enroll(name_, ledger_);
}

void C10dCommunicator::Group::open(const MakeTransport& make) {
  transport_ = make(store_, failure_reporter());
  store_.set(str("open/", family_->rank()), "");
  const auto watch = [&] {
    for (int r = 0; r < family_->size(); ++r) {
      const auto departure = ledger_->departure(r);
      if (departure && !store_.has(str("open/", r))) {
        throw CommError(str("rank ", r, " left the group while it was set up: ", *departure));
      }
    }
  };
  const std::vector<int> missing = store_.await_ranks("open/", family_->size(), kOpening, watch);
  if (!missing.empty()) {
    throw CommError(str(name_ranks(missing), missing.size() == 1 ? " has" : " have", " not connected within ",
                        name_duration(kOpening)));
  }
}

FailureHook C10dCommunicator::Group::failure_reporter() const {
  return [ledger = ledger_](const std::string& cause, uint32_t tag) {
    ledger->report_fault(fault_of(cause), ledger->number_of_tag(tag));
  };
}

void C10dCommunicator::Group::check_alive() const {
  if (error_) throw CommError(*error_);
}

WorkPtr C10dCommunicator::Group::run(Call call, std::vector<at::Tensor> buffers, const Issue& issue) {
  check_alive();
  reap();
  const uint32_t tag = (call.fingerprint() << 16) | (next_tag_ & 0xffffu);  // [Note: tags] in gloo.cc
  auto flight = std::make_shared<Flight>();
  flight->number = ledger_->record(std::move(call), tag);
  next_tag_ += static_cast<uint32_t>(family_->size());
  try {
    Issued issued = issue(*transport_, tag);
    flight->parts = std::move(issued.parts);
    flight->finish = std::move(issued.finish);
  } catch (const std::exception& error) {
    fail(flight->number, words_of(error), {}, timeout_);
  }
  flight->buffers = std::move(buffers);
  in_flight_.push_back(flight);
  return std::make_shared<FlightWork>(shared_from_this(), std::move(flight));
}

at::Tensor C10dCommunicator::Group::allocate(Call call, const Allocate& allocate) {
  check_alive();
  const std::string label = call.label;
  const int64_t number = ledger_->record(std::move(call));
  try {
    return allocate(*transport_);
  } catch (const CommError& error) {  // says all there is to say
    ledger_->report_fault(fault_of(error.what()), number);
    fail_with(str("memory for ", label, ": ", error.what()));
  }
}

void C10dCommunicator::Group::reap() {
  while (!in_flight_.empty() && in_flight_.front()->finished()) {
    const std::shared_ptr<Flight> flight = in_flight_.front();
    in_flight_.pop_front();
    if (const auto cause = flight->failure()) fail(flight->number, *cause, {}, timeout_);
  }
}

void C10dCommunicator::Group::wait(Flight& flight) {
  if (error_ && !(flight.finished() && !flight.failure())) throw CommError(*error_);
  for (const C10dWork& part : flight.parts) wait_for_part(flight, *part);
  family_->stop_waiting();
  if (flight.finish) std::exchange(flight.finish, nullptr)();
  flight.buffers.clear();
  // On CUDA the operation is only ordered: its parts stay, so that reap() can notice a later failure.
  if (transport_->wait_blocks()) flight.parts.clear();
}

void C10dCommunicator::Group::wait_for_part(const Flight& flight, c10d::Work& part) {
  const bool blocks = transport_->wait_blocks();
  const milliseconds stall = std::min(kStall, std::max(timeout_ / 2, milliseconds(1)));
  auto next_comparison = std::chrono::steady_clock::now() + stall;
  while (true) {
    try {
      part.wait(blocks ? std::min(kLook, stall) : kNoTimeout);
      if (!blocks && part.isCompleted() && part.exception()) std::rethrow_exception(part.exception());
      return;
    } catch (const std::exception& error) {
      if (!blocks || part.isCompleted()) {
        // `error` may have said no more than that it takes longer, and by now it is done.
        const std::exception_ptr failure = part.exception();
        if (blocks && !failure) return;
        fail(flight.number, failure ? words_of(failure) : words_of(error), {}, timeout_);
      }
    }
    check_all_alive(flight.number);
    if (std::chrono::steady_clock::now() < next_comparison) continue;
    check_stalled(flight.number);
    next_comparison = std::chrono::steady_clock::now() + stall;
  }
}

void C10dCommunicator::Group::check_all_alive(int64_t number) {
  try {
    for (const int rank : store_.gone())
      // One that has left in order has done its part, which may still be on its way.
      if (ledger_->departure(rank) != kLeftInOrder) throw RankIsGone(rank);
  } catch (const CommError& error) {  // or rank 0, with its store
    fail(number, error.what(), {}, timeout_);
  }
}

void C10dCommunicator::Group::check_stalled(int64_t number) {
  auto difference = ledger_->compare_stalled();
  if (!difference) difference = family_->compare_waits(name_, number);
  if (difference) {
    ledger_->report_fault(Fault::kClosed, number);
    fail_with(*std::move(difference));
  }
}

std::vector<std::string> C10dCommunicator::Group::exchange(const std::string& value, std::string_view label,
                                                           milliseconds timeout) {
  check_alive();
  const int64_t number =
      ledger_->record({.op = "exchange", .label = std::string(label), .dtype = "", .numel = 0});
  const std::string prefix = str("exchange/", ++num_exchanges_, "/");
  try {
    store_.set(prefix + std::to_string(family_->rank()), str(label, '\n', value));
    await_exchange(prefix, number, timeout);
    family_->stop_waiting();
    std::vector<std::string> values = read_exchange(prefix, label);
    // Everyone has come to this exchange, so everyone has read all of the one before.
    if (num_exchanges_ > 1) store_.erase(str("exchange/", num_exchanges_ - 1, "/", family_->rank()));
    return values;
  } catch (const CommError& error) {
    if (!error_) fail_with(error.what());
    throw CommError(*error_);
  }
}

void C10dCommunicator::Group::await_exchange(const std::string& prefix, int64_t number,
                                             milliseconds timeout) {
  const auto give_up = [&](const std::string& cause, const std::vector<int>& missing) {
    store_.set(prefix + "failed", "");  // whoever comes from now on must not take this exchange for a success
    fail(number, cause, missing, timeout);
  };
  auto next_comparison = std::chrono::steady_clock::now() + std::min(kStall, timeout / 2);
  const auto watch = [&] {
    for (int r = 0; r < family_->size(); ++r) {
      if (r == family_->rank() || store_.has(prefix + std::to_string(r))) continue;
      if (ledger_->has_failed(r) || ledger_->departure(r)) give_up("a rank left", {});
    }
    if (std::chrono::steady_clock::now() >= next_comparison) {
      check_stalled(number);
      next_comparison = std::chrono::steady_clock::now() + kStall;
    }
  };
  std::vector<int> missing;
  try {
    missing = store_.await_ranks(prefix, family_->size(), timeout, watch);
  } catch (const RankIsGone& gone) {
    give_up(gone.what(), {});
  }
  if (!missing.empty()) give_up("timed out", missing);
  if (store_.has(prefix + "failed")) fail(number, "others gave up", {}, timeout);
}

std::vector<std::string> C10dCommunicator::Group::read_exchange(const std::string& prefix,
                                                                std::string_view label) {
  std::vector<std::string> values;
  for (int r = 0; r < family_->size(); ++r) {
    const std::string text = store_.get(prefix + std::to_string(r));
    const size_t cut = text.find('\n');
    if (std::string_view(text).substr(0, cut) != label) {
      fail_with(str("rank ", family_->rank(), " exchanges \"", label, "\" but rank ", r, " exchanges \"",
                    text.substr(0, cut), '"'));
    }
    values.push_back(text.substr(cut + 1));
  }
  return values;
}

std::shared_ptr<C10dCommunicator::Group> C10dCommunicator::Group::duplicate(std::string_view name) {
  exchange("", str("duplicate \"", name, '"'), timeout_);
  ++num_duplicates_;
  auto group = std::make_shared<Group>(family_, store_.under(str("duplicate/", num_duplicates_)), timeout_,
                                       str(name_, "/", num_duplicates_, " ", name));
  try {
    group->open([this](const GroupStore& store, FailureHook on_failure) {
      return transport_->duplicate(store, std::move(on_failure));
    });
  } catch (const CommError& error) {
    fail_with(error.what());
  }
  return group;
}

void C10dCommunicator::Group::abort(std::string_view reason) {
  if (!error_) error_ = str("rank ", family_->rank(), " has left the group: ", reason);
  if (transport_) transport_->abort();
}

void C10dCommunicator::Group::fail(int64_t number, const std::string& cause, const std::vector<int>& missing,
                                   milliseconds timeout) {
  ledger_->report_fault(fault_of(cause), number);
  transport_->abort();
  if (auto circle = family_->compare_waits(name_, number)) fail_with(*std::move(circle));
  std::string message;
  try {
    message = ledger_->explain_failure(number, cause, missing, timeout, family_->patience_ends());
  } catch (const CommError& error) {
    message = error.what();
  }
  fail_with(std::move(message));
}

void C10dCommunicator::Group::fail_with(std::string message) {
  error_ = std::move(message);
  transport_->abort();
  in_flight_.clear();
  throw CommError(*error_);
}

}  // namespace tessera::comm
