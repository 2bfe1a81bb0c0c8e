#include "comm/init/group_context.h"

#include <exception>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/deadlock.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Clock::time_point GroupContext::report_deadline() {
  // Half of the two seconds that a launcher gives this process to end. The rest is for what it still has to
  // do, such as telling MLflow's server. (A rank that was killed never reports.)
  constexpr milliseconds kReportTime{1000};
  const std::lock_guard lock(mutex_);
  if (!report_deadline_) report_deadline_ = Clock::now() + kReportTime;
  return *report_deadline_;
}

void GroupContext::leave(std::string_view reason) {
  {
    std::lock_guard lock(mutex_);
    if (left_) return;
    left_ = true;
  }
  try {
    store_.set("left/any", "");  // first: once left/R is there, the server may end
    store_.set(str("left/", rank_), std::string(reason));
  } catch (const CommError&) {
    // The server has ended, and the group with it.
  }
}

void GroupContext::add_group(const std::string& name, std::weak_ptr<const FlightRecorder> recorder) {
  const std::lock_guard lock(mutex_);
  recorders_[name] = std::move(recorder);
}

// A group that another thread uses (an asynchronous checkpoint's) is left out: that thread goes on while this
// one waits.
std::optional<std::string> GroupContext::publish_wait(const std::string& group, int64_t number) {
  WaitState mine{.group = group, .number = number, .reports = {}};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, weak] : recorders_) {
      const auto recorder = weak.lock();
      if (!recorder) continue;
      std::thread::id issuer;
      RankReport report = recorder->report(issuer);
      if (name == group || issuer == std::this_thread::get_id()) mine.reports[name] = std::move(report);
    }
  }
  std::vector<std::optional<WaitState>> states(static_cast<size_t>(size_));
  try {
    wait_published_ = true;
    store_.set(str("waits/", rank_), mine.encode());
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      if (const auto theirs = store_.find(str("waits/", r)); theirs && !theirs->empty())
        states[static_cast<size_t>(r)] = WaitState::decode(*theirs);
    }
  } catch (const CommError&) {
    return std::nullopt;  // a store that is gone shows elsewhere
  }
  states[static_cast<size_t>(rank_)] = std::move(mine);
  auto problem = find_difference(states, rank_);
  return problem ? problem : find_deadlock(states, rank_);
}

void GroupContext::end_wait() {
  if (!wait_published_.exchange(false)) return;
  try {
    store_.set(str("waits/", rank_), "");
  } catch (const CommError&) {
  }
}

void GroupContext::set_failed(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = why;
  failed_ = true;
}

std::string GroupContext::why_it_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.empty() ? "an error ended it" : abridged(failure_, 500);
}

// The server's end shows as an error on every rank that still has a question. So a rank's last request is its
// good-bye, and the server waits for all of them however long that takes: a rank may evaluate, or save, for
// an hour after rank 0 is done, or its link may be slow. Ranks that ended without one show as gone.
GroupContext::~GroupContext() {
  constexpr milliseconds kTimeAfterError{1000};
  const bool in_order = !left_ && !failed_ && std::uncaught_exceptions() == 0;
  leave(in_order ? std::string(kLeftInOrder) : why_it_failed());
  if (!serves_store_) return;
  const auto deadline = Clock::now() + (in_order ? std::chrono::hours(24 * 365) : kTimeAfterError);
  std::vector<int> others(static_cast<size_t>(size_));
  std::iota(others.begin(), others.end(), 0);
  while (Clock::now() < deadline) {
    try {
      store_.await_ranks("left/", others, std::chrono::ceil<milliseconds>(deadline - Clock::now()),
                         [&] { check_interrupt(); });
      return;
    } catch (const RankIsGone& gone) {
      for (const int rank : gone.ranks()) std::erase(others, rank);
    } catch (const std::exception&) {  // interrupted, or the store has failed
      return;
    }
  }
}

}  // namespace tessera::comm
