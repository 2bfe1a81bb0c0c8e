// The CPU loops. Data moves through blocks that stay in the L1 cache: a block of the gradient is read
// as fp32, one simple loop applies the rule, and the new weights are cast out. So there is one loop
// an optimizer, not one for each combination of dtypes, and g++ vectorises all of them
// (CMakeLists.txt sets what it needs for that).
//
// The same bits on every CPU: With -ffp-contract=off an element's operations are IEEE-rounded one by
// one, and sums go through kLanes fixed lanes, so SSE2, AVX2 and AVX-512 give the same bits:
// TESSERA_EVERY_CPU compiles the loops for each.
#include <cmath>
#include <variant>

#include "core/every_cpu.h"
#include "core/float_blocks.h"
#include "zero/kernels/passes.h"

namespace tessera::kernels::cpu {
namespace {

constexpr int64_t kBlock = 1024;  // elements; a multiple of kLanes
constexpr int kLanes = 16;
static_assert(kBlock % kLanes == 0);

struct Block {
  alignas(64) float values[kBlock];
};

/// Asks for the block that follows the elements [begin, begin + n): the machine's
/// own prefetcher stops at every 4 KiB.
void prefetch_next(const void* data, DType dtype, int64_t begin, int64_t n, int64_t numel) {
  if (begin + n + kBlock > numel) return;
  const char* next = static_cast<const char*>(data) + (begin + n) * size_bytes(dtype);
  for (int64_t byte = 0; byte < kBlock * size_bytes(dtype); byte += 64) __builtin_prefetch(next + byte);
}

/// Elements [begin, begin + n) as fp32: in place where they are fp32 already.
const float* as_float(const ConstSpan& span, int64_t begin, int64_t n, Block& block) {
  prefetch_next(span.data, span.dtype, begin, n, span.numel);
  if (span.dtype == DType::kFloat32) return static_cast<const float*>(span.data) + begin;
  read_floats(span.data, span.dtype, begin, n, block.values);
  return block.values;
}

TESSERA_EVERY_CPU void multiply(const float* in, float factor, int64_t n, float* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * factor;
}

/// The same of the gradient, times grad_scale.
const float* scaled_grad(const UpdateArgs& args, int64_t begin, int64_t n, Block& block) {
  const float* grad = as_float({args.grad, args.grad_dtype, args.numel}, begin, n, block);
  if (args.grad_scale == 1.0f) return grad;
  multiply(grad, args.grad_scale, n, block.values);
  return block.values;
}

/// Calls visit(begin, n) for each block.
template <class Visit>
void for_blocks(int64_t numel, const Visit& visit) {
  for (int64_t begin = 0; begin < numel; begin += kBlock)
    visit(begin, numel - begin < kBlock ? numel - begin : kBlock);
}

/// lanes[i % kLanes] += x[i] * x[i] in fp64.
TESSERA_EVERY_CPU void add_squares(const float* x, int64_t n, double* lanes) {
  double sums[kLanes];  // in registers, which `lanes` would not be
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(x[i + lane]);
  for (int lane = 0; i + lane < n; ++lane)
    sums[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(x[i + lane]);
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
}

/// Sum of squares over kLanes interleaved lanes, added up in one fixed order at the end.
class Lanes {
 public:
  void add(const float* x, int64_t n) { add_squares(x, n, sums_); }

  double total() const {
    double sum = 0;
    for (double lane : sums_) sum += lane;
    return sum;
  }

 private:
  double sums_[kLanes] = {};
};

/// Slow path of squared_norm: the finite elements in the same lanes (a zero
/// adds nothing), the others counted.
NormPart squared_norm_of_finite(const ConstSpan& grad) {
  Block block;
  Lanes lanes;
  NormPart part;
  for_blocks(grad.numel, [&](int64_t begin, int64_t n) {
    read_floats(grad.data, grad.dtype, begin, n, block.values);
    for (int64_t i = 0; i < n; ++i) {
      const bool finite = is_finite(block.values[i]);
      part.num_nonfinite += finite ? 0 : 1;
      block.values[i] = finite ? block.values[i] : 0.0f;
    }
    lanes.add(block.values, n);
  });
  part.sum_of_squares = lanes.total();
  return part;
}

template <class RuleType>
TESSERA_EVERY_CPU void update_block(const RuleType rule, int64_t n, float* __restrict weights,
                                    const float* __restrict grad, float* __restrict state0,
                                    float* __restrict state1, float* __restrict state2) {
  for (int64_t i = 0; i < n; ++i) {
    float s0 = 0;
    float s1 = 0;
    float s2 = 0;
    if constexpr (RuleType::kNumStates > 0) s0 = state0[i];
    if constexpr (RuleType::kNumStates > 1) s1 = state1[i];
    if constexpr (RuleType::kNumStates > 2) s2 = state2[i];
    weights[i] = rule.step(weights[i], grad[i], s0, s1, s2);
    if constexpr (RuleType::kNumStates > 0) state0[i] = s0;
    if constexpr (RuleType::kNumStates > 1) state1[i] = s1;
    if constexpr (RuleType::kNumStates > 2) state2[i] = s2;
  }
}

template <class RuleType>
void update_all(const RuleType& rule, const UpdateArgs& args) {
  Block block;
  for_blocks(args.numel, [&](int64_t begin, int64_t n) {
    float* weights = args.master + begin;
    update_block(rule, n, weights, scaled_grad(args, begin, n, block),
                 RuleType::kNumStates > 0 ? args.state0 + begin : nullptr,
                 RuleType::kNumStates > 1 ? args.state1 + begin : nullptr,
                 RuleType::kNumStates > 2 ? args.state2 + begin : nullptr);
    if (args.param != nullptr) write_floats(weights, n, args.param, args.param_dtype, begin);
  });
}

TESSERA_EVERY_CPU void lamb_advance_block(const LambRule rule, int64_t n, const float* __restrict weights,
                                          const float* __restrict grad, float* __restrict exp_avg,
                                          float* __restrict exp_avg_sq, float* __restrict direction) {
  for (int64_t i = 0; i < n; ++i) {
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    rule.advance(grad[i], m, v);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    direction[i] = rule.direction(weights[i], m, v);
  }
}

TESSERA_EVERY_CPU void lamb_apply_block(const LambRule rule, float step_size, int64_t n,
                                        float* __restrict weights, const float* __restrict exp_avg,
                                        const float* __restrict exp_avg_sq) {
  for (int64_t i = 0; i < n; ++i)
    weights[i] = weights[i] - step_size * rule.direction(weights[i], exp_avg[i], exp_avg_sq[i]);
}

}  // namespace

NormPart squared_norm(const ConstSpan& grad) {
  Block block;
  Lanes lanes;
  for_blocks(grad.numel, [&](int64_t begin, int64_t n) { lanes.add(as_float(grad, begin, n, block), n); });
  // Squares of fp32 cannot overflow in fp64, so a sum that is not finite means an element that is not.
  const double sum = lanes.total();
  return std::isfinite(sum) ? NormPart{sum, 0} : squared_norm_of_finite(grad);
}

void update(const Rule& rule, const UpdateArgs& args) {
  std::visit([&](const auto& chosen) { update_all(chosen, args); }, rule);
}

LambPart lamb_norms(const LambRule& rule, const UpdateArgs& args) {
  Block block;
  Block direction;
  Lanes weight_lanes;
  Lanes update_lanes;
  for_blocks(args.numel, [&](int64_t begin, int64_t n) {
    const float* weights = args.master + begin;
    lamb_advance_block(rule, n, weights, scaled_grad(args, begin, n, block), args.state0 + begin,
                       args.state1 + begin, direction.values);
    weight_lanes.add(weights, n);
    update_lanes.add(direction.values, n);
  });
  return {weight_lanes.total(), update_lanes.total()};
}

void lamb_apply(const LambRule& rule, float step_size, const UpdateArgs& args) {
  for_blocks(args.numel, [&](int64_t begin, int64_t n) {
    float* weights = args.master + begin;
    lamb_apply_block(rule, step_size, n, weights, args.state0 + begin, args.state1 + begin);
    if (args.param != nullptr) write_floats(weights, n, args.param, args.param_dtype, begin);
  });
}

}  // namespace tessera::kernels::cpu
