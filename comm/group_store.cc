#include "comm/group_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>

#include "comm/c10_words.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

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
  const auto deadline = Clock::now() + timeout;
  auto next_meanwhile = Clock::now() + milliseconds(100);
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(prefix + std::to_string(r));
  auto interval = std::chrono::microseconds(100);
  while (!has_all(keys)) {
    const auto now = Clock::now();
    if (now >= deadline) {
      std::vector<int> missing;
      for (int r = 0; r < size; ++r) {
        if (!has(keys[static_cast<size_t>(r)])) missing.push_back(r);
      }
      return missing;
    }
    if (now >= next_meanwhile) {
      meanwhile();
      next_meanwhile = Clock::now() + milliseconds(100);
    }
    std::this_thread::sleep_for(interval);
    interval = std::min<std::chrono::microseconds>(interval * 2, milliseconds(10));
  }
  return {};
}

GroupStore GroupStore::under(const std::string& prefix) const {
  return {c10::make_intrusive<c10d::PrefixStore>(prefix, store_), where_};
}

}  // namespace tessera::comm
