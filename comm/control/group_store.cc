#include "comm/control/group_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <thread>

#include "comm/control/error_message.h"
#include "core/error.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

/// Calls `has_come` at growing intervals until it returns true; false: not before the deadline. Calls `watch`
/// about every 100 ms, or every five answers. The interval is at least ten times what an answer takes longer
/// than the fastest one: a server that many ranks ask is asked less often, one that is far away is not.
template <class HasCome, class Watch>
bool poll_until(Clock::time_point deadline, std::atomic<int64_t>& fastest, const HasCome& has_come,
                const Watch& watch) {
  constexpr std::chrono::microseconds kWatchInterval{100'000};
  std::chrono::microseconds interval{100};
  auto next_watch = Clock::now() + kWatchInterval;
  for (auto asked = Clock::now(); !has_come(); asked = Clock::now()) {
    if (Clock::now() >= deadline) return false;
    const auto answer = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - asked);
    const std::chrono::microseconds delay{std::min<int64_t>(fastest, answer.count())};
    fastest = delay.count();
    std::this_thread::sleep_for(
        std::clamp<std::chrono::microseconds>(10 * (answer - delay), interval, milliseconds(500)));
    interval = std::min<std::chrono::microseconds>(interval * 2, milliseconds(10));
    if (Clock::now() < next_watch) continue;
    next_watch = Clock::now() + std::max(kWatchInterval, 5 * delay);
    watch();
  }
  return true;
}

std::vector<std::string> keys_of(const std::string& prefix, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(prefix + std::to_string(rank));
  return keys;
}

/// Returns the value of a key, or none where it does not exist. Asks for no exchange that can take place:
/// get() takes two round trips, and blocks on the server where the key does not exist.
std::optional<std::vector<uint8_t>> find_in(c10d::Store& store, const std::string& key) {
  static const std::vector<uint8_t> nobodys{'n', 'o', 'b', 'o', 'd', 'y', '\0', 's'};
  std::vector<uint8_t> value = store.compareSet(key, nobodys, nobodys);
  if (value == nobodys) return std::nullopt;
  return value;
}

/// Serves c10d's groups: a wait for a key does not block on the server, and fails when a rank ends, which no
/// rank may while a group is set up.
class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Liveness> liveness,
               std::shared_ptr<std::atomic<int64_t>> fastest)
      : PrefixStore("c10d", std::move(store)), liveness_(std::move(liveness)), fastest_(std::move(fastest)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<WatchedStore>(store_->clone(), liveness_, fastest_);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    std::optional<std::vector<uint8_t>> value;
    const auto has_come = [&] { return (value = find_in(*this, key)).has_value(); };
    poll(has_come, getTimeout(), key);
    return std::move(*value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    poll([&] { return check(keys); }, timeout, keys.front());
  }

 private:
  template <class HasCome>
  void poll(const HasCome& has_come, const milliseconds& timeout, const std::string& key) {
    const auto deadline = Clock::now() + (timeout == kNoTimeout ? std::chrono::hours(24) : timeout);
    const auto check_all_alive = [&] {
      if (const std::vector<int> ranks = liveness_->gone(); !ranks.empty()) throw liveness_->error_of(ranks);
    };
    if (!poll_until(deadline, *fastest_, has_come, check_all_alive))
      throw CommError("timed out after ", name_duration(timeout), ": nobody has set ", key);
  }

  const std::shared_ptr<const Liveness> liveness_;
  const std::shared_ptr<std::atomic<int64_t>> fastest_;
};

}  // namespace

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

CommError removed_from_store(const std::string& key) {
  return CommError(
      "the rendezvous no longer has ", key,
      " as a rank of this run has written it: something else, which can connect to MASTER_PORT, has "
      "removed or overwritten it");
}

template <class Function>
auto GroupStore::guarded(Function&& function) const {
  try {
    if (liveness_ && !liveness_->await_store())
      throw StoreIsGone(where_, " does not answer (", RankIsGone::kHostIsSilent, ")");
    return function();
  } catch (const CommError&) {  // of a SealedStore
    throw;
  } catch (const std::exception& error) {
    throw StoreIsGone(where_, " does not answer (", error_message(error), ")");
  }
}

