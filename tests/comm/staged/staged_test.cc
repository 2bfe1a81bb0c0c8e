// What is the staged transport's own: bits, copies and their order, its buffer, and a device that fails. What
// it has in common with other backends is in collectives_test, failures_test, split_test and
// killed_rank_test.
#include "comm/staged/staged.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <mutex>
#include <random>
#include <thread>

#include "core/str.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using testing::error_of;
using testing::filled;
using ::testing::HasSubstr;
using testing::quick_options;
using testing::summed;
using testing::with_host_devices;
using Device = testing::HostOnlyTransfer;

/// By rank, the same device for all of the rank's groups.
GivenMachine on(const std::vector<std::shared_ptr<HostTransfer>>& devices) {
  return {.transfer = [devices](int rank) { return devices[static_cast<size_t>(rank)]; }};
}

std::vector<std::shared_ptr<HostTransfer>> host_devices(int num, Device::Mode mode) {
  std::vector<std::shared_ptr<HostTransfer>> devices;
  for (int rank = 0; rank < num; ++rank) devices.push_back(std::make_shared<Device>(mode));
  return devices;
}

class StagedTest : public ::testing::TestWithParam<Device::Mode> {};
INSTANTIATE_TEST_SUITE_P(Copies, StagedTest,
                         ::testing::Values(Device::Mode::kAtOnce, Device::Mode::kLast,
                                           Device::Mode::kOnThreads));

// Several groups whose collectives are in flight at once and are issued in other orders.
TEST_P(StagedTest, GroupsNeedNoCommonOrder) {
  run_threads(3, quick_options("staged"), with_host_devices(GetParam()), [](CommunicatorPtr comm) {
    const CommunicatorPtr twin = comm->duplicate("twin");
    for (int round = 0; round < 5; ++round) {
      const at::Tensor first = filled(comm->rank(), round, 3001, at::kFloat), second = first.clone();
      const bool swap = comm->rank() == 1;
      WorkPtr one = (swap ? twin : comm)->all_reduce(swap ? second : first, "sum");
      WorkPtr two = (swap ? comm : twin)->all_reduce(swap ? first : second, "sum");
      two->wait();
      one->wait();
      EXPECT_TRUE(at::equal(first, summed(3, round, 3001, at::kFloat)));
      EXPECT_TRUE(at::equal(second, first));
    }
  });
}

// Sums are the host's transport's, bit for bit.
TEST_P(StagedTest, SumsHaveTheBitsOfTheTransport) {
  constexpr int kSize = 4;
  constexpr int64_t kNumel = 20'001;
  const auto results_of = [&](const std::string& backend, const GivenMachine& given) {
    std::vector<std::vector<at::Tensor>> results(kSize);
    run_threads(kSize, quick_options(backend), given, [&](CommunicatorPtr comm) {
      for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        std::mt19937 random(static_cast<unsigned>(comm->rank()));
        std::normal_distribution<float> normal;
        const at::Tensor values = at::empty({kSize * kNumel});
        for (int64_t i = 0; i < values.numel(); ++i) values.data_ptr<float>()[i] = normal(random);
        const at::Tensor full = values.to(type, /*non_blocking=*/false, /*copy=*/true);
        const at::Tensor shard = at::ones({kNumel}, type == at::kDouble ? at::kDouble : at::kFloat);
        comm->reduce_scatter(full, {shard, 1.0 / 3, /*add=*/true}, "gradients")->wait();
        full.copy_(values);
        comm->all_reduce(full, "all", 1.0 / 3)->wait();
        auto& mine = results[static_cast<size_t>(comm->rank())];
        mine.push_back(shard);
        mine.push_back(full);
      }
    });
    return results;
  };
  const auto expected = results_of("shm", {});
  const auto found = results_of("staged", with_host_devices(GetParam()));
  for (size_t rank = 0; rank < kSize; ++rank)
    for (size_t i = 0; i < expected[rank].size(); ++i)
      EXPECT_TRUE(at::equal(found[rank][i], expected[rank][i])) << rank << ", result " << i;
}

