// What holds for all passes: slices, threads and dtypes do not change bits, and norms are exact.
#include "zero/kernels/kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "tests/zero/kernels/one_segment.h"

namespace tessera::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Sets the number of torch's intra-op threads while it lives.
class NumThreads {
 public:
  explicit NumThreads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~NumThreads() { at::set_num_threads(before_); }
  NumThreads(const NumThreads&) = delete;
  NumThreads& operator=(const NumThreads&) = delete;

 private:
  int before_;
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a.view(at::kByte), b.view(at::kByte));
}

struct Variant {
  OptimizerKind kind;
  Hyper hyper;
};

std::vector<Variant> variants() {
  Hyper decay;
  decay.lr = 0.01;
  decay.weight_decay = 0.1;
  Hyper momentum = decay;
  momentum.momentum = 0.9;
  momentum.nesterov = true;
  return {{OptimizerKind::kAdam, decay},   {OptimizerKind::kAdamW, decay},   {OptimizerKind::kSGD, decay},
          {OptimizerKind::kSGD, momentum}, {OptimizerKind::kAdagrad, decay}, {OptimizerKind::kLion, decay}};
}

Segment make_segment(const Variant& variant, int64_t numel, at::ScalarType grad_dtype,
                     at::ScalarType param_dtype) {
  at::manual_seed(11);
  Segment segment;
  segment.master = at::randn({numel});
  segment.grad = at::randn({numel}).to(grad_dtype);
  for (size_t i = 0; i < state_names(variant.kind, variant.hyper).size(); ++i)
    segment.state.push_back(at::rand({numel}));
  segment.param = at::zeros({numel}, param_dtype);
  return segment;
}

Segment slice(const Segment& segment, int64_t begin, int64_t end) {
  Segment part = segment;
  part.master = segment.master.slice(0, begin, end);
  part.grad = segment.grad.slice(0, begin, end);
  part.param = segment.param.slice(0, begin, end);
  for (at::Tensor& state : part.state) state = state.slice(0, begin, end);
  return part;
}

void expect_same(const Segment& found, const Segment& expected) {
  EXPECT_TRUE(same_bits(found.master, expected.master));
  EXPECT_TRUE(same_bits(found.param, expected.param));
  for (size_t i = 0; i < expected.state.size(); ++i)
    EXPECT_TRUE(same_bits(found.state[i], expected.state[i]));
}

