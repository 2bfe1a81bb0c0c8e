#include "zero/kernels/kernels.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "core/check.h"
#include "zero/kernels/cuda.h"
#include "zero/kernels/make_rule.h"
#include "zero/kernels/parallel.h"
#include "zero/kernels/passes.h"

namespace tessera::kernels {
namespace {

// What one thread does at a time. Sums are per chunk, so this number is part of
// their order: changing it changes bits.
constexpr int64_t kChunkNumel = 16384;

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: break;
  }
  TESSERA_CHECK(false, "dtype ", c10::toString(tensor.scalar_type()), ", expected fp32, bf16 or fp16");
  return DType::kFloat32;
}

void check_flat(const at::Tensor& tensor, const char* name, int64_t numel, at::Device device) {
  TESSERA_CHECK(tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous(), name);
  TESSERA_CHECK(tensor.numel() == numel, name, " has ", tensor.numel(), " elements, expected ", numel);
  TESSERA_CHECK(tensor.device() == device, name, " is on ", tensor.device().str(), ", expected ",
                device.str());
}

float* fp32_data(const at::Tensor& tensor, const char* name, int64_t numel, at::Device device) {
  check_flat(tensor, name, numel, device);
  TESSERA_CHECK(tensor.scalar_type() == at::kFloat, name, " is ", c10::toString(tensor.scalar_type()));
  return static_cast<float*>(tensor.data_ptr());
}

ConstSpan span_of(const at::Tensor& grad) {
  TESSERA_CHECK(grad.defined());
  check_flat(grad, "grad", grad.numel(), grad.device());
  return {grad.const_data_ptr(), dtype_of(grad), grad.numel()};
}

/// `reads_grad`: LAMB's second pass does not.
UpdateArgs args_of(const Segment& segment, size_t num_states, double grad_scale, bool reads_grad) {
  TESSERA_CHECK(segment.master.defined());
  const int64_t numel = segment.master.numel();
  const at::Device device = segment.master.device();
  UpdateArgs args;
  args.numel = numel;
  args.master = fp32_data(segment.master, "master", numel, device);
  args.grad_scale = static_cast<float>(grad_scale);
  TESSERA_CHECK(segment.state.size() == num_states, "found ", segment.state.size(), " states, expected ",
                num_states);
  if (num_states > 0) args.state0 = fp32_data(segment.state[0], "first state", numel, device);
  if (num_states > 1) args.state1 = fp32_data(segment.state[1], "second state", numel, device);
  if (num_states > 2) args.state2 = fp32_data(segment.state[2], "third state", numel, device);
  if (reads_grad) {
    check_flat(segment.grad, "grad", numel, device);
    args.grad = segment.grad.const_data_ptr();
    args.grad_dtype = dtype_of(segment.grad);
  }
  if (segment.param.defined()) {
    check_flat(segment.param, "param", numel, device);
    args.param = segment.param.data_ptr();
    args.param_dtype = dtype_of(segment.param);
  }
  return args;
}

template <class Void>
Void* advanced(Void* data, DType dtype, int64_t begin) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + begin * size_bytes(dtype);
}

ConstSpan slice(const ConstSpan& span, int64_t begin, int64_t end) {
  return {advanced(span.data, span.dtype, begin), span.dtype, end - begin};
}

UpdateArgs slice(const UpdateArgs& args, int64_t begin, int64_t end) {
  UpdateArgs part = args;
  part.numel = end - begin;
  part.master = args.master + begin;
  part.state0 = args.state0 == nullptr ? nullptr : args.state0 + begin;
  part.state1 = args.state1 == nullptr ? nullptr : args.state1 + begin;
  part.state2 = args.state2 == nullptr ? nullptr : args.state2 + begin;
  part.grad = advanced(args.grad, args.grad_dtype, begin);
  part.param = advanced(args.param, args.param_dtype, begin);
  return part;
}

template <class Item>
int64_t count_of(const std::vector<Item>& items) {
  return static_cast<int64_t>(items.size());
}

