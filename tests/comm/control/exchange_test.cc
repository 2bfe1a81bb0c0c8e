// exchange(): what it and the rendezvous ask of the store and leave in it, and its error when a rank is
// missing.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <functional>
#include <latch>
#include <limits>
#include <thread>

#include "comm/control/store_exchange.h"
#include "comm/gloo/gloo.h"
#include "comm/hybrid/hybrid.h"
#include "comm/init/init.h"
#include "comm/init/transport_communicator.h"
#include "comm/rendezvous/registration.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"

namespace tessera::comm {
namespace {

using testing::error_of;

/// A store that counts what its server is asked, in all ranks together.
class CountingStore final : public c10d::HashStore {
 public:
  std::atomic<int64_t> num_reads = 0;   ///< of values that are known to be there
  std::atomic<int64_t> num_writes = 0;  ///< of any kind
  std::atomic<int64_t> num_checks = 0;  ///< what is there, if anything: a rank that waits asks repeatedly
  std::atomic<size_t> bytes = 0;        ///< of keys and values
  std::atomic<size_t> longest = 0;      ///< value written, bytes

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    note(num_writes, key, value.size(), value.size());
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    auto found = HashStore::compareSet(key, expected, desired);
    note(expected == desired ? num_checks : num_writes, key, expected.size() + desired.size() + found.size(),
         desired.size());
    return found;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    note(amount == 0 ? num_checks : num_writes, key, sizeof amount);
    return HashStore::add(key, amount);
  }
  bool deleteKey(const std::string& key) override {
    note(num_writes, key, 0);
    return HashStore::deleteKey(key);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = HashStore::get(key);
    note(num_reads, key, value.size());
    return value;
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    auto values = HashStore::multiGet(keys);
    ++num_reads;
    for (size_t i = 0; i < keys.size(); ++i) bytes += keys[i].size() + values[i].size();
    return values;
  }
  bool check(const std::vector<std::string>& keys) override {
    ++num_checks;
    for (const std::string& key : keys) bytes += key.size();
    return HashStore::check(keys);
  }

 private:
  void note(std::atomic<int64_t>& count, const std::string& key, size_t value_bytes, size_t written = 0) {
    ++count;
    bytes += key.size() + value_bytes;
    for (size_t before = longest; written > before && !longest.compare_exchange_weak(before, written);) {
    }
  }
};

/// Calls `body(rank)` on a thread for each.
void for_ranks(int size, const std::function<void(int rank)>& body) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
}

// Each rank registers, and takes part in one exchange of 64 bytes a rank, as before the first step. What that
// asks of the store must not grow faster than the number of ranks.
TEST(StoreTraffic, ARankAsksTheSameNumberOfTimesInAnyWorld) {
  double requests_a_rank = 0;
  for (const int world_size : {32, 256}) {
    const auto counts = c10::make_intrusive<CountingStore>();
    const GroupStore store(counts, "the store");
    for_ranks(world_size, [&](int rank) {
      Environment env;
      env.rank = rank;
      env.world_size = world_size;
      WaitLimit limit(std::chrono::minutes(2), Logger(), {});
      const auto process = [](int number) { return str("process ", 10000 + number, " on host"); };
      const std::vector<RankInfo> met =
          register_rank(store, env, {"domain", "domain", process(rank), "10.0.0.1 40000", {}}, limit);
      ASSERT_EQ(static_cast<int>(met.size()), world_size);
      EXPECT_EQ(met.back().process, process(world_size - 1));
      StoreExchange exchange(store.under("exchange"), rank, world_size);
      const auto result = exchange.run(std::string(64, 'x'), std::chrono::minutes(2), [] {});
      EXPECT_EQ(static_cast<int>(result.values.size()), world_size);
    });
    const double requests = static_cast<double>(counts->num_reads + counts->num_writes) / world_size;
    if (requests_a_rank == 0) requests_a_rank = requests;
    EXPECT_NEAR(requests, requests_a_rank, 0.5);
    // Each rank learns what all others are: so many bytes of each.
    EXPECT_LT(static_cast<double>(counts->bytes) / world_size, 250.0 * world_size + 20000);
    EXPECT_LT(counts->num_checks / world_size, 5000) << "at most one each 10 ms of 50 s";
  }
}

