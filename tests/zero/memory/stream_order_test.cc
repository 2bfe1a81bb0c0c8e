// StreamOrder, on a device whose streams are numbers: what it tells the device, call by call.
#include "zero/memory/stream_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "core/str.h"

namespace tessera::zero {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

c10::Stream stream(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, kDevice, number); }

/// What the device was told.
std::vector<std::string>& told() {
  static std::vector<std::string> told;
  return told;
}

struct NumberedStreams final : c10::impl::DeviceGuardImplInterface {
  static int64_t& current() {
    static int64_t current = 0;
    return current;
  }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current(), static_cast<int64_t>(next.id())));
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = &current();  // some address
    told().push_back(str("record on ", on.id()));
  }
  void block(void*, const c10::Stream& blocked) const override {
    told().push_back(str(blocked.id(), " waits for it"));
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& on) const override {
    told().push_back(str("memory is used on ", on.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NumberedStreams);

class StreamOrderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    told().clear();
    NumberedStreams::current() = 0;
  }
  const at::Tensor memory_ = at::empty({4});
};

TEST_F(StreamOrderTest, OneStreamIsToldNothing) {
  StreamOrder order(kDevice);
  for (int i = 0; i < 3; ++i) {
    order.follow();
    order.uses(memory_);
  }
  EXPECT_THAT(told(), IsEmpty());
}

TEST_F(StreamOrderTest, AnotherStreamComesAfterTheOneBefore) {
  StreamOrder order(kDevice);
  order.follow();
  const c10::StreamGuard on_1(stream(1));
  order.follow();
  EXPECT_THAT(told(), ElementsAre("record on 0", "1 waits for it"));
  EXPECT_EQ(NumberedStreams::current(), 1);
  order.follow();
  EXPECT_EQ(told().size(), 2u) << "it follows already";
  {
    const c10::StreamGuard on_2(stream(2));
    order.follow();
  }
  order.follow();
  EXPECT_THAT(std::vector(told().begin() + 2, told().end()),
              ElementsAre("record on 1", "2 waits for it", "record on 2", "1 waits for it"));
}

TEST_F(StreamOrderTest, MemoryBelongsToEveryStreamThatUsesIt) {
  StreamOrder order(kDevice);
  order.follow();
  order.uses(memory_);
  const c10::StreamGuard on_1(stream(1));
  order.follow();
  told().clear();
  order.uses(memory_);
  order.uses(at::Tensor());
  EXPECT_THAT(told(), ElementsAre("memory is used on 1"));
}

TEST_F(StreamOrderTest, TheHostHasNoStreams) {
  StreamOrder order(at::kCPU);
  order.follow();
  const c10::StreamGuard on_1(stream(1));
  order.follow();
  order.uses(memory_);
  EXPECT_THAT(told(), IsEmpty());
}

}  // namespace
}  // namespace tessera::zero