int64_t num_chunks(int64_t numel) { return (numel + kChunkNumel - 1) / kChunkNumel; }

/// Calls visit(begin, end) with ranges of elements that cover [0, numel), on several threads. For passes
/// whose elements do not depend on each other.
template <class Visit>
void for_ranges(int64_t numel, const Visit& visit) {
  parallel_chunks(num_chunks(numel), [&](int64_t first, int64_t last) {
    visit(first * kChunkNumel, std::min(last * kChunkNumel, numel));
  });
}

NormPart operator+(const NormPart& a, const NormPart& b) {
  return {a.sum_of_squares + b.sum_of_squares, a.num_nonfinite + b.num_nonfinite};
}
LambPart operator+(const LambPart& a, const LambPart& b) {
  return {a.weight_sq + b.weight_sq, a.update_sq + b.update_sq};
}

/// part_of(begin, end) for every chunk, on several threads, added up in the chunks' order.
template <class Part, class PartOf>
Part sum_chunks(int64_t numel, const PartOf& part_of) {
  constexpr int64_t kBatch = 512;  // chunks whose parts wait on the stack
  std::array<Part, kBatch> parts;
  Part total;
  for (int64_t batch = 0; batch < num_chunks(numel); batch += kBatch) {
    const int64_t count = std::min(kBatch, num_chunks(numel) - batch);
    parallel_chunks(count, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = (batch + i) * kChunkNumel;
        parts[static_cast<size_t>(i)] = part_of(begin, std::min(begin + kChunkNumel, numel));
      }
    });
    for (int64_t i = 0; i < count; ++i) total = total + parts[static_cast<size_t>(i)];
  }
  return total;
}

/// Row `row` of (rows, 2) fp64.
double* row_of(const at::Tensor& sums, int64_t row, at::Device device) {
  TESSERA_CHECK(sums.scalar_type() == at::kDouble && sums.dim() == 2 && sums.size(1) == 2 &&
                sums.is_contiguous() && sums.device() == device && row >= 0 && row < sums.size(0));
  return static_cast<double*>(sums.data_ptr()) + 2 * row;
}

std::vector<double*> rows_of(const at::Tensor& sums, const std::vector<int64_t>& rows, size_t count,
                             at::Device device) {
  TESSERA_CHECK(rows.size() == count);
  std::vector<double*> pointers;
  for (const int64_t row : rows) pointers.push_back(row_of(sums, row, device));
  return pointers;
}

/// All on the first one's device.
std::vector<UpdateArgs> args_of(const std::vector<SegmentUpdate>& updates, size_t num_states,
                                double grad_scale, bool reads_grad) {
  std::vector<UpdateArgs> args;
  for (const SegmentUpdate& update : updates) {
    args.push_back(args_of(update.segment, num_states, grad_scale, reads_grad));
    TESSERA_CHECK(update.segment.master.device() == updates.front().segment.master.device());
  }
  return args;
}

std::vector<LambRule> lamb_rules_of(const std::vector<SegmentUpdate>& updates) {
  std::vector<LambRule> rules;
  for (const SegmentUpdate& update : updates) rules.push_back(make_lamb_rule(*update.hyper, update.step));
  return rules;
}

}  // namespace

void squared_norms(const std::vector<at::Tensor>& grads, const at::Tensor& sums,
                   const std::vector<int64_t>& rows) {
  if (grads.empty()) return;
  const at::Device device = grads.front().device();
  const std::vector<double*> results = rows_of(sums, rows, grads.size(), device);
  std::vector<ConstSpan> spans;
  for (const at::Tensor& grad : grads) {
    spans.push_back(span_of(grad));
    TESSERA_CHECK(grad.device() == device);
  }
  if (device.is_cuda())
    return cuda::run(TESSERA_RESOLVE(tessera_cuda_squared_norms), "squared_norms", device, spans.data(),
                     results.data(), count_of(spans), cuda::scratch_for(spans, device).data_ptr<double>());
  for (size_t i = 0; i < spans.size(); ++i) {
    const NormPart part = sum_chunks<NormPart>(spans[i].numel, [&](int64_t begin, int64_t end) {
      return cpu::squared_norm(slice(spans[i], begin, end));
    });
    results[i][0] = part.sum_of_squares;
    results[i][1] = static_cast<double>(part.num_nonfinite);
  }
}

