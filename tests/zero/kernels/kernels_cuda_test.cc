// The CUDA kernels against the CPU's: elements to the bit, sums to rounding. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_plugin.h"
#include "core/error.h"
#include "tests/zero/kernels/one_segment.h"
#include "zero/kernels/adam_8bit.h"
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

const at::Device kCuda(at::kCUDA, 0);

Segment make_segment(size_t num_states, at::ScalarType grad_dtype, at::ScalarType param_dtype,
                     int64_t numel = 3'000'017) {
  at::manual_seed(17);
  Segment segment;
  segment.master = at::randn({numel});
  segment.grad = at::randn({numel}).to(grad_dtype);
  for (size_t i = 0; i < num_states; ++i) segment.state.push_back(at::rand({numel}));
  segment.param = at::zeros({numel}, param_dtype);
  return segment;
}

Segment on_cuda(const Segment& segment) {
  Segment copy{segment.master.to(kCuda), segment.grad.to(kCuda), {}, segment.param.to(kCuda)};
  for (const at::Tensor& state : segment.state) copy.state.push_back(state.to(kCuda));
  return copy;
}

Segment part_of(const Segment& segment, int64_t begin, int64_t end) {
  Segment part{segment.master.slice(0, begin, end),
               segment.grad.slice(0, begin, end),
               {},
               segment.param.slice(0, begin, end)};
  for (const at::Tensor& state : segment.state) part.state.push_back(state.slice(0, begin, end));
  return part;
}

/// The whole of it, also what no pass should have touched.
void expect_equal_to_cpu(const Segment& found, const Segment& expected) {
  // Centered RMSprop makes NaNs of random states.
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return at::equal(a.cpu().nan_to_num(7), b.nan_to_num(7));
  };
  EXPECT_TRUE(same(found.master, expected.master));
  EXPECT_TRUE(same(found.param, expected.param));
  for (size_t i = 0; i < expected.state.size(); ++i) EXPECT_TRUE(same(found.state[i], expected.state[i]));
}

/// Segments that begin and end anywhere, of one element and of none, more than a launch takes.
std::vector<std::pair<int64_t, int64_t>> odd_cuts(int64_t numel) {
  std::vector<std::pair<int64_t, int64_t>> cuts;
  int64_t begin = 1;
  for (int i = 0; i < 100; ++i) {
    const int64_t end = begin + (i % 5 == 0 ? i / 5 : 37 * i % 9'001);
    cuts.emplace_back(begin, end);
    begin = end + i % 3;
  }
  cuts.emplace_back(begin, numel - 3);
  return cuts;
}

std::vector<SegmentUpdate> cut(const Segment& whole, const std::vector<Hyper>& groups) {
  std::vector<SegmentUpdate> updates;
  for (const auto& [begin, end] : odd_cuts(whole.master.numel())) {
    const size_t i = updates.size();
    updates.push_back(
        {&groups[i / 7 % groups.size()], static_cast<int64_t>(1 + i % 4), part_of(whole, begin, end)});
  }
  return updates;
}

TEST_F(KernelsOnCuda, UpdatesEqualTheCpus) {
  Hyper hyper;
  hyper.weight_decay = 0.1;
  for (int round = 0; round < 4; ++round) {
    hyper.momentum = round % 2 == 0 ? 0.0 : 0.9;
    hyper.amsgrad = hyper.centered = round / 2 != 0;
    hyper.maximize = round == 1;
    for (OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSGD,
                               OptimizerKind::kAdagrad, OptimizerKind::kRMSprop, OptimizerKind::kLion}) {
      for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const Segment cpu = make_segment(state_names(kind, hyper).size(), dtype, dtype);
        const Segment cuda = on_cuda(cpu);
        update(kind, hyper, 3, 0.5, cpu);
        update(kind, hyper, 3, 0.5, cuda);
        expect_equal_to_cpu(cuda, cpu);
      }
    }
  }
}

TEST_F(KernelsOnCuda, ManySegmentsAtOddPlacesEqualTheCpus) {
  std::vector<Hyper> groups(2);
  groups[0].weight_decay = 0.1;
  for (OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSGD, OptimizerKind::kLion})
    for (at::ScalarType grad : {at::kFloat, at::kBFloat16, at::kHalf})
      for (at::ScalarType param : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const Segment cpu = make_segment(state_names(kind, groups[0]).size(), grad, param);
        const Segment cuda = on_cuda(cpu);
        update(kind, 0.5, cut(cpu, groups));
        update(kind, 0.5, cut(cuda, groups));
        expect_equal_to_cpu(cuda, cpu);
      }
}

// SGD with and without momentum are different rules: the kernels of different launches.
TEST_F(KernelsOnCuda, RulesMayAlternate) {
  std::vector<Hyper> groups(2);
  groups[1].momentum = 0.9;
  const Segment cpu = make_segment(1, at::kFloat, at::kBFloat16), cuda = on_cuda(cpu);
  const auto updates = [&](const Segment& whole) {
    std::vector<SegmentUpdate> all = cut(whole, groups);
    for (SegmentUpdate& each : all)
      if (each.hyper->momentum == 0) each.segment.state.clear();
    return all;
  };
  update(OptimizerKind::kSGD, 1.0, updates(cpu));
  update(OptimizerKind::kSGD, 1.0, updates(cuda));
  expect_equal_to_cpu(cuda, cpu);
}

