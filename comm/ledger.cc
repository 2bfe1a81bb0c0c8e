#include "comm/ledger.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

std::string fault_key(int rank) { return str("fault/", rank); }
std::string stall_key(int rank) { return str("stall/", rank); }
std::string left_key(int rank) { return str("left/", rank); }

char fault_letter(Fault fault) { return fault == Fault::kTimeout ? 't' : 'c'; }

}  // namespace

int64_t Ledger::record(Call call, uint32_t tag) {
  std::lock_guard lock(mutex_);
  issuer_ = std::this_thread::get_id();
  issues_.push_back({tag, std::chrono::steady_clock::now()});
  if (issues_.size() > History::kWindow) issues_.pop_front();
  return history_.record(std::move(call));
}

int64_t Ledger::number_of_tag(uint32_t tag) const {
  std::lock_guard lock(mutex_);
  int64_t number = history_.issued();
  for (auto issue = issues_.rbegin(); issue != issues_.rend(); ++issue, --number) {
    if (issue->tag == tag) return number;
  }
  return history_.issued();
}

std::optional<int64_t> Ledger::issued_by_this_thread() const {
  std::lock_guard lock(mutex_);
  if (issuer_ != std::this_thread::get_id()) return std::nullopt;
  return history_.issued();
}

std::string Ledger::text_of(int64_t number) const {
  std::lock_guard lock(mutex_);
  const Call* call = history_.find(number);
  return call != nullptr ? call->text() : str("collective ", number);
}

std::chrono::milliseconds Ledger::age(int64_t number) const {
  const int64_t back = history_.issued() - number;  // 0: the newest
  if (back < 0 || back >= static_cast<int64_t>(issues_.size())) return {};
  const auto issued = issues_[issues_.size() - 1 - static_cast<size_t>(back)].time;
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - issued);
}

bool Ledger::has_failed(int rank) const { return store_.has(fault_key(rank)); }

std::string Ledger::encoded_history() const {
  std::lock_guard lock(mutex_);
  return history_.encode();
}

void Ledger::report_fault(Fault fault, int64_t number) {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    if (fault_ != Fault::kNone) return;
    fault_ = fault;
    waited_ = age(number);
    text = str(fault_letter(fault), waited_.count(), '\n', history_.encode());
  }
  try {
    store_.set(fault_key(rank_), text);
  } catch (const CommError&) {
    // The store is gone, which explain_failure() will say.
  }
}

std::optional<std::string> Ledger::compare_stalled() {
  try {
    store_.set(stall_key(rank_), encoded_history());
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || !store_.has(stall_key(r))) continue;
      const History peer = History::decode(store_.get(stall_key(r)));
      std::lock_guard lock(mutex_);
      if (const auto number = first_difference(history_, peer)) {
        return str("collective ", *number, " differs between ranks: rank ", rank_, " issued ",
                   history_.find(*number)->text(), ", rank ", r, " issued ", peer.find(*number)->text());
      }
    }
  } catch (const CommError&) {
    // Nothing to compare with: if the store is really gone, the collective fails or times out by itself.
  }
  return std::nullopt;
}

std::optional<std::string> Ledger::departure(int rank) const {
  if (!family_store_.has(left_key(rank))) return std::nullopt;
  return family_store_.get(left_key(rank));
}

std::string Ledger::explain_failure(int64_t number, const std::string& cause, const std::vector<int>& missing,
                                    std::chrono::milliseconds timeout,
                                    std::chrono::steady_clock::time_point give_up) {
  Failure failure;
  failure.rank = rank_;
  failure.number = number;
  failure.cause = cause;
  failure.timeout = timeout;
  failure.missing = missing;
  failure.reports.resize(static_cast<size_t>(size_));
  bool complete = false;
  while (!complete) {
    const bool last_look = std::chrono::steady_clock::now() >= give_up;
    complete = true;
    failure.gone = store_.gone();  // before looking at what they have left
    for (int r = 0; r < size_; ++r) {
      Report& report = failure.reports[static_cast<size_t>(r)];
      if (r == rank_ || report.fault != Fault::kNone || !report.left.empty()) continue;
      // Leaving comes first: whoever leaves aborts, which also looks like a fault.
      if (const auto left = departure(r); left && *left != kLeftByFault) {
        report.left = *left;
      } else if (store_.has(fault_key(r))) {
        const std::string text = store_.get(fault_key(r));
        report.fault = text.starts_with('t') ? Fault::kTimeout : Fault::kClosed;
        const size_t line_end = text.find('\n');
        if (text.empty() || line_end == text.npos)
          throw CommError(str("rank ", r, "'s report of its failure cannot be read"));
        report.waited = std::chrono::milliseconds(std::strtoll(text.c_str() + 1, nullptr, 10));
        report.history = History::decode(std::string_view(text).substr(line_end + 1));
      } else if (std::find(failure.gone.begin(), failure.gone.end(), r) == failure.gone.end()) {
        complete = false;
      }
    }
    if (complete || last_look) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::lock_guard lock(mutex_);
  Report& own = failure.reports[static_cast<size_t>(rank_)];
  own.fault = fault_;
  own.waited = waited_;
  own.history = history_;
  return explain(failure);
}

}  // namespace tessera::comm
