#include "comm/init/group_context.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/error_message.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

/// Keeps the stores that this process serves and whose groups it has left. [Note: the last to end]
class ServedStores {
 public:
  struct Served {
    GroupStore store;
    std::vector<int> others;  ///< that have not left yet
    int size;
    Clock::time_point deadline;
    Logger log;
  };

  void add(Served served) {
    const std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) {
      std::atexit(&await_at_exit);
      std::at_quick_exit(&await_at_exit);
      process_ = ::getpid();
      stores_.clear();  // a fork's copies
    }
    stores_.push_back(std::move(served));
  }

  void await_ranks(const std::function<void()>& interrupt) {
    const std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) return;
    for (; !stores_.empty(); stores_.pop_back()) await(stores_.back(), interrupt);
  }

 private:
  static void await_at_exit();

  static void await(Served& served, const std::function<void()>& interrupt) {
    constexpr std::chrono::seconds kSilence{5};
    auto say_at = Clock::now() + kSilence;
    const auto watch = [&] {
      if (interrupt) interrupt();
      if (Clock::now() < say_at) return;
      say_at = Clock::time_point::max();
      const std::vector<int> there = served.store.await_ranks("left/", served.others, milliseconds(0), [] {});
      if (there.empty()) return;
      served.log.info(str("rank 0 of ", served.size, " is done and waits until ", name_ranks(there),
                          there.size() == 1 ? " has" : " have",
                          " left the group, whose store it serves; Ctrl-C ends it"));
    };
    while (!served.others.empty() && Clock::now() < served.deadline) {
      const auto limit = std::min<Clock::duration>(served.deadline - Clock::now(), std::chrono::hours(1));
      try {
        served.others =
            served.store.await_ranks("left/", served.others, std::chrono::ceil<milliseconds>(limit), watch);
      } catch (const RankIsGone& gone) {
        for (const int rank : gone.ranks()) std::erase(served.others, rank);
      } catch (const CommError&) {  // the store has failed
        return;
      }
    }
  }

  std::mutex mutex_;
  std::vector<Served> stores_;
  pid_t process_ = 0;  ///< whose exit waits
};

ServedStores& served_stores() {
  static ServedStores stores;
  return stores;
}

void ServedStores::await_at_exit() {
  // What handlers would do is of no use to a process that is done: a signal ends it.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction action{};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) ::signal(signal, SIG_DFL);
  }
  try {
    served_stores().await_ranks({});
  } catch (const std::exception&) {
  }
}

}  // namespace

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
    // First what names this rank: once left/R is there, the server may end.
    store_.set("left/any", std::to_string(rank_));
    if (reason != kLeftInOrder) store_.set("left/fault", std::to_string(rank_));
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
WaitState GroupContext::wait_state(const std::string& group, int64_t number) const {
  WaitState state{.group = group, .number = number, .reports = {}};
  const std::lock_guard lock(mutex_);
  for (const auto& [name, weak] : recorders_) {
    const auto recorder = weak.lock();
    if (!recorder) continue;
    std::thread::id issuer;
    RankReport report = recorder->report(&issuer);
    if (name == group || issuer == std::this_thread::get_id()) state.reports[name] = std::move(report);
  }
  return state;
}

void GroupContext::publish(const std::string& group, int64_t number) {
  std::string state = wait_state(group, number).encode();
  store_.set(str("waits/", rank_), state);
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    is_new = published_wait_ != state;
    published_wait_ = std::move(state);
  }
  if (is_new) store_.set("waits/news", str(rank_, ' ', ++num_published_));
}

std::optional<std::string> GroupContext::publish_wait(const std::string& group, int64_t number) {
  try {
    publish(group, number);
    if (auto problem = problem_of_waits()) return problem;
    const std::string self = std::to_string(rank_), reader = store_.claim("waits/reader", self);
    if (reader != self) {
      const std::vector<int> gone = store_.gone();
      if (std::none_of(gone.begin(), gone.end(), [&](int rank) { return std::to_string(rank) == reader; }))
        return std::nullopt;
      store_.set("waits/reader", self);
    }
    reads_waits_ = true;
    return compare_waits();
  } catch (const CommError&) {
    return std::nullopt;  // a store that is gone shows elsewhere
  }
}

std::optional<std::string> GroupContext::publish_failed_wait(const std::string& group, int64_t number) {
  try {
    publish(group, number);
    if (reads_waits_.exchange(false)) store_.erase("waits/reader");
    return problem_of_waits();
  } catch (const CommError&) {
    return std::nullopt;
  }
}

std::optional<std::string> GroupContext::compare_waits() {
  std::string news = store_.find("waits/news").value_or("");
  {
    const std::lock_guard lock(mutex_);
    news_read_ = std::move(news);
  }
  WaitStates states(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; ++rank)
    if (const auto text = store_.find(str("waits/", rank)); text && !text->empty())
      states[static_cast<size_t>(rank)] = WaitState::decode(*text);
  auto problem = find_difference(states);
  if (!problem) problem = find_deadlock(states);
  if (problem) store_.set("waits/problem", *problem);
  return problem;
}

std::optional<std::string> GroupContext::problem_of_waits() const {
  try {
    return store_.find("waits/problem");
  } catch (const CommError&) {
    return std::nullopt;
  }
}

bool GroupContext::has_news_of_waits() const {
  if (!reads_waits_) return false;
  try {
    const std::string news = store_.find("waits/news").value_or("");
    const std::lock_guard lock(mutex_);
    return news != news_read_;
  } catch (const CommError&) {
    return false;
  }
}

void GroupContext::end_wait() {
  {
    const std::lock_guard lock(mutex_);
    if (!published_wait_) return;
    published_wait_.reset();
  }
  try {
    store_.set(str("waits/", rank_), "");
    if (reads_waits_.exchange(false)) store_.erase("waits/reader");
  } catch (const CommError&) {
  }
}

void GroupContext::set_failed(const std::string& why, bool by_peer) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) {
    failure_ = why;
    failed_by_peer_ = by_peer;
  }
  failed_ = true;
}

std::string GroupContext::why_it_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.empty() ? "an error ended it" : abridged(failure_, 500);
}

GroupContext::~GroupContext() {
  constexpr milliseconds kTimeAfterError{1000};
  const bool in_order = !left_ && !failed_ && std::uncaught_exceptions() == 0;
  leave(in_order ? std::string(kLeftInOrder) : why_it_failed());
  if (!serves_store_) return;
  std::vector<int> others = all_ranks(size_);
  std::erase(others, rank_);
  const auto deadline = in_order ? Clock::time_point::max() : Clock::now() + kTimeAfterError;
  served_stores().add({store_, std::move(others), size_, deadline, log_});
}

void await_other_ranks(const std::function<void()>& interrupt) { served_stores().await_ranks(interrupt); }

}  // namespace tessera::comm