// Where no shift aligns all arrays.
TEST_F(KernelsOnCuda, ArraysThatDoNotAlignTogetherEqualTheCpus) {
  constexpr int64_t kNumel = 100'003;
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Segment cpu = make_segment(2, dtype, dtype, kNumel + 8), cuda = on_cuda(cpu);
    const auto shifted = [&](const Segment& whole) {
      Segment part = part_of(whole, 0, kNumel);
      part.grad = whole.grad.slice(0, 3, 3 + kNumel);
      part.param = whole.param.slice(0, 1, 1 + kNumel);
      return part;
    };
    update(OptimizerKind::kAdamW, {}, 2, 0.5, shifted(cpu));
    update(OptimizerKind::kAdamW, {}, 2, 0.5, shifted(cuda));
    expect_equal_to_cpu(cuda, cpu);
  }
}

TEST_F(KernelsOnCuda, LambEqualsTheCpus) {
  std::vector<Hyper> groups(2);
  groups[0].weight_decay = 0.1;
  const Segment cpu = make_segment(2, at::kBFloat16, at::kBFloat16), cuda = on_cuda(cpu);
  const std::vector<SegmentUpdate> on_cpu = cut(cpu, groups), on_device = cut(cuda, groups);
  const auto count = static_cast<int64_t>(on_cpu.size());
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(count - i);  // row 0 is nobody's
  at::Tensor expected = at::zeros({count + 1, 2}, at::kDouble), found = expected.to(kCuda);
  lamb_norms(0.5, on_cpu, expected, rows);
  lamb_norms(0.5, on_device, found, rows);
  EXPECT_TRUE(at::allclose(found.cpu(), expected, 1e-12, 0));
  const std::vector<double> ratios(on_cpu.size(), 1.5);
  lamb_apply(on_cpu, ratios);
  lamb_apply(on_device, ratios);
  expect_equal_to_cpu(cuda, cpu);
}

TEST_F(KernelsOnCuda, NormsAreDeterministicAndFindWhatIsNotFinite) {
  at::manual_seed(18);
  for (int64_t numel : {0, 1, 255, 2'049, 4'096, 3'000'017}) {
    const at::Tensor cpu = at::randn({numel});
    const at::Tensor cuda = cpu.to(kCuda);
    const double expected = squared_norm(cpu).sum_of_squares;
    const double found = squared_norm(cuda).sum_of_squares;
    EXPECT_NEAR(found, expected, 1e-12 * expected);
    EXPECT_EQ(found, squared_norm(cuda.clone()).sum_of_squares);
    for (int64_t offset : {1, 2, 3, 7}) {
      const at::Tensor moved = at::empty({numel + offset}, cuda.options()).slice(0, offset);
      moved.copy_(cuda);
      EXPECT_EQ(squared_norm(moved).sum_of_squares, found) << "offset " << offset;
    }
    EXPECT_EQ(first_nonfinite(cuda), -1);
    if (numel < 3) continue;
    cuda[numel - 1] = std::numeric_limits<float>::quiet_NaN();
    cuda[numel / 2] = std::numeric_limits<float>::infinity();
    EXPECT_EQ(squared_norm(cuda).num_nonfinite, 2);
    EXPECT_EQ(first_nonfinite(cuda), numel / 2);
  }
}

// What else is in a launch, or whether it is one, changes nothing.
TEST_F(KernelsOnCuda, NormsOfManyEqualThoseOfEach) {
  at::manual_seed(19);
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor whole = at::randn({3'000'017}).to(dtype).to(kCuda);
    std::vector<at::Tensor> parts;
    std::vector<int64_t> rows;
    for (const auto& [begin, end] : odd_cuts(whole.numel())) {
      rows.push_back(static_cast<int64_t>(parts.size()));
      parts.push_back(whole.slice(0, begin, end));
    }
    const at::Tensor sums =
        at::full({static_cast<int64_t>(parts.size()), 2}, -1, whole.options().dtype(at::kDouble));
    squared_norms(parts, sums, rows);
    const at::Tensor found = sums.cpu();
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(found[static_cast<int64_t>(i)][0].item<double>(), squared_norm(parts[i]).sum_of_squares);
      EXPECT_EQ(found[static_cast<int64_t>(i)][1].item<double>(), 0);
    }
  }
}

TEST_F(KernelsOnCuda, Adam8bitHasTheCpusBits) {
  at::manual_seed(3);
  const Hyper hyper{.lr = 0.05, .weight_decay = 0.1};
  for (const int64_t numel : {1, 255, 257, 100'000, 3'000'017}) {
    const int64_t blocks = num_blocks_8bit(numel);
    // Each begins anywhere in memory.
    std::vector<at::Tensor> on_cpu = {
        at::randn({numel + 1}), at::full({numel + 1}, code_of_zero(true), at::kByte), at::zeros({blocks + 1}),
        at::full({numel + 1}, code_of_zero(false), at::kByte), at::zeros({blocks + 1})};
    std::vector<at::Tensor> on_device;
    for (const at::Tensor& tensor : on_cpu) on_device.push_back(tensor.to(kCuda));
    for (int64_t step = 1; step <= 3; ++step) {
      at::Tensor gradient = at::randn({numel}) * at::pow(10.0, at::randn({numel}));
      if (numel > 1'000) gradient.narrow(0, 256, 256).zero_();
      for (auto* const tensors : {&on_cpu, &on_device}) {
        const auto part = [&](size_t i) { return (*tensors)[i].slice(0, 1); };
        adam_8bit(part(0), gradient.to((*tensors)[0].device()), {part(1), part(2)}, {part(3), part(4)}, hyper,
                  step);
      }
    }
    for (size_t i = 0; i < on_cpu.size(); ++i)
      EXPECT_TRUE(at::equal(on_device[i].cpu(), on_cpu[i])) << numel << " " << i;
  }
}

}  // namespace
}  // namespace tessera::kernels
