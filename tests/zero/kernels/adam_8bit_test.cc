// AdamW with 8-bit moments, beside the same formulas in double precision and a search for the nearest code.
#include "zero/kernels/adam_8bit.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace tessera::kernels {
namespace {

at::Tensor random_normal(int64_t numel, uint64_t seed) {
  return at::randn({numel}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat);
}

struct State {
  at::Tensor weights;
  Moment8bit first, second;
};

State start(int64_t numel, uint64_t seed = 1) {
  const int64_t blocks = num_blocks_8bit(numel);
  const auto moment = [&](bool is_signed) {
    return Moment8bit{at::full({numel}, code_of_zero(is_signed), at::kByte), at::zeros({blocks})};
  };
  return {random_normal(numel, seed), moment(true), moment(false)};
}

State trained(int64_t numel, int64_t steps, const Hyper& hyper) {
  State state = start(numel);
  for (int64_t step = 1; step <= steps; ++step)
    adam_8bit(state.weights, random_normal(numel, 10 + static_cast<uint64_t>(step)), state.first,
              state.second, hyper, step);
  return state;
}

int nearest_by_search(std::span<const float, 256> values, double fraction) {
  int best = 0;
  for (int i = 0; i < 256; ++i)
    if (std::abs(values[static_cast<size_t>(i)] - fraction) <
        std::abs(values[static_cast<size_t>(best)] - fraction))
      best = i;
  return best;
}

TEST(Adam8bit, CodesAreThoseOfThePaper) {
  for (const bool is_signed : {true, false}) {
    const auto values = code_values(is_signed);
    for (size_t i = 1; i < values.size(); ++i) EXPECT_LT(values[i - 1], values[i]);
    EXPECT_EQ(values.back(), 1.0F);
    EXPECT_EQ(values[code_of_zero(is_signed)], 0.0F);
    // 0.55 of the smallest decade, once with a sign; the second moment has twice as many in a decade.
    EXPECT_NEAR(values[code_of_zero(is_signed) + 1U], is_signed ? 0.55e-6 : 0.325e-6, 1e-12);
  }
  const auto values = code_values(true);
  EXPECT_EQ(code_of_zero(true), 127);
  EXPECT_EQ(code_of_zero(false), 0);
  for (size_t i = 1; i <= 127; ++i) EXPECT_EQ(values[127 - i], -values[127 + i]);
}

TEST(Adam8bit, EachMomentIsRoundedToTheNearestCode) {
  // Without decay the first moment is the gradient.
  const Hyper hyper{.lr = 0.0, .beta1 = 0.0, .beta2 = 0.0};
  const int64_t numel = 40 * kBlockNumel8bit;
  // All magnitudes: many decades, zeros, equal neighbours.
  at::Tensor gradient = random_normal(numel, 3) * at::pow(10.0, random_normal(numel, 4).mul_(2));
  gradient.narrow(0, 512, 256).zero_();
  gradient.narrow(0, 1024, 256).fill_(-2.5);
  State state = start(numel);
  adam_8bit(state.weights, gradient, state.first, state.second, hyper, 1);
  for (const bool is_signed : {true, false}) {
    const Moment8bit& moment = is_signed ? state.first : state.second;
    for (int64_t i = 0; i < numel; ++i) {
      const double most = moment.absmax[i / kBlockNumel8bit].item<float>();
      const auto g = static_cast<double>(gradient[i].item<float>());
      const double fraction = most == 0 ? 0 : (is_signed ? g : g * g) / most;
      const auto values = code_values(is_signed);
      const int code = moment.codes[i].item<uint8_t>(), best = nearest_by_search(values, fraction);
      EXPECT_LE(std::abs(values[static_cast<size_t>(code)] - fraction),
                std::abs(values[static_cast<size_t>(best)] - fraction) + 1e-6)
          << i << " " << fraction;
    }
  }
  EXPECT_TRUE((state.first.codes.narrow(0, 512, 256) == code_of_zero(true)).all().item<bool>());
}

TEST(Adam8bit, IsTheFormulaInDoublePrecision) {
  const Hyper hyper{.lr = 0.05, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
  for (const int64_t numel : {1, 255, 256, 257, 5000}) {
    const State ours = trained(numel, 4, hyper);
    std::vector<double> w, m(static_cast<size_t>(numel), 0), v(m);
    const State begin = start(numel);
    for (int64_t i = 0; i < numel; ++i) w.push_back(begin.weights[i].item<float>());
    for (int step = 1; step <= 4; ++step) {
      const at::Tensor gradient = random_normal(numel, 10 + static_cast<uint64_t>(step));
      for (int64_t block = 0; block < numel; block += kBlockNumel8bit) {
        const int64_t end = std::min(block + kBlockNumel8bit, numel);
        double most_m = 0, most_v = 0;
        for (int64_t i = block; i < end; ++i) {
          const auto at = static_cast<size_t>(i);
          const double g = gradient[i].item<float>();
          m[at] = hyper.beta1 * m[at] + (1 - hyper.beta1) * g;
          v[at] = hyper.beta2 * v[at] + (1 - hyper.beta2) * g * g;
          const double m_hat = m[at] / (1 - std::pow(hyper.beta1, step)),
                       v_hat = v[at] / (1 - std::pow(hyper.beta2, step));
          w[at] =
              w[at] * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * m_hat / (std::sqrt(v_hat) + hyper.eps);
          most_m = std::max(most_m, std::abs(m[at]));
          most_v = std::max(most_v, v[at]);
        }
        for (int64_t i = block; i < end; ++i) {
          const auto at = static_cast<size_t>(i);
          m[at] =
              most_m *
              code_values(true)[static_cast<size_t>(nearest_by_search(code_values(true), m[at] / most_m))];
          v[at] =
              most_v *
              code_values(false)[static_cast<size_t>(nearest_by_search(code_values(false), v[at] / most_v))];
        }
      }
    }
    int far = 0;
    for (int64_t i = 0; i < numel; ++i)
      far += std::abs(ours.weights[i].item<float>() - w[static_cast<size_t>(i)]) > 1e-5 ? 1 : 0;
    EXPECT_LE(far, numel / 1000) << numel
                                 << ": a moment in the middle of two codes may be rounded either way";
  }
}

TEST(Adam8bit, AnElementAloneHasTheCodeOfTheVectorLoop) {
  // Without decay the first moment is the gradient. Magnitudes of all decades, and the borders of codes.
  const Hyper hyper{.lr = 0.0, .beta1 = 0.0, .beta2 = 0.0};
  const auto values = code_values(true);
  at::Tensor gradient =
      random_normal(40 * kBlockNumel8bit, 5) * at::pow(10.0, random_normal(40 * kBlockNumel8bit, 6).mul_(2));
  for (int64_t i = 0; i < 255; ++i)
    gradient[i] = (values[static_cast<size_t>(i)] + values[static_cast<size_t>(i) + 1]) / 2;
  gradient[255] = -1.0F;
  State state = start(gradient.numel());
  adam_8bit(state.weights, gradient, state.first, state.second, hyper, 1);
  const Codebook& book = codebook(true);
  for (int64_t i = 0; i < gradient.numel(); ++i) {
    const float most = state.first.absmax[i / kBlockNumel8bit].item<float>();
    ASSERT_EQ(state.first.codes[i].item<uint8_t>(), code_of(gradient[i].item<float>(), 1 / most, book)) << i;
  }
}

TEST(Adam8bit, AGradientWhoseSquareIsInfiniteLeavesAllFinite) {
  const Hyper hyper{.lr = 0.05};
  State state = start(512);
  const at::Tensor before = state.weights.clone();
  at::Tensor gradient = at::ones({512});
  gradient[7] = 1e20F;
  for (int64_t step = 1; step <= 3; ++step) {
    adam_8bit(state.weights, gradient, state.first, state.second, hyper, step);
    gradient.fill_(1);
  }
  EXPECT_TRUE(state.weights.isfinite().all().item<bool>());
  EXPECT_NEAR(state.weights[7].item<float>(), before[7].item<float>(), 3 * hyper.lr);
  EXPECT_TRUE((state.weights.narrow(0, 256, 256) != before.narrow(0, 256, 256)).all().item<bool>());
}

TEST(Adam8bit, ThreadsChangeNoBit) {
  const Hyper hyper{.lr = 0.05};
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const State alone = trained(100'000, 3, hyper);
  at::set_num_threads(4);
  const State together = trained(100'000, 3, hyper);
  at::set_num_threads(before);
  EXPECT_TRUE(at::equal(alone.weights, together.weights));
  EXPECT_TRUE(at::equal(alone.first.codes, together.first.codes));
  EXPECT_TRUE(at::equal(alone.second.absmax, together.second.absmax));
}

}  // namespace
}  // namespace tessera::kernels