int64_t first_nonfinite(const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  const at::Tensor nonfinite = at::isfinite(grad).logical_not_();
  return nonfinite.any().item<bool>() ? nonfinite.to(at::kByte).argmax().item<int64_t>() : -1;
}

void update(OptimizerKind kind, double grad_scale, const std::vector<SegmentUpdate>& updates) {
  if (updates.empty()) return;
  std::vector<Rule> rules;
  std::vector<UpdateArgs> args;
  for (const SegmentUpdate& update : updates) {
    rules.push_back(make_rule(kind, *update.hyper, update.step));
    const size_t num_states =
        std::visit([](const auto& chosen) { return static_cast<size_t>(chosen.kNumStates); }, rules.back());
    const double scale = update.hyper->maximize ? -grad_scale : grad_scale;
    args.push_back(args_of(update.segment, num_states, scale, /*reads_grad=*/true));
    TESSERA_CHECK(update.segment.master.device() == updates.front().segment.master.device());
  }
  const at::Device device = updates.front().segment.master.device();
  if (device.is_cuda())
    return cuda::run(TESSERA_RESOLVE(tessera_cuda_update), "update", device, rules.data(), args.data(),
                     count_of(args));
  for (size_t i = 0; i < args.size(); ++i)
    for_ranges(args[i].numel,
               [&](int64_t begin, int64_t end) { cpu::update(rules[i], slice(args[i], begin, end)); });
}

void lamb_norms(double grad_scale, const std::vector<SegmentUpdate>& updates, const at::Tensor& sums,
                const std::vector<int64_t>& rows) {
  if (updates.empty()) return;
  const std::vector<LambRule> rules = lamb_rules_of(updates);
  const std::vector<UpdateArgs> args = args_of(updates, 2, grad_scale, /*reads_grad=*/true);
  const at::Device device = updates.front().segment.master.device();
  const std::vector<double*> results = rows_of(sums, rows, updates.size(), device);
  if (device.is_cuda())
    return cuda::run(TESSERA_RESOLVE(tessera_cuda_lamb_norms), "lamb_norms", device, rules.data(),
                     args.data(), results.data(), count_of(args),
                     cuda::scratch_for(args, device).data_ptr<double>());
  for (size_t i = 0; i < args.size(); ++i) {
    const LambPart part = sum_chunks<LambPart>(args[i].numel, [&](int64_t begin, int64_t end) {
      return cpu::lamb_norms(rules[i], slice(args[i], begin, end));
    });
    results[i][0] = part.weight_sq;
    results[i][1] = part.update_sq;
  }
}

void lamb_apply(const std::vector<SegmentUpdate>& updates, const std::vector<double>& trust_ratios) {
  TESSERA_CHECK(trust_ratios.size() == updates.size());
  if (updates.empty()) return;
  const std::vector<LambRule> rules = lamb_rules_of(updates);
  const std::vector<UpdateArgs> args = args_of(updates, 2, /*grad_scale=*/1.0, /*reads_grad=*/false);
  std::vector<float> step_sizes;
  for (size_t i = 0; i < updates.size(); ++i)
    step_sizes.push_back(static_cast<float>(updates[i].hyper->lr * trust_ratios[i]));
  const at::Device device = updates.front().segment.master.device();
  if (device.is_cuda())
    return cuda::run(TESSERA_RESOLVE(tessera_cuda_lamb_apply), "lamb_apply", device, rules.data(),
                     step_sizes.data(), args.data(), count_of(args));
  for (size_t i = 0; i < args.size(); ++i)
    for_ranges(args[i].numel, [&](int64_t begin, int64_t end) {
      cpu::lamb_apply(rules[i], step_sizes[i], slice(args[i], begin, end));
    });
}

}  // namespace tessera::kernels
