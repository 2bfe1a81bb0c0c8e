// Two modules with one set of parameters. (Files, training and evaluation are in torchscript_data_test.py.)
#include "examples/torchscript/script_model.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;
using torch::jit::Module;

/// A layer within a model: y = factor * (x * inner.weight + inner.shift), with a buffer `shift` and
/// optionally another, `extra`.
Module make(const std::string& factor, int64_t size, bool extra) {
  Module inner("Inner");
  inner.register_parameter("weight", at::randn({size}), /*is_buffer=*/false);
  inner.register_buffer("shift", at::randn({size}));
  inner.define("def forward(self, x):\n    return x * self.weight + self.shift\n");
  Module model("Model");
  model.register_module("inner", inner);
  if (extra) model.register_buffer("extra", at::full({size}, 3.0));
  model.define("def forward(self, x):\n    return " + factor + " * self.inner.forward(x)" +
               (extra ? " + self.extra" : "") + "\n");
  return model;
}

TEST(ShareParameters, BothModulesReadTheSameTensors) {
  const Module training = make("1", 3, /*extra=*/false);
  Module evaluation = make("2", 3, /*extra=*/true);
  const c10::Storage old = evaluation.attr("inner").toModule().attr("weight").toTensor().storage();
  const std::vector<at::Tensor> own = share_parameters(evaluation, "eval.pt", training, "m.pt");
  EXPECT_EQ(old.use_count(), 1) << "a second copy of the parameters is still held";
  ASSERT_EQ(own.size(), 1u);
  EXPECT_EQ(own[0].sum().item<float>(), 9);

  const Module inner = training.attr("inner").toModule();
  const at::Tensor x = at::randn({3});
  const auto expect_equal = [&] {
    const at::Tensor expected =
        2 * (x * inner.attr("weight").toTensor() + inner.attr("shift").toTensor()) + 3;
    EXPECT_TRUE(at::allclose(evaluation.forward({x}).toTensor(), expected));
  };
  expect_equal();
  inner.attr("weight").toTensor().set_data(at::randn({3}));  // as the engine moves parameters into its units
  inner.attr("shift").toTensor().copy_(at::randn({3}));
  expect_equal();
}

TEST(ShareParameters, WhatDoesNotFitIsNamed) {
  Module evaluation = make("2", 4, false);
  EXPECT_THAT(
      error_of<DataError>([&] { share_parameters(evaluation, "eval.pt", make("1", 3, false), "m.pt"); }),
      HasSubstr("eval.pt: 'inner.weight' has the shape [4], but [3] in m.pt; expected another trace of the "
                "same model"));
  Module other("Other");
  other.register_parameter("weight", at::randn({4}), /*is_buffer=*/false);
  EXPECT_THAT(error_of<DataError>([&] { share_parameters(other, "eval.pt", make("1", 4, false), "m.pt"); }),
              HasSubstr("eval.pt: has a parameter 'weight', which m.pt lacks"));
  Module frozen("Frozen");
  EXPECT_THAT(error_of<DataError>([&] { share_parameters(frozen, "eval.pt", make("1", 4, false), "m.pt"); }),
              HasSubstr("eval.pt: lacks the parameter 'inner.weight', which m.pt has; expected another trace "
                        "of the same model, which torch.jit.freeze"));
}

}  // namespace
}  // namespace tessera::examples