TEST(Update, SlicesEqualTheWholeForEveryDtype) {
  constexpr int64_t kNumel = 70'001;
  for (const Variant& variant : variants()) {
    for (at::ScalarType grad_dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (at::ScalarType param_dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const Segment whole = make_segment(variant, kNumel, grad_dtype, param_dtype);
        const Segment cut = make_segment(variant, kNumel, grad_dtype, param_dtype);
        update(variant.kind, variant.hyper, 3, 0.5, whole);
        int64_t begin = 0;
        for (int64_t end : {1, 4, 1'030, 33'333, 70'000, 70'000, 70'001}) {  // unaligned, one element, none
          update(variant.kind, variant.hyper, 3, 0.5, slice(cut, begin, end));
          begin = end;
        }
        expect_same(cut, whole);
        EXPECT_TRUE(same_bits(whole.param, whole.master.to(param_dtype)));
      }
    }
  }
}

TEST(Update, ThreadsDoNotChangeBits) {
  for (const Variant& variant : variants()) {
    const Segment one = make_segment(variant, 300'003, at::kBFloat16, at::kBFloat16);
    const Segment many = make_segment(variant, 300'003, at::kBFloat16, at::kBFloat16);
    {
      NumThreads threads(1);
      update(variant.kind, variant.hyper, 2, 1.0, one);
    }
    {
      NumThreads threads(4);
      update(variant.kind, variant.hyper, 2, 1.0, many);
    }
    expect_same(many, one);
  }
}

TEST(Update, LowPrecisionGradientsCountAsTheirFloatValues) {
  for (const Variant& variant : variants()) {
    for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const Segment low = make_segment(variant, 5'001, dtype, at::kFloat);
      Segment full = make_segment(variant, 5'001, dtype, at::kFloat);
      full.grad = full.grad.to(at::kFloat);
      update(variant.kind, variant.hyper, 1, 1.0, low);
      update(variant.kind, variant.hyper, 1, 1.0, full);
      expect_same(low, full);
    }
  }
}

TEST(Update, GradScaleMultipliesTheGradientFirst) {
  const double scale = 0.37 / 1024;
  for (const Variant& variant : variants()) {
    const Segment scaled = make_segment(variant, 5'001, at::kFloat, at::kFloat);
    Segment multiplied = make_segment(variant, 5'001, at::kFloat, at::kFloat);
    multiplied.grad = multiplied.grad * static_cast<float>(scale);
    const at::Tensor grad_before = scaled.grad.clone();
    update(variant.kind, variant.hyper, 1, scale, scaled);
    update(variant.kind, variant.hyper, 1, 1.0, multiplied);
    expect_same(scaled, multiplied);
    EXPECT_TRUE(same_bits(scaled.grad, grad_before)) << "the gradient itself is only read";
  }
}

TEST(Update, WithoutAParamTheMasterIsTheParameter) {
  for (const Variant& variant : variants()) {
    const Segment with = make_segment(variant, 2'049, at::kFloat, at::kFloat);
    Segment without = make_segment(variant, 2'049, at::kFloat, at::kFloat);
    without.param = at::Tensor();
    update(variant.kind, variant.hyper, 1, 1.0, with);
    update(variant.kind, variant.hyper, 1, 1.0, without);
    EXPECT_TRUE(same_bits(without.master, with.master));
  }
}

TEST(Update, WritesNothingBesideItsSlice) {
  const Variant variant = variants()[1];
  const Segment whole = make_segment(variant, 4'096, at::kBFloat16, at::kBFloat16);
  const Segment before = make_segment(variant, 4'096, at::kBFloat16, at::kBFloat16);
  update(variant.kind, variant.hyper, 1, 1.0, slice(whole, 101, 3'003));
  for (const auto& [begin, end] : {std::pair{0, 101}, std::pair{3'003, 4'096}})
    expect_same(slice(whole, begin, end), slice(before, begin, end));
  EXPECT_FALSE(same_bits(whole.master, before.master));
}

TEST(Update, RefusesTensorsThatDoNotFit) {
  const Variant variant = variants()[0];
  const auto broken = [&](auto change) {
    Segment segment = make_segment(variant, 64, at::kFloat, at::kFloat);
    change(segment);
    update(variant.kind, variant.hyper, 1, 1.0, segment);
  };
  EXPECT_NO_THROW(broken([](Segment&) {}));
  EXPECT_THROW(broken([](Segment& s) { s.grad = at::zeros({63}); }), std::logic_error);
  EXPECT_THROW(broken([](Segment& s) { s.grad = at::zeros({64}, at::kDouble); }), std::logic_error);
  EXPECT_THROW(broken([](Segment& s) { s.grad = at::zeros({128}).slice(0, 0, 128, 2); }), std::logic_error);
  EXPECT_THROW(broken([](Segment& s) { s.grad = at::Tensor(); }), std::logic_error);
  EXPECT_THROW(broken([](Segment& s) { s.master = s.master.to(at::kBFloat16); }), std::logic_error);
  EXPECT_THROW(broken([](Segment& s) { s.state.pop_back(); }), std::logic_error);
  EXPECT_THROW(broken([](Segment& s) { s.param = at::zeros({64}, at::kInt); }), std::logic_error);
  const Segment segment = make_segment(variant, 64, at::kFloat, at::kFloat);
  EXPECT_THROW(update(variant.kind, variant.hyper, 0, 1.0, segment), std::logic_error)
      << "steps count from 1";
  EXPECT_THROW(update(OptimizerKind::kLamb, variant.hyper, 1, 1.0, segment), std::logic_error);
}

TEST(Lamb, ThreadsAndDtypesDoNotChangeBits) {
  const Variant variant{OptimizerKind::kLamb, variants()[0].hyper};
  std::vector<Segment> segments;
  std::vector<LambPart> parts;
  for (int num_threads : {1, 4}) {
    NumThreads threads(num_threads);
    segments.push_back(make_segment(variant, 300'003, at::kHalf, at::kBFloat16));
    if (num_threads == 4) segments.back().grad = segments.back().grad.to(at::kFloat);
    parts.push_back(lamb_norms(variant.hyper, 2, 0.5, segments.back()));
    lamb_apply(variant.hyper, 2, 1.5, segments.back());
  }
  expect_same(segments[1], segments[0]);
  EXPECT_EQ(parts[0].weight_sq, parts[1].weight_sq);
  EXPECT_EQ(parts[0].update_sq, parts[1].update_sq);
  EXPECT_GT(parts[0].update_sq, 0);
  EXPECT_TRUE(same_bits(segments[0].param, segments[0].master.to(at::kBFloat16)));
}

TEST(Norm, EqualsTheDoubleSum) {
  at::manual_seed(3);
  for (int64_t numel : {0, 1, 15, 16, 17, 1'023, 1'025, 16'384, 16'385, 100'003}) {
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor grad = (at::randn({numel}) * 3).to(dtype);
      const double expected = grad.to(at::kDouble).square().sum().item<double>();
      const NormPart part = squared_norm(grad);
      EXPECT_NEAR(part.sum_of_squares, expected, 1e-13 * expected) << numel << " of " << dtype;
      EXPECT_EQ(part.num_nonfinite, 0);
      EXPECT_EQ(first_nonfinite(grad), -1);
    }
  }
}

TEST(Norm, AlignmentAndThreadsDoNotChangeBits) {
  at::manual_seed(4);
  constexpr int64_t kNumel = 10'000'019;  // more chunks than one batch of partial sums
  const at::Tensor storage = at::randn({kNumel + 8});
  const at::Tensor data = storage.slice(0, 0, kNumel).clone();
  double expected = 0;
  {
    NumThreads threads(1);
    expected = squared_norm(data).sum_of_squares;
  }
  NumThreads threads(4);
  for (int64_t offset : {0, 1, 3, 7}) {
    const at::Tensor moved = storage.slice(0, offset, offset + kNumel);
    moved.copy_(data);
    EXPECT_EQ(squared_norm(moved).sum_of_squares, expected) << "offset " << offset;
  }
}

TEST(Norm, CountsAndFindsWhatIsNotFinite) {
  at::manual_seed(5);
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor grad = at::randn({50'001}).to(dtype);
    const at::Tensor zeroed = grad.clone();
    for (const auto& [index, value] :
         {std::pair{20'011, kInf}, std::pair{20'012, -kInf}, std::pair{50'000, kNan}}) {
      grad[index] = value;
      zeroed[index] = 0;
    }
    const NormPart part = squared_norm(grad);
    EXPECT_EQ(part.num_nonfinite, 3);
    EXPECT_EQ(part.sum_of_squares, squared_norm(zeroed).sum_of_squares);
    EXPECT_EQ(first_nonfinite(grad), 20'011);
    EXPECT_EQ(first_nonfinite(grad.slice(0, 20'013)), 50'000 - 20'013);
    EXPECT_EQ(first_nonfinite(grad.slice(0, 0, 20'011)), -1);
  }
}

TEST(Norm, LargestFloatsDoNotOverflow) {
  const at::Tensor grad = at::full({20'000}, std::numeric_limits<float>::max());
  const NormPart part = squared_norm(grad);
  EXPECT_EQ(part.num_nonfinite, 0);
  EXPECT_TRUE(std::isfinite(part.sum_of_squares));
}

}  // namespace
}  // namespace tessera::kernels
