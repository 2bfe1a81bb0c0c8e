// The link to a real device, and a copy of it beside the device's work. Skipped where there is no GPU.
#include "zero/memory/cuda_link.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <string>

#include "core/cuda_plugin.h"
#include "core/error.h"

namespace tessera::zero {
namespace {

/// Why CUDA cannot be used here; empty when it can.
std::string why_no_cuda() {
  try {
    cuda_plugin_symbol("tessera_cuda_pin");
  } catch (const Error& error) {
    return error.what();
  }
  return at::globalContext().hasCUDA() ? "" : "no CUDA device";
}

class CudaLinkTest : public ::testing::TestWithParam<bool> {  // pinned
 protected:
  void SetUp() override {
    if (const std::string reason = why_no_cuda(); !reason.empty()) GTEST_SKIP() << reason;
    link_ = make_cuda_link(device_, GetParam());
  }

  at::Tensor on_host(int64_t numel) { return link_->host_memory(4 * numel).view(at::kFloat); }

  const at::Device device_ = at::Device(at::kCUDA, 0);
  std::shared_ptr<DeviceLink> link_;
};

constexpr int64_t kNumel = 5'000'011;

TEST_P(CudaLinkTest, HostMemoryIsZerosAndCountedWhilePinned) {
  {
    const at::Tensor memory = link_->host_memory(10'000);
    EXPECT_EQ(memory.nbytes(), 10'000u);
    EXPECT_EQ(reinterpret_cast<intptr_t>(memory.data_ptr()) % 4096, 0);
    EXPECT_EQ(memory.count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(link_->pinned_bytes(), GetParam() ? 3 * 4096 : 0);
    EXPECT_EQ(memory.is_pinned(), GetParam());
  }
  EXPECT_EQ(link_->pinned_bytes(), 0);
}

TEST_P(CudaLinkTest, ACopyComesAfterItsMomentAndBeforeWhatFollowsIt) {
  at::Tensor up = on_host(kNumel), down = on_host(kNumel);
  const at::Tensor a = at::empty({kNumel}, at::TensorOptions(device_).dtype(at::kFloat));
  for (int round = 0; round < 20; ++round) {
    up.fill_(static_cast<float>(round));
    const MomentPtr arrived = link_->to_device(a, up, link_->now());
    link_->follow(arrived);
    at::Tensor work = a.clone();
    for (int i = 0; i < 10; ++i) work.add_(1);  // on the compute stream, behind the copy
    const MomentPtr back = link_->to_host(down, work, link_->now());
    link_->wait(back);
    EXPECT_TRUE(link_->passed(back));
    EXPECT_TRUE(down.eq(static_cast<float>(round + 10)).all().item<bool>()) << round;
  }
}

TEST_P(CudaLinkTest, WhatIsIssuedAfterAMomentSeesIt) {
  at::Tensor up = on_host(kNumel);
  const at::Tensor a = at::zeros({kNumel}, at::TensorOptions(device_).dtype(at::kFloat));
  at::Tensor seen = at::zeros_like(a);
  up.fill_(3);
  const MomentPtr arrived = link_->to_device(a, up, link_->now());
  link_->follow(link_->issue_after(arrived, [&] { seen.copy_(a); }));
  EXPECT_TRUE(seen.eq(3).all().item<bool>());
}

TEST_P(CudaLinkTest, AMomentThatHasPassedIsNull) {
  EXPECT_TRUE(link_->passed(nullptr));
  link_->wait(nullptr);
  link_->follow(nullptr);
}

INSTANTIATE_TEST_SUITE_P(Memory, CudaLinkTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Pinned" : "Pageable"; });

}  // namespace
}  // namespace tessera::zero
