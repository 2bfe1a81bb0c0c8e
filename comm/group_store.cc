#include "comm/group_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <numeric>
#include <thread>

#include "comm/c10_words.h"
#include "comm/explain.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

/// Sleeps between two looks at the store, for growing times.
class Pauses {
 public:
  /// False when it is time to look at other things too: about every 100 ms.
  bool pause() {
    std::this_thread::sleep_for(interval_);
    interval_ = std::min<std::chrono::microseconds>(interval_ * 2, milliseconds(10));
    if (Clock::now() < next_) return true;
    next_ = Clock::now() + milliseconds(100);
    return false;
  }

 private:
  std::chrono::microseconds interval_{100};
  Clock::time_point next_ = Clock::now() + milliseconds(100);
};

/// What c10d's groups get: a wait for a key does not block on the server, and ends when a rank has.
/// While a group is set up no rank may end.
class WatchedStore final : public c10d::Store {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Liveness> liveness)
      : store_(std::move(store)), liveness_(std::move(liveness)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<WatchedStore>(store_->clone(), liveness_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_->set(key, value); }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return store_->compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return store_->get(key);
  }
  int64_t add(const std::string& key, int64_t value) override { return store_->add(key, value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto deadline = Clock::now() + (timeout == kNoTimeout ? std::chrono::hours(24) : timeout);
    for (Pauses pauses; !store_->check(keys);) {
      if (Clock::now() >= deadline)
        throw CommError(str("timed out after ", name_duration(timeout), ": nobody has set ", keys.front()));
      if (pauses.pause()) continue;
      if (const std::vector<int> ranks = liveness_->gone(); !ranks.empty()) throw RankIsGone(ranks.front());
    }
  }
  const milliseconds& getTimeout() const noexcept override { return store_->getTimeout(); }
  void setTimeout(const milliseconds& timeout) override { store_->setTimeout(timeout); }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->append(key, value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return store_->multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override {
    store_->multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const Liveness> liveness_;
};

}  // namespace

template <class Function>
auto GroupStore::guarded(Function&& function) const {
  try {
    return function();
  } catch (const std::exception& error) {
    throw CommError(str(where_, " does not answer (", words_of(error), ")"));
  }
}

void GroupStore::set(const std::string& key, const std::string& value) const {
  guarded([&] { store_->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::string GroupStore::get(const std::string& key) const {
  return guarded([&] {
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  });
}

bool GroupStore::has(const std::string& key) const { return has_all({key}); }

bool GroupStore::has_all(const std::vector<std::string>& keys) const {
  return guarded([&] { return store_->check(keys); });
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

std::vector<int> GroupStore::await_ranks(const std::string& prefix, int size, milliseconds timeout,
                                         const std::function<void()>& meanwhile) const {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return await_ranks(prefix, ranks, timeout, meanwhile);
}

std::vector<int> GroupStore::await_ranks(const std::string& prefix, const std::vector<int>& ranks,
                                         milliseconds timeout, const std::function<void()>& meanwhile) const {
  const auto deadline = Clock::now() + timeout;
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(prefix + std::to_string(rank));
  Pauses pauses;
  while (!has_all(keys)) {
    if (Clock::now() >= deadline) {
      std::vector<int> missing;
      for (const int rank : ranks)
        if (!has(prefix + std::to_string(rank))) missing.push_back(rank);
      return missing;
    }
    if (pauses.pause()) continue;
    meanwhile();
    for (const int rank : gone())
      if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end() && !has(prefix + std::to_string(rank)))
        throw RankIsGone(rank);
  }
  return {};
}

GroupStore GroupStore::under(const std::string& prefix) const {
  return GroupStore(c10::make_intrusive<c10d::PrefixStore>(prefix, store_), where_).watched(liveness_);
}

GroupStore GroupStore::watched(std::shared_ptr<const Liveness> liveness) const {
  GroupStore store = *this;
  if (liveness) store.watched_store_ = c10::make_intrusive<WatchedStore>(store_, liveness);
  store.liveness_ = std::move(liveness);
  return store;
}

std::vector<int> GroupStore::gone() const { return liveness_ ? liveness_->gone() : std::vector<int>(); }

void GroupStore::check_all_alive() const {
  if (const std::vector<int> ranks = gone(); !ranks.empty()) throw RankIsGone(ranks.front());
}

void GroupStore::blame_the_gone() const {
  // The kernel closes the connections of a process that ends one by one.
  for (int look = 0; look < 10; ++look) {
    check_all_alive();
    std::this_thread::sleep_for(milliseconds(20));
  }
}

}  // namespace tessera::comm