// All ranks wait in a collective for two periods, and then it fails on all: what they tell each other must
// not grow faster than the number of ranks either.
TEST(StoreTraffic, WaitsAndFailuresCostARankTheSameInAnyWorld) {
  double wait_of_a_rank = 0, failure_of_a_rank = 0;
  for (const int world_size : {16, 256}) {
    const auto counts = c10::make_intrusive<CountingStore>();
    const GroupStore store(counts, "the store");
    std::vector<int> ranks;
    std::vector<std::unique_ptr<GroupContext>> contexts;
    std::vector<std::shared_ptr<FlightRecorder>> recorders;
    for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
    for (const int rank : ranks) {
      contexts.push_back(std::make_unique<GroupContext>(store, rank, world_size, /*serves_store=*/false));
      recorders.push_back(std::make_shared<FlightRecorder>(rank, ranks, store.under("group"), store));
      recorders.back()->record({.op = "barrier", .label = "end", .dtype = "", .numel = 0});
      contexts.back()->add_group("main", recorders.back());
    }
    const auto num_requests = [&] { return counts->num_reads + counts->num_writes + counts->num_checks; };
    const auto requests_of = [&](const auto& act) {
      const int64_t before = num_requests();
      act();
      return static_cast<double>(num_requests() - before) / world_size;
    };
    const double waits = requests_of([&] {
      for (int period = 0; period < 2; ++period)
        for (const auto& context : contexts) EXPECT_FALSE(context->publish_wait("main", 1));
    });
    const double failures = requests_of([&] {
      for (const auto& recorder : recorders) recorder->report_fault(Fault::kTimeout, 1);
      for (const auto& recorder : recorders) {
        Failure failure;
        failure.number = 1;
        failure.timeout = std::chrono::seconds(3);
        EXPECT_EQ(recorder->diagnose(failure, std::chrono::steady_clock::now() + std::chrono::minutes(2)),
                  "barrier of \"end\", collective 1: all ranks arrived, but it was not done within 3 s");
      }
    });
    if (wait_of_a_rank == 0) {
      wait_of_a_rank = waits;
      failure_of_a_rank = failures;
    }
    EXPECT_NEAR(waits, wait_of_a_rank, 1);
    EXPECT_NEAR(failures, failure_of_a_rank, 1);
    EXPECT_LT(static_cast<double>(counts->bytes) / world_size, 250.0 * world_size + 20000);
  }
}

// The first pass of training exchanges once per unit: requests to the store must not grow with the square of
// the number of ranks.
TEST(StoreExchangeTest, AsksTheStoreALimitedNumberOfTimesARank) {
  constexpr int kSize = 32, kRounds = 20;
  const auto store = c10::make_intrusive<CountingStore>();
  const GroupStore group_store(store, "the store");
  for_ranks(kSize, [&](int rank) {
    StoreExchange exchange(group_store, rank, kSize);
    for (int round = 0; round < kRounds; ++round) {
      const StoreExchange::Result result =
          exchange.run(str(rank, "\n", round, std::string(1, '\0')), std::chrono::seconds(60), [] {});
      ASSERT_EQ(result.values.size(), static_cast<size_t>(kSize)) << result.cause;
      for (int r = 0; r < kSize; ++r) ASSERT_EQ(result.values[r], str(r, "\n", round, std::string(1, '\0')));
    }
  });
  EXPECT_GE(store->num_reads, kRounds) << "rank 0's, of all values at once";
  EXPECT_LE(store->num_reads, 2 * kRounds) << "and where rank 0 is late, that of the last to come";
  EXPECT_LE(store->num_writes, kRounds * (2 * kSize + 3))
      << "the value and the count of each rank, the result, which the last to come writes, too, where rank 0 "
         "is "
         "late, and its end";
}

// c10d's store takes 8 MiB at once.
TEST(StoreExchangeTest, LongValuesAreSentInParts) {
  constexpr int kSize = 3;
  const auto store = c10::make_intrusive<CountingStore>();
  const GroupStore group_store(store, "the store");
  const auto value = [](int rank, size_t bytes) {
    std::string text;
    for (size_t i = 0; i < bytes; ++i)
      text += static_cast<char>(i * 31 + i / 1000 + static_cast<size_t>(rank));
    return text;
  };
  const size_t part = (size_t{4} << 20) / kSize;
  for_ranks(kSize, [&](int rank) {
    StoreExchange exchange(group_store, rank, kSize);
    const std::vector<std::vector<size_t>> rounds = {
        {1, 2 * part + 5, part}, {0, part, part + 1}, {7, 0, 3}};  // bytes, by rank
    for (const std::vector<size_t>& bytes : rounds) {
      const StoreExchange::Result result =
          exchange.run(value(rank, bytes[rank]), std::chrono::seconds(60), [] {});
      ASSERT_EQ(result.values.size(), static_cast<size_t>(kSize)) << result.cause;
      for (int r = 0; r < kSize; ++r) ASSERT_TRUE(result.values[r] == value(r, bytes[r])) << r;
    }
  });
  EXPECT_GE(store->num_reads, 3 + 2 + 1) << "one a part";
  EXPECT_LE(store->num_reads, 2 * (3 + 2 + 1)) << "two where rank 0 is late";
  EXPECT_LT(store->longest, size_t{5} << 20);
}