// Each element that a rank gives goes down once, and each that it gets comes up once; one buffer has all.
TEST_P(StagedTest, CopiesWhatIsNeededThroughOneBuffer) {
  constexpr int64_t kNumel = 1000, kBytes = 4 * kNumel;
  const auto devices = host_devices(2, GetParam());
  run_threads(2, quick_options("staged"), on(devices), [&](CommunicatorPtr comm) {
    auto& device = static_cast<Device&>(*devices[static_cast<size_t>(comm->rank())]);
    const at::Tensor full = at::ones({2 * kNumel}), shard = at::ones({kNumel});
    const auto copies_of = [&](const auto& collective) {
      device.forget_copies();
      collective()->wait();
      return std::pair(device.bytes(Device::Direction::kDown), device.bytes(Device::Direction::kUp));
    };
    using Bytes = std::pair<int64_t, int64_t>;  // down, up
    EXPECT_EQ(copies_of([&] { return comm->all_gather(full, shard, "parameters"); }),
              Bytes(kBytes, 2 * kBytes));
    EXPECT_EQ(copies_of([&] { return comm->reduce_scatter(full, {shard}, "gradients"); }),
              Bytes(2 * kBytes, kBytes));
    EXPECT_EQ(copies_of([&] { return comm->reduce_scatter(full, {shard, 1, /*add=*/true}, "gradients"); }),
              Bytes(3 * kBytes, kBytes));
    EXPECT_EQ(copies_of([&] { return comm->all_reduce(full, "sum"); }), Bytes(2 * kBytes, 2 * kBytes));
    EXPECT_EQ(copies_of([&] { return comm->broadcast(full, 1, "copy"); }),
              comm->rank() == 1 ? Bytes(2 * kBytes, 0) : Bytes(0, 2 * kBytes));
    EXPECT_GE(device.pinned_bytes(), 3 * kBytes);
    EXPECT_LT(device.pinned_bytes(), 3 * kBytes + 64);
    comm->barrier("counted");
  });
  for (const auto& device : devices) {
    EXPECT_EQ(static_cast<Device&>(*device).pinned_bytes(), 0);
    EXPECT_TRUE(static_cast<Device&>(*device).violations().empty());
  }
}

/// A device whose stream is behind: what it has been given is carried out when a copy that comes after it is.
class StreamBehind final : public HostTransfer {
 public:
  /// The stream is given this.
  void give(std::function<void()> work) { stream_ = std::make_shared<Point>(std::move(work)); }

  at::Tensor host_memory(int64_t bytes) override { return inner_.host_memory(bytes); }
  int64_t pinned_bytes() const override { return inner_.pinned_bytes(); }
  EventPtr record() override { return stream_; }
  EventPtr d2h(const at::Tensor& host, const at::Tensor& device, const EventPtr& after) override {
    pass(after);
    return inner_.d2h(host, device, nullptr);
  }
  EventPtr h2d(const at::Tensor& device, const at::Tensor& host, const EventPtr& after) override {
    pass(after);
    return inner_.h2d(device, host, nullptr);
  }
  void wait(const EventPtr& event) override { inner_.wait(event); }
  EventPtr issue_after(const EventPtr& event, c10::function_ref<void()> issue) override {
    return inner_.issue_after(event, issue);
  }
  bool query(const EventPtr& event) override { return inner_.query(event); }
  void synchronize(const EventPtr& event) override { inner_.synchronize(event); }
  void synchronize() override { inner_.synchronize(); }

 private:
  struct Point final : Event {
    explicit Point(std::function<void()> work) : work(std::move(work)) {}
    mutable std::once_flag done;
    const std::function<void()> work;
  };
  static void pass(const EventPtr& event) {
    if (!event) return;
    const auto& point = static_cast<const Point&>(*event);
    std::call_once(point.done, point.work);
  }

  Device inner_{Device::Mode::kAtOnce};
  std::shared_ptr<const Point> stream_;
};

TEST(Staged, WhatTheStreamWasGivenBeforeComesFirst) {
  std::vector<std::shared_ptr<HostTransfer>> devices;
  for (int rank = 0; rank < 2; ++rank) devices.push_back(std::make_shared<StreamBehind>());
  run_threads(2, quick_options("staged"), on(devices), [&](CommunicatorPtr comm) {
    auto& device = static_cast<StreamBehind&>(*devices[static_cast<size_t>(comm->rank())]);
    const at::Tensor sum = at::zeros({8}), copied = at::zeros({8});
    device.give([&] { sum.fill_(comm->rank() + 1); });
    comm->all_reduce(sum, "sum")->wait();
    EXPECT_TRUE(sum.eq(3).all().item<bool>());
    float read = -1;
    device.give([&] {
      read = copied[0].item<float>();
      if (comm->rank() == 0) copied.fill_(5);
    });
    comm->broadcast(copied, 0, "copy")->wait();
    EXPECT_EQ(read, 0);
    EXPECT_TRUE(copied.eq(5).all().item<bool>());
  });
}

