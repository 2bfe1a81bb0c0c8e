#include "comm/control/flight_recorder.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string fault_key(int rank) { return str("fault/", rank); }
std::string left_key(int rank) { return str("left/", rank); }

}  // namespace

FlightRecorder::FlightRecorder(int rank, std::vector<int> ranks, GroupStore group_store,
                               GroupStore context_store)
    : rank_(rank),
      size_(static_cast<int>(ranks.size())),
      ranks_(std::move(ranks)),
      store_(std::move(group_store)),
      context_store_(std::move(context_store)),
      issuer_(std::this_thread::get_id()) {}

int64_t FlightRecorder::record(CollectiveDesc desc) {
  std::lock_guard lock(mutex_);
  issuer_ = std::this_thread::get_id();
  issue_times_.push_back(Clock::now());
  if (issue_times_.size() > RankReport::kWindow) issue_times_.pop_front();
  return report_.record(std::move(desc));
}

int64_t FlightRecorder::number_of(uint32_t tag) const {
  std::lock_guard lock(mutex_);
  for (int64_t number = report_.num_issued; report_.find(number) != nullptr; --number)
    if (tag_of(number) == (tag & 0xffffu)) return number;
  return report_.num_issued;
}

int64_t FlightRecorder::num_issued() const {
  const std::lock_guard lock(mutex_);
  return report_.num_issued;
}

RankReport FlightRecorder::report(std::thread::id* issuer) const {
  std::lock_guard lock(mutex_);
  if (issuer != nullptr) *issuer = issuer_;
  return report_;
}

std::optional<CollectiveDesc> FlightRecorder::find(int64_t number) const {
  const std::lock_guard lock(mutex_);
  const CollectiveDesc* found = report_.find(number);
  return found != nullptr ? std::optional(*found) : std::nullopt;
}

void FlightRecorder::report_fault(Fault fault, int64_t number) {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    if (report_.fault != Fault::kNone) return;
    report_.fault = fault;
    const int64_t age = report_.num_issued - number;  // 0: the newest
    if (age >= 0 && age < static_cast<int64_t>(issue_times_.size())) {
      const auto issued = issue_times_[issue_times_.size() - 1 - static_cast<size_t>(age)];
      report_.waited = std::chrono::duration_cast<milliseconds>(Clock::now() - issued);
    }
    text = report_.encode();
  }
  try {
    store_.set(fault_key(rank_), text);
    store_.set("fault/any", std::to_string(rank_));
  } catch (const CommError&) {
    // The store is gone, which diagnose() will say.
  }
}

std::vector<int> FlightRecorder::last_failed_or_left() const {
  std::vector<int> ranks;
  if (const auto rank = context_store_.find("left/any"))
    ranks = of_group({static_cast<int>(parse_integer(*rank))});
  if (const auto rank = store_.find("fault/any")) ranks.push_back(static_cast<int>(parse_integer(*rank)));
  return ranks;
}

std::vector<int> FlightRecorder::failed_or_left() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank)
    if (store_.has(fault_key(rank)) || why_left(rank)) ranks.push_back(rank);
  return ranks;
}

std::optional<int> FlightRecorder::broken() const {
  if (const auto rank = store_.find("fault/any"); rank && parse_integer(*rank) != rank_)
    return static_cast<int>(parse_integer(*rank));
  if (const auto rank = context_store_.find("left/fault"))
    for (const int left : of_group({static_cast<int>(parse_integer(*rank))}))
      if (left != rank_) return left;
  return std::nullopt;
}

std::optional<std::string> FlightRecorder::why_left(int rank) const {
  return context_store_.find(left_key(ranks_[static_cast<size_t>(rank)]));
}

bool FlightRecorder::read_report(int rank, RankReport& report) const {
  // Leaving comes first: a rank that leaves aborts, which also looks like a fault.
  if (const auto left = why_left(rank); left && *left != kLeftByFault) {
    report.left = *left;
    return true;
  }
  const std::optional<std::string> text = store_.find(fault_key(rank));
  if (!text) return false;
  std::string_view rest = *text;
  report = RankReport::decode(rest);
  return true;
}

std::vector<int> FlightRecorder::gone() const { return of_group(store_.gone()); }

/// Converts numbers in the context.
std::vector<int> FlightRecorder::of_group(const std::vector<int>& ranks) const {
  std::vector<int> found;
  for (int rank = 0; rank < size_; ++rank)
    if (std::count(ranks.begin(), ranks.end(), ranks_[static_cast<size_t>(rank)]) > 0) found.push_back(rank);
  return found;
}

void FlightRecorder::collect_reports(Failure& failure, Clock::time_point deadline, bool again) const {
  std::vector<int> unheard;
  for (int r = 0; r < size_; ++r) {
    const RankReport& report = failure.reports[static_cast<size_t>(r)];
    if (r != rank_ && report.fault == Fault::kNone && report.left.empty()) unheard.push_back(r);
  }
  while (true) {
    const bool is_last = Clock::now() >= deadline;
    failure.gone = gone();  // before reading what they have left in the store
    if (is_last || again)
      std::erase_if(unheard, [&](int r) { return read_report(r, failure.reports[static_cast<size_t>(r)]); });
    const bool all_gone = std::all_of(unheard.begin(), unheard.end(), [&](int r) {
      return std::count(failure.gone.begin(), failure.gone.end(), r) > 0;
    });
    if (all_gone || is_last) return;
    std::this_thread::sleep_until(again ? Clock::now() + milliseconds(20) : deadline);
  }
}

std::string FlightRecorder::diagnose(Failure& failure, Clock::time_point deadline,
                                     const std::function<void()>& compare) const {
  failure.rank = rank_;
  failure.names = ranks_;
  failure.reports.resize(static_cast<size_t>(size_));
  const std::string self = std::to_string(rank_);
  const bool reads = store_.claim("fault/reader", self) == self;
  if (reads) {
    collect_reports(failure, deadline, /*again=*/true);
    failure.reports[static_cast<size_t>(rank_)] = report();
    if (compare) compare();
    store_.set("fault/all", pack_reports(failure.reports));
  } else {
    std::optional<std::string> packed;
    while (!(packed = store_.find("fault/all")) && Clock::now() < deadline)
      std::this_thread::sleep_for(milliseconds(20));
    if (packed) failure.reports = unpack_reports(*packed, size_);
    // Ranks that have reported since, or all where the reader has ended, are asked once.
    collect_reports(failure, deadline, /*again=*/false);
    failure.reports[static_cast<size_t>(rank_)] = report();
  }
  failure.silent = of_group(store_.silent());
  return comm::diagnose(failure);
}

}  // namespace tessera::comm