void GroupStore::set(const std::string& key, const std::string& value) const {
  guarded([&] { store_->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::optional<std::string> GroupStore::find(const std::string& key) const {
  return guarded([&] {
    const auto value = find_in(*store_, key);
    return value ? std::optional(std::string(value->begin(), value->end())) : std::nullopt;
  });
}

std::vector<std::string> GroupStore::get_all(const std::string& prefix, const std::vector<int>& ranks) const {
  std::vector<std::string> values;
  if (ranks.empty()) return values;
  return guarded([&] {
    const std::vector<std::string> keys = keys_of(prefix, ranks);
    if (!store_->check(keys))  // multiGet() would wait for it
      for (const std::string& key : keys)
        if (!store_->check({key})) throw removed_from_store(key);
    for (const std::vector<uint8_t>& value : store_->multiGet(keys))
      values.emplace_back(value.begin(), value.end());
    return values;
  });
}

bool GroupStore::has(const std::string& key) const {
  return guarded([&] { return store_->check({key}); });
}

void GroupStore::erase(const std::string& key) const {
  guarded([&] { store_->deleteKey(key); });
}

std::string GroupStore::claim(const std::string& key, const std::string& value) const {
  return guarded([&] {
    const std::vector<uint8_t> found =
        store_->compareSet(key, std::vector<uint8_t>(), std::vector<uint8_t>(value.begin(), value.end()));
    return std::string(found.begin(), found.end());
  });
}

int64_t GroupStore::add(const std::string& key, int64_t amount) const {
  return guarded([&] { return store_->add(key, amount); });
}

std::optional<std::string> GroupStore::await(const std::string& key, milliseconds timeout,
                                             const std::function<void()>& watch) const {
  std::optional<std::string> value;
  await([&] { return (value = find(key)).has_value(); }, timeout, watch);
  return value;
}

bool GroupStore::await(const std::function<bool()>& has_come, milliseconds timeout,
                       const std::function<void()>& watch) const {
  return poll_until(Clock::now() + timeout, *fastest_, has_come, [&] {
    watch();
    // A rank may end in order as soon as the key is there: looked for again.
    if (const std::vector<int> ranks = gone(); !ranks.empty() && !has_come())
      throw liveness_->error_of(ranks);
  });
}

std::vector<int> GroupStore::await_ranks(const std::string& prefix, const std::vector<int>& ranks,
                                         milliseconds timeout, const std::function<void()>& watch) const {
  const auto has_all = [&, keys = keys_of(prefix, ranks)] {
    return guarded([&] { return store_->check(keys); });
  };
  const auto is_missing = [&](int rank) { return !has(prefix + std::to_string(rank)); };
  const auto watch_ranks = [&] {
    watch();
    std::vector<int> ended = gone();
    std::erase_if(ended, [&](int rank) {
      return std::find(ranks.begin(), ranks.end(), rank) == ranks.end() || !is_missing(rank);
    });
    if (!ended.empty()) throw liveness_->error_of(ended);
  };
  std::vector<int> missing;
  if (!poll_until(Clock::now() + timeout, *fastest_, has_all, watch_ranks))
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(missing), is_missing);
  return missing;
}

GroupStore GroupStore::under(const std::string& prefix) const {
  GroupStore part = *this;
  part.store_ = part.watched_store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
  return part.watched(liveness_);
}

GroupStore GroupStore::watched(std::shared_ptr<const Liveness> liveness) const {
  GroupStore store = *this;
  if (liveness) store.watched_store_ = c10::make_intrusive<WatchedStore>(store_, liveness, fastest_);
  store.liveness_ = std::move(liveness);
  return store;
}

std::vector<int> GroupStore::gone() const { return liveness_ ? liveness_->gone() : std::vector<int>(); }

std::vector<int> GroupStore::silent() const { return liveness_ ? liveness_->silent() : std::vector<int>(); }

void GroupStore::check_all_alive(milliseconds limit) const {
  const auto deadline = Clock::now() + limit;
  while (true) {
    if (const std::vector<int> ranks = gone(); !ranks.empty()) throw liveness_->error_of(ranks);
    if (Clock::now() >= deadline) return;
    std::this_thread::sleep_for(milliseconds(20));
  }
}

}  // namespace tessera::comm
