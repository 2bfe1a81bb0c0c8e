// The CUDA kernels against the CPU's: elements to the bit, sums to rounding. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/cuda_plugin.h"
#include "core/error.h"
#include "zero/kernels/kernels.h"

namespace tessera::kernels {
namespace {

/// Why CUDA cannot be used here; empty when it can.
std::string why_no_cuda() {
  try {
    cuda_plugin_symbol("tessera_cuda_update");
  } catch (const Error& error) {
    return error.what();
  }
  return at::globalContext().hasCUDA() ? "" : "no CUDA device";
}

class KernelsOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_no_cuda(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

Segment make_segment(size_t num_states, at::ScalarType grad_dtype, at::ScalarType param_dtype,
                     at::Device device) {
  constexpr int64_t kNumel = 3'000'017;  // more than one element for each thread of the largest grid
  at::manual_seed(17);
  Segment segment;
  segment.master = at::randn({kNumel}).to(device);
  segment.grad = at::randn({kNumel}).to(grad_dtype).to(device);
  for (size_t i = 0; i < num_states; ++i) segment.state.push_back(at::rand({kNumel}).to(device));
  segment.param = at::zeros({kNumel}, param_dtype).to(device);
  return segment;
}

void expect_equal_to_cpu(const Segment& found, const Segment& expected) {
  EXPECT_TRUE(at::equal(found.master.cpu(), expected.master));
  EXPECT_TRUE(at::equal(found.param.cpu(), expected.param));
  for (size_t i = 0; i < expected.state.size(); ++i)
    EXPECT_TRUE(at::equal(found.state[i].cpu(), expected.state[i]));
}

TEST_F(KernelsOnCuda, UpdatesEqualTheCpus) {
  Hyper hyper;
  hyper.weight_decay = 0.1;
  for (double momentum : {0.0, 0.9}) {
    hyper.momentum = momentum;
    for (OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSGD,
                               OptimizerKind::kAdagrad, OptimizerKind::kLion}) {
      for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const size_t num_states = state_names(kind, hyper).size();
        const Segment cpu = make_segment(num_states, dtype, dtype, at::kCPU);
        const Segment cuda = make_segment(num_states, dtype, dtype, at::Device(at::kCUDA, 0));
        update(kind, hyper, 3, 0.5, cpu);
        update(kind, hyper, 3, 0.5, cuda);
        expect_equal_to_cpu(cuda, cpu);
      }
    }
  }
}

TEST_F(KernelsOnCuda, LambEqualsTheCpus) {
  Hyper hyper;
  hyper.weight_decay = 0.1;
  const Segment cpu = make_segment(2, at::kBFloat16, at::kBFloat16, at::kCPU);
  const Segment cuda = make_segment(2, at::kBFloat16, at::kBFloat16, at::Device(at::kCUDA, 0));
  const LambPart expected = lamb_norms(hyper, 3, 0.5, cpu);
  const LambPart found = lamb_norms(hyper, 3, 0.5, cuda);
  EXPECT_NEAR(found.weight_sq, expected.weight_sq, 1e-12 * expected.weight_sq);
  EXPECT_NEAR(found.update_sq, expected.update_sq, 1e-12 * expected.update_sq);
  lamb_apply(hyper, 3, 1.5, cpu);
  lamb_apply(hyper, 3, 1.5, cuda);
  expect_equal_to_cpu(cuda, cpu);
}

TEST_F(KernelsOnCuda, NormsAreDeterministicAndFindWhatIsNotFinite) {
  at::manual_seed(18);
  for (int64_t numel : {0, 1, 255, 2'049, 3'000'017}) {
    const at::Tensor cpu = at::randn({numel});
    const at::Tensor cuda = cpu.to(at::Device(at::kCUDA, 0));
    const double expected = squared_norm(cpu).sum_of_squares;
    const double found = squared_norm(cuda).sum_of_squares;
    EXPECT_NEAR(found, expected, 1e-12 * expected);
    EXPECT_EQ(found, squared_norm(cuda.clone()).sum_of_squares);
    EXPECT_EQ(first_nonfinite(cuda), -1);
    if (numel < 3) continue;
    cuda[numel - 1] = std::numeric_limits<float>::quiet_NaN();
    cuda[numel / 2] = std::numeric_limits<float>::infinity();
    EXPECT_EQ(squared_norm(cuda).num_nonfinite, 2);
    EXPECT_EQ(first_nonfinite(cuda), numel / 2);
  }
}

}  // namespace
}  // namespace tessera::kernels