// A rank that all have met, and that does not go on.
TEST(StoreExchangeTest, ATimeoutSaysWhatWasWaitedFor) {
  const auto store = c10::make_intrusive<CountingStore>();
  const GroupStore group_store(store, "the store");
  StoreExchange exchange(group_store, 0, 2);
  const StoreExchange::Result alone = exchange.run("mine", std::chrono::milliseconds(50), [] {});
  EXPECT_EQ(alone.cause, "timed out after 0.05 s: not all ranks came");
  EXPECT_EQ(alone.missing, std::vector<int>{1});
  const GroupStore second = group_store.under("second");
  StoreExchange stopped(second, 0, 2);
  second.set("value/1", "1\nits");  // it came, and would have been the last
  const StoreExchange::Result result = stopped.run("mine", std::chrono::milliseconds(50), [] {});
  EXPECT_TRUE(result.missing.empty());
  EXPECT_EQ(result.cause, "timed out after 0.05 s: all ranks came, but none has passed on what they said");
}

// Who can connect to a store can remove what is there.
TEST(StoreExchangeTest, WhatIsRemovedWhileARankWaitsIsNamed) {
  for (const std::string key : {"arrived", "value/0"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    StoreExchange exchange(GroupStore(store, "the store"), 0, 2);
    std::jthread stranger([&] {
      while (!store->check({"value/0", "arrived"})) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      store->deleteKey(key);
    });
    const StoreExchange::Result result = exchange.run("mine", std::chrono::hours(1), [] {});
    EXPECT_EQ(result.cause.find(str("the rendezvous no longer has ", key, " as")), 0u) << result.cause;
  }
}

TEST(StoreExchangeTest, AResultThatIsRemovedIsPassedOnAgain) {
  /// Removes the result at once, for the first time.
  class Removing final : public c10d::HashStore {
   public:
    std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                    const std::vector<uint8_t>& desired) override {
      auto found = HashStore::compareSet(key, expected, desired);
      if (key == "result/1" && expected.empty() && !has_removed.exchange(true)) deleteKey(key);
      return found;
    }
    std::atomic<bool> has_removed = false;
  };
  const auto store = c10::make_intrusive<Removing>();
  for_ranks(3, [&](int rank) {
    StoreExchange exchange(GroupStore(store, "the store"), rank, 3);
    const StoreExchange::Result result = exchange.run(std::to_string(rank), std::chrono::hours(1), [] {});
    EXPECT_EQ(result.values, (std::vector<std::string>{"0", "1", "2"})) << result.cause;
  });
  EXPECT_TRUE(store->has_removed);
}

class ExchangeTest : public testing::EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backends, ExchangeTest, ::testing::Values("gloo", "shm", "hybrid", "staged"),
                         testing::backend_name);

TEST_P(ExchangeTest, TheStoreDoesNotGrow) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const GroupStore group_store(store, "the store");
  for_ranks(3, [&](int rank) {
    auto context = std::make_shared<GroupContext>(group_store, rank, 3, false);
    GlooOptions gloo;
    gloo.rank = rank;
    gloo.names = all_ranks(3);
    gloo.timeout = gloo.connect_timeout = std::chrono::seconds(20);
    const auto make = [&](const GroupStore& under, FailureHook hook) -> std::unique_ptr<Transport> {
      if (GetParam() == "hybrid")
        return make_hybrid_transport(
            under, find_hosts(under, rank, {"first", "first", "second"}, gloo.connect_timeout), gloo,
            std::move(hook));
      if (GetParam() == "shm")
        return make_hybrid_transport(under,
                                     connect_hosts(under, std::make_shared<Hosts>(std::vector<int>(3)), rank,
                                                   gloo.names, gloo.connect_timeout),
                                     gloo, std::move(hook));
      return make_gloo_transport(under, gloo, std::move(hook));
    };
    const auto comm = std::make_shared<TransportCommunicator>(context, gloo.timeout, make);
    int64_t num_keys_early = 0;
    for (int i = 0; i < 50; ++i) {
      comm->exchange("value", "growth");
      comm->barrier("everyone has tidied up");
      if (i == 3) num_keys_early = store->getNumKeys();
      comm->barrier("everyone has counted");
    }
    EXPECT_EQ(store->getNumKeys(), num_keys_early);
    comm->barrier("end");
  });
}

