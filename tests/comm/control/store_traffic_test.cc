// What the rendezvous asks of the store, counted: it must not grow faster than the number of ranks.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <thread>

#include "comm/control/store_exchange.h"
#include "comm/rendezvous/registration.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

struct Traffic {
  std::atomic<int64_t> requests{0}, questions{0}, bytes{0};
};

/// A store in memory, which counts. Questions ("what is there?", which change nothing) are counted apart: how
/// often a rank that waits asks depends on time.
class CountingStore final : public c10d::Store {
 public:
  explicit CountingStore(Traffic& traffic) : traffic_(traffic) {}

  c10::intrusive_ptr<Store> clone() override { return c10::intrusive_ptr<Store>::reclaim_copy(this); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count(key.size() + value.size());
    store_->set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    auto found = store_->compareSet(key, expected, desired);
    count(key.size() + expected.size() + desired.size() + found.size(), expected == desired);
    return found;
  }
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = store_->get(key);
    count(key.size() + value.size());
    return value;
  }
  int64_t add(const std::string& key, int64_t value) override {
    count(key.size() + sizeof value, value == 0);
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    count(key.size());
    return store_->deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++traffic_.questions;
    for (const std::string& key : keys) traffic_.bytes += static_cast<int64_t>(key.size());
    return store_->check(keys);
  }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    store_->wait(keys, timeout);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    auto values = store_->multiGet(keys);
    size_t bytes = 0;
    for (size_t i = 0; i < keys.size(); ++i) bytes += keys[i].size() + values[i].size();
    count(bytes);
    return values;
  }

 private:
  void count(size_t bytes, bool is_question = false) {
    ++(is_question ? traffic_.questions : traffic_.requests);
    traffic_.bytes += static_cast<int64_t>(bytes);
  }

  Traffic& traffic_;
  const c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
};

/// Each rank registers, and takes part in one exchange of 64 bytes a rank: what ranks agree on before the
/// first step is exchanged like this.
void meet(int world_size, Traffic& traffic) {
  const GroupStore store(c10::make_intrusive<CountingStore>(traffic), "the store");
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      Environment env;
      env.rank = rank;
      env.world_size = world_size;
      WaitLimit limit(std::chrono::minutes(2), Logger(), {});
      const RankInfo mine{
          "domain", "domain", str("process ", 10000 + rank, " on host"), "10.0.0.1 40000", {}};
      const std::vector<RankInfo> met = register_rank(store, env, mine, limit);
      ASSERT_EQ(static_cast<int>(met.size()), world_size);
      EXPECT_EQ(met.back().process, str("process ", 10000 + world_size - 1, " on host"));
      StoreExchange exchange(store.under("exchange"), rank, world_size);
      const auto result = exchange.run(std::string(64, 'x'), std::chrono::minutes(2), [] {});
      EXPECT_EQ(static_cast<int>(result.values.size()), world_size);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(StoreTraffic, ARankAsksTheSameNumberOfTimesInAnyWorld) {
  double requests_a_rank = 0;
  for (const int world_size : {64, 256, 1024}) {
    Traffic traffic;
    meet(world_size, traffic);
    const double requests = static_cast<double>(traffic.requests) / world_size;
    const double bytes = static_cast<double>(traffic.bytes) / world_size;
    std::cout << world_size << " ranks: " << requests << " requests, "
              << static_cast<double>(traffic.questions) / world_size << " questions and " << bytes / 1024
              << " KiB a rank\n";
    if (requests_a_rank == 0) requests_a_rank = requests;
    EXPECT_NEAR(requests, requests_a_rank, 0.5);
    // Each rank learns what all others are: so many bytes of each.
    EXPECT_LT(bytes, 250.0 * world_size + 20000);
    EXPECT_LT(static_cast<double>(traffic.questions) / world_size, 5000) << "at most one each 10 ms of 50 s";
  }
}

}  // namespace
}  // namespace tessera::comm
