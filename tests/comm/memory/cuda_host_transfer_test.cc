// The link to a real device, and a copy of it beside the device's work. Skipped where there is no GPU.
#include "comm/memory/cuda_host_transfer.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <string>

#include "core/cuda_plugin.h"
#include "core/error.h"

namespace tessera::comm {
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

class CudaHostTransferTest : public ::testing::TestWithParam<bool> {  // pinned
 protected:
  void SetUp() override {
    if (const std::string reason = why_no_cuda(); !reason.empty()) GTEST_SKIP() << reason;
    at::globalContext().lazyInitDevice(at::kCUDA);  // before that no memory counts as pinned
    transfer_ = make_cuda_host_transfer(device_, GetParam());
  }

  at::Tensor on_host(int64_t numel) { return transfer_->host_memory(4 * numel).view(at::kFloat); }

  const at::Device device_ = at::Device(at::kCUDA, 0);
  std::shared_ptr<HostTransfer> transfer_;
};

constexpr int64_t kNumel = 5'000'011;

TEST_P(CudaHostTransferTest, HostMemoryIsZerosAndCountedWhilePinned) {
  {
    const at::Tensor memory = transfer_->host_memory(10'000);
    EXPECT_EQ(memory.nbytes(), 10'000u);
    EXPECT_EQ(reinterpret_cast<intptr_t>(memory.data_ptr()) % 4096, 0);
    EXPECT_EQ(memory.count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(transfer_->pinned_bytes(), GetParam() ? 3 * 4096 : 0);
    EXPECT_EQ(memory.is_pinned(), GetParam());
  }
  EXPECT_EQ(transfer_->pinned_bytes(), 0);
}

TEST_P(CudaHostTransferTest, ACopyComesAfterItsEventAndBeforeWhatFollowsIt) {
  at::Tensor up = on_host(kNumel), down = on_host(kNumel);
  const at::Tensor a = at::empty({kNumel}, at::TensorOptions(device_).dtype(at::kFloat));
  for (int round = 0; round < 20; ++round) {
    up.fill_(static_cast<float>(round));
    const EventPtr arrived = transfer_->h2d(a, up, transfer_->record());
    transfer_->wait(arrived);
    at::Tensor work = a.clone();
    for (int i = 0; i < 10; ++i) work.add_(1);  // on the compute stream, behind the copy
    const EventPtr back = transfer_->d2h(down, work, transfer_->record());
    transfer_->synchronize(back);
    EXPECT_TRUE(transfer_->query(back));
    EXPECT_TRUE(down.eq(static_cast<float>(round + 10)).all().item<bool>()) << round;
  }
}

// A thread of a transport copies what a forward under inference mode gathers into.
TEST_P(CudaHostTransferTest, TensorsOfInferenceModeAreCopied) {
  at::Tensor host = on_host(kNumel).fill_(3), back = on_host(kNumel), device;
  {
    const c10::InferenceMode evaluation;
    device = at::empty({kNumel}, at::TensorOptions(device_).dtype(at::kFloat));
  }
  const EventPtr there = transfer_->h2d(device, host, transfer_->record());
  transfer_->synchronize(transfer_->d2h(back, device, there));
  EXPECT_TRUE(at::equal(back, host));
}

TEST_P(CudaHostTransferTest, WhatIsIssuedAfterAnEventSeesIt) {
  at::Tensor up = on_host(kNumel);
  const at::Tensor a = at::zeros({kNumel}, at::TensorOptions(device_).dtype(at::kFloat));
  at::Tensor seen = at::zeros_like(a);
  up.fill_(3);
  const EventPtr arrived = transfer_->h2d(a, up, transfer_->record());
  transfer_->wait(transfer_->issue_after(arrived, [&] { seen.copy_(a); }));
  EXPECT_TRUE(seen.eq(3).all().item<bool>());
}

TEST_P(CudaHostTransferTest, AnEventThatHasPassedIsNull) {
  EXPECT_TRUE(transfer_->query(nullptr));
  transfer_->synchronize(nullptr);
  transfer_->wait(nullptr);
}

INSTANTIATE_TEST_SUITE_P(Memory, CudaHostTransferTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Pinned" : "Pageable"; });

}  // namespace
}  // namespace tessera::comm