TEST_P(ExchangeTest, SendsNumbersStructsAndListsOfThem) {
  struct Progress {
    int64_t step;
    double loss;
    bool operator==(const Progress&) const = default;
  };
  enum class Color : uint8_t { kRed, kBlue };
  testing::run_ranks(
      3, testing::quick_options(GetParam(), std::chrono::seconds(20)), [&](CommunicatorPtr comm) {
        const int64_t big = std::numeric_limits<int64_t>::max() - comm->rank();
        const auto numbers = comm->exchange(big, "numbers");
        const auto flags = comm->exchange(comm->rank() == 1, "flags");
        const auto colors = comm->exchange(comm->rank() == 2 ? Color::kBlue : Color::kRed, "colors");
        const auto structs = comm->exchange(Progress{comm->rank(), 0.1 * comm->rank()}, "structs");
        const auto lists = comm->exchange(std::vector<int>(static_cast<size_t>(comm->rank()), 7), "lists");
        for (int r = 0; r < 3; ++r) {
          EXPECT_EQ(numbers[r], std::numeric_limits<int64_t>::max() - r);
          EXPECT_EQ(flags[r], r == 1);
          EXPECT_EQ(colors[r], r == 2 ? Color::kBlue : Color::kRed);
          EXPECT_EQ(structs[r], (Progress{r, 0.1 * r}));
          EXPECT_EQ(lists[r], std::vector<int>(static_cast<size_t>(r), 7));
        }
      });
}

/// What each rank's `call(comm)` throws.
std::vector<std::string> errors_of(const std::string& backend, int size,
                                   const std::function<void(Communicator&)>& call) {
  std::vector<std::string> errors(static_cast<size_t>(size));
  testing::run_ranks(size, testing::quick_options(backend, std::chrono::seconds(20)),
                     [&](CommunicatorPtr comm) {
                       errors[static_cast<size_t>(comm->rank())] = error_of([&] { call(*comm); });
                     });
  return errors;
}

TEST_P(ExchangeTest, ValuesOfDifferentSizesAreAnError) {
  const auto errors = errors_of(GetParam(), 2, [](Communicator& comm) {
    comm.rank() == 0 ? (void)comm.exchange(1, "plan") : (void)comm.exchange(int64_t{1}, "plan");
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error, "exchange of \"plan\": ranks give values of different sizes");
}

TEST_P(ExchangeTest, NamesTheRanksThatDidNotCome) {
  std::latch others(2);
  const auto errors = errors_of(GetParam(), 4, [&](Communicator& comm) {
    const bool late = comm.rank() % 2 == 1;
    if (late) others.wait();
    const std::string error = error_of([&] { comm.exchange("x", "plan", std::chrono::milliseconds(500)); });
    if (!late) others.count_down();
    throw CommError(error);
  });
  for (const int rank : {0, 2}) {
    EXPECT_EQ(errors[rank],
              "exchange of \"plan\", collective 1: ranks 1 and 3 have not arrived within 0.5 s");
  }
  for (const int rank : {1, 3}) {
    EXPECT_NE(errors[rank].find(str("rank ", rank, " came too late: ")), std::string::npos) << errors[rank];
  }
}

TEST_P(ExchangeTest, DifferentLabelsAreAnError) {
  const auto errors = errors_of(
      GetParam(), 2, [](Communicator& comm) { comm.exchange("x", comm.rank() == 0 ? "plan" : "report"); });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("\"plan\""), error.npos) << error;
    EXPECT_NE(error.find("\"report\""), error.npos) << error;
  }
}

TEST_P(ExchangeTest, ALabelMayHaveLineBreaks) {
  const auto errors = errors_of(GetParam(), 2, [](Communicator& comm) {
    const std::string label = "one\ntwo\n";
    EXPECT_EQ(comm.exchange(str("x\n", comm.rank()), label), (std::vector<std::string>{"x\n0", "x\n1"}));
    comm.exchange("x", comm.rank() == 0 ? label : "plan");
  });
  EXPECT_EQ(errors[0], "rank 0 exchanges \"one two \" but rank 1 exchanges \"plan\"");
  EXPECT_EQ(errors[1], "rank 1 exchanges \"plan\" but rank 0 exchanges \"one two \"");
}

TEST_P(ExchangeTest, ARankThatLeftIsNoticedAtOnce) {
  const auto errors = errors_of(GetParam(), 2, [](Communicator& comm) {
    if (comm.rank() == 0) comm.exchange("x", "plan", std::chrono::hours(1));
  });
  EXPECT_EQ(errors[0], "exchange of \"plan\", collective 1: rank 1 left the group: it has ended");
}

}  // namespace
}  // namespace tessera::comm
