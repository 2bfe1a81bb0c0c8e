// Training under autocast against a plain loop under autocast.
#include <gtest/gtest.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

TEST(Autocast, EqualsAPlainLoopUnderAutocastToTheBit) {
  const auto x = [](int step) { return randn({4, 7}, 100 + step); };
  const auto y = [](int step) { return randn({4, 3}, 200 + step); };
  Mlp plain;
  fill_parameters(*plain, 1);
  at::Tensor plain_loss;
  {
    const AutocastScope scope({.enabled = true}, at::kCPU);
    plain_loss = plain->forward(x(0), y(0));
  }
  plain_loss.backward();
  Mlp uncast;
  fill_parameters(*uncast, 1);
  ASSERT_FALSE(at::equal(uncast->forward(x(0), y(0)), plain_loss)) << "autocast must make a difference here";

  std::vector<double> losses_of_stage[4];
  for (int stage = 0; stage <= 3; ++stage)
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Case c = small_units(1, stage);
      c.micro_batch = 4;
      c.config.autocast.enabled = true;
      Mlp model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, engine_config(c), comm);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor loss = engine->forward(x(step), y(step));
        losses_of_stage[stage].push_back(loss.item<double>());
        engine->backward(loss);
        if (step == 0) {
          EXPECT_TRUE(at::equal(loss, plain_loss)) << stage;
          for (const auto& item : plain->named_parameters())
            EXPECT_TRUE(at::equal(engine->full_gradient(item.key()), item.value().grad())) << item.key();
        }
        engine->step();
      }
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      for (const zero::UnitSpec& unit : engine->sharded_model().layout().units())
        EXPECT_EQ(unit.dtype, DType::kFloat32);
    });
  for (int stage = 1; stage <= 3; ++stage) EXPECT_EQ(losses_of_stage[stage], losses_of_stage[0]);
}

/// torch.autocast in float16 with torch.amp.GradScaler, by hand.
TEST(Autocast, InFp16ScalesTheLossAsAPlainLoopWithAScalerDoes) {
  constexpr double kSmall = 1e-6;  // of a loss, whose gradients fp16 would round to nothing
  constexpr double kScale = 65536;
  const auto x = randn({4, 7}, 100), y = randn({4, 3}, 200);
  const auto gradients = [&](double scale) {
    Mlp model;
    fill_parameters(*model, 1);
    at::Tensor loss;
    {
      const AutocastScope scope({.enabled = true, .dtype = DType::kFloat16}, at::kCPU);
      loss = model->forward(x, y).to(at::kFloat) * kSmall;
    }
    (loss * scale).backward();
    Tensors result;
    for (const auto& item : model->named_parameters()) result[item.key()] = item.value().grad() / scale;
    return result;
  };
  const Tensors scaled = gradients(kScale), unscaled = gradients(1);
  ASSERT_GT(scaled.at("fc1.weight").abs().max().item<double>(), 0);
  ASSERT_FALSE(bit_equal(scaled, unscaled)) << "without a scale gradients must be lost here";

  for (int stage = 0; stage <= 3; ++stage)
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Case c = small_units(1, stage);
      c.micro_batch = 4;
      c.config.autocast = {.enabled = true, .dtype = DType::kFloat16};
      c.config.fp16.loss_scale_window = 2;
      Mlp model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, engine_config(c), comm);
      EXPECT_EQ(engine->loss_scale(), kScale);
      for (int step = 0; step < 4; ++step) {
        engine->backward(engine->forward(x, y).to(at::kFloat) * kSmall);
        for (const auto& [name, gradient] : step == 0 ? scaled : Tensors())
          EXPECT_TRUE(at::equal(engine->full_gradient(name), gradient)) << stage << name;
        engine->step();
      }
      EXPECT_EQ(engine->skipped_steps(), 0);
      EXPECT_EQ(engine->loss_scale(), 2 * kScale) << "after three steps without an overflow, as in fp16";
      for (const zero::UnitSpec& unit : engine->sharded_model().layout().units())
        EXPECT_EQ(unit.dtype, DType::kFloat32);
    });
}

TEST(Autocast, ScopesRestoreWhatWasThereAndTheCacheDiesWithThem) {
  const at::Tensor a = at::ones({2, 2}), b = at::ones({2, 2}).set_requires_grad(true);
  {
    const AutocastScope outer({.enabled = true, .dtype = DType::kFloat16}, at::kCPU);
    {
      const AutocastScope inner({.enabled = true, .dtype = DType::kBFloat16}, at::kCPU);
      EXPECT_EQ(at::matmul(a, b).scalar_type(), at::kBFloat16);
    }
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::matmul(a, b).scalar_type(), at::kFloat);
  const auto product = [&] {
    const AutocastScope scope({.enabled = true}, at::kCPU);
    return at::matmul(a, b).sum().item<double>();
  };
  const double before = product();
  {
    const at::NoGradGuard no_grad;
    at::Tensor(b).mul_(2);
  }
  EXPECT_EQ(product(), 2 * before) << "a cast of the values before";
  {
    const AutocastScope off({.enabled = false}, at::kCPU);
    EXPECT_EQ(at::matmul(a, b).scalar_type(), at::kFloat);
  }
}

}  // namespace
}  // namespace tessera::testing
