// Sums of shared memory, element by element.
#include "comm/shm/reduce.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "comm/torch_dtype.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using Inputs = std::vector<at::Tensor>;

/// Element by element in fp32, as reduce() promises.
float expected_sum(const Inputs& inputs, int64_t i, float scale, const at::Tensor* added) {
  float sum = inputs[0][i].item<float>();
  for (size_t r = 1; r < inputs.size(); ++r) sum = sum + inputs[r][i].item<float>();
  sum = sum * scale;
  return added == nullptr ? sum : sum + (*added)[i].item<float>();
}

TEST(Reduce, SumsInOrderInFp32AndRoundedOnce) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const auto in : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const auto out : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const int num : {1, 2, 3, 5})
        for (const bool add : {false, true}) {
          SCOPED_TRACE(
              str(c10::toString(in), " x ", num, " into ", c10::toString(out), add ? ", added" : ""));
          constexpr int64_t kNumel = 1029;  // more than a block, and odd
          Inputs inputs;
          std::vector<const void*> pointers;
          for (int r = 0; r < num; ++r) {
            at::Tensor values = at::empty({kNumel});
            for (int64_t i = 0; i < kNumel; ++i)
              values.data_ptr<float>()[i] = normal(random) * std::exp2(static_cast<float>(r * 3));
            inputs.push_back(values.to(in));
            pointers.push_back(inputs.back().data_ptr());
          }
          at::Tensor result = at::full({kNumel}, 0.75, out);
          const at::Tensor before = result.clone();
          const float scale = num == 3 ? 1.0f / 3 : 1.0f;
          shm::reduce({.dtype = from_torch(in),
                       .inputs = pointers.data(),
                       .num_inputs = num,
                       .numel = kNumel,
                       .output = {result.data_ptr(), from_torch(out), scale, add}});
          at::Tensor expected = at::empty({kNumel});
          for (int64_t i = 0; i < kNumel; ++i)
            expected.data_ptr<float>()[i] = expected_sum(inputs, i, scale, add ? &before : nullptr);
          EXPECT_TRUE(at::equal(result, expected.to(out)));
        }
}

}  // namespace
}  // namespace tessera::comm