TEST(Staged, ADeviceThatFailsIsItsRanksErrorAndEndsTheOthers) {
  const auto devices = host_devices(3, Device::Mode::kAtOnce);
  std::vector<std::string> errors(3);
  run_threads(3, quick_options("staged"), on(devices), [&](CommunicatorPtr comm) {
    const at::Tensor before = at::ones({8}), sum = at::ones({8});
    const WorkPtr done = comm->all_reduce(before, "before");
    done->wait();
    if (comm->rank() == 1) static_cast<Device&>(*devices[1]).fail_at(0);
    const WorkPtr failing = comm->all_reduce(sum, "sum");
    errors[static_cast<size_t>(comm->rank())] = error_of([&] { failing->wait(); });
    EXPECT_NO_THROW(done->wait()) << "what was there stays";
    EXPECT_NE(error_of([&] { comm->all_reduce(sum, "next")->wait(); }), "");
  });
  EXPECT_THAT(errors[1], HasSubstr("the device has failed"));
  for (const int rank : {0, 2}) EXPECT_NE(errors[static_cast<size_t>(rank)], "");
}

TEST(Staged, AHostWithoutRoomIsNamed) {
  const auto devices = host_devices(2, Device::Mode::kAtOnce);
  std::vector<std::string> errors(2);
  run_threads(2, quick_options("staged"), on(devices), [&](CommunicatorPtr comm) {
    if (comm->rank() == 0) static_cast<Device&>(*devices[0]).refuse_memory();
    errors[static_cast<size_t>(comm->rank())] =
        error_of([&] { comm->all_reduce(at::ones({8}), "sum")->wait(); });
  });
  EXPECT_THAT(errors[0], HasSubstr("no room for 32 bytes"));
}

// The collective that fails is reported by the group's thread, while this rank's own does something else.
TEST(Staged, ALateRankEndsACollectiveThatNobodyWaitsFor) {
  std::latch is_known(1);
  run_threads(2, quick_options("staged", milliseconds(300)), with_host_devices(), [&](CommunicatorPtr comm) {
    at::Tensor buffer = at::ones({8});
    comm->all_reduce(buffer, "unit 0")->wait();
    if (comm->rank() == 1) {
      is_known.wait();
      error_of([&] { comm->all_reduce(buffer, "unit 1")->wait(); });
      return;
    }
    comm->all_reduce(buffer, "unit 1");  // neither waited for nor polled
    std::this_thread::sleep_for(milliseconds(1000));
    EXPECT_THAT(error_of([&] { comm->exchange("", "what was learnt"); }),
                HasSubstr("rank 1 has not arrived within 0.3 s"));
    is_known.count_down();
  });
}

TEST(Staged, ManyInFlightAndNoneWaitedFor) {
  run_threads(3, quick_options("staged"), with_host_devices(), [](CommunicatorPtr comm) {
    constexpr int kNum = 500;
    const at::Tensor buffers = at::empty({kNum, 6});
    std::vector<WorkPtr> works;
    for (int i = 0; i < kNum; ++i) {
      buffers[i].copy_(filled(comm->rank(), i, 6, at::kFloat));
      works.push_back(comm->all_reduce(buffers[i], str("buffer ", i)));
    }
    for (int i = 0; i < kNum; i += 7) works[static_cast<size_t>(i)].reset();
    works.back()->wait();
    for (int i = 0; i < kNum; ++i) ASSERT_TRUE(at::equal(buffers[i], summed(3, i, 6, at::kFloat))) << i;
  });
}

TEST(Staged, WithoutADeviceIsRefused) {
  EXPECT_EQ(error_of([] { run_threads(2, quick_options("staged"), [](CommunicatorPtr) {}); }),
            "backend \"staged\" moves CUDA tensors; CPU tensors need \"shm\", \"hybrid\" or \"gloo\"");
}

}  // namespace
}  // namespace tessera::comm
