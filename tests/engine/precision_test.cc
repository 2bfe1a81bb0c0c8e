// bf16, fp16 and autocast against the same done by hand in a plain loop; overflows; the dtypes of inputs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "core/str.h"
#include "tests/support/log_file.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

// ------------------------------------------------------------------- 16-bit models, fp32 masters

/// A 16-bit model and fp32 masters by hand. Ranks are played one after the other.
TrainingRun plain_mixed_run(const Case& c, at::ScalarType dtype, double scale) {
  Mlp model;
  fill_parameters(*model, 1);
  std::vector<at::Tensor> masters;
  for (const at::Tensor& parameter : model->parameters())
    masters.push_back(parameter.detach().clone().set_requires_grad(true));
  model->to(dtype);
  const auto optimizer = plain_optimizer(c, masters);
  TrainingRun run;
  for (int step = 0; step < c.steps; ++step) {
    for (at::Tensor& master : masters) master.mutable_grad() = at::zeros_like(master);
    double sum = 0;
    for (int micro = 0; micro < c.accumulation; ++micro)
      for (int rank = 0; rank < c.world; ++rank) {
        const at::Tensor loss = mlp_loss(*model, step, first_sample(c, micro, rank), c.micro_batch);
        sum += loss.item<double>() / c.accumulation / c.world;
        model->zero_grad();
        (loss.to(at::kFloat) * (scale / c.accumulation)).backward();
        for (size_t i = 0; i < masters.size(); ++i)
          masters[i].mutable_grad().add_(model->parameters()[i].grad().to(at::kFloat), 1 / (scale * c.world));
      }
    run.losses.push_back(sum);
    optimizer->step();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < masters.size(); ++i) model->parameters()[i].copy_(masters[i]);
  }
  size_t i = 0;
  for (const auto& item : model->named_parameters()) run.weights[item.key()] = masters[i++].detach();
  return run;
}

class Mixed : public ::testing::TestWithParam<std::tuple<int, int>> {};  // world, stage

TEST_P(Mixed, EqualsMastersByHand) {
  for (const bool fp16 : {false, true})
    for (const std::string optimizer : {"SGD", "AdamW"}) {
      SCOPED_TRACE(str(fp16 ? "fp16 " : "bf16 ", optimizer));
      Case c = small_units(std::get<0>(GetParam()), std::get<1>(GetParam()));
      c.accumulation = 2;
      c.steps = 6;
      c.optimizer = optimizer;
      c.config.bf16 = !fp16;
      c.config.fp16.enabled = fp16;
      c.config.fp16.initial_scale_power = 10;
      const TrainingRun plain = plain_mixed_run(c, fp16 ? at::kHalf : at::kBFloat16, fp16 ? 1024 : 1);
      bool in_16_bits = true;
      const TrainingRun run = engine_run<Mlp>(c, mlp_loss, [&](Engine& engine, int) {
        for (const zero::UnitSpec& unit : engine.sharded_model().layout().units())
          if (unit.dtype == DType::kFloat32) in_16_bits = false;
        if (engine.skipped_steps() != 0) throw Error("no step is to be skipped");
      });
      EXPECT_TRUE(in_16_bits);
      for (int step = 0; step < c.steps; ++step)
        EXPECT_NEAR(run.losses[step], plain.losses[step], 1e-3 * plain.losses[step]) << step;
      // Only rounding of 16-bit values that a last-bit difference tipped over; a
      // lost master would show 100 times more.
      EXPECT_LT(largest_difference(run.weights, plain.weights), optimizer == "SGD" ? 2e-4 : 2e-2);
      for (const auto& [name, weight] : run.weights) {
        EXPECT_EQ(weight.scalar_type(), at::kFloat);
        EXPECT_FALSE(at::equal(weight, weight.to(at::kBFloat16).to(at::kFloat)))
            << name << " has lost its fp32 digits";
      }
    }
}

INSTANTIATE_TEST_SUITE_P(WorldsAndStages, Mixed,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return str("World", std::get<0>(info.param), "Stage", std::get<1>(info.param));
                         });

// -------------------------------------------------------------------------------- non-finite gradients

Tensors all_parameters(Engine& engine) {
  Tensors tensors;
  for (const auto& spec : engine.sharded_model().layout().parameters())
    tensors[spec.name] = engine.full_parameter(spec.name);
  return tensors;
}

/// One step. With `overflow`, this rank's gradient of fc2.bias, and of nothing else, is infinite.
void train_step(TypedEngine<MlpImpl>& engine, int step, bool overflow) {
  at::Tensor loss = mlp_loss(engine.module(), step, 2 * engine.rank(), 2);
  if (overflow) loss = loss + engine.module().fc2->bias.sum() * INFINITY;
  engine.backward(loss);
  engine.step();
}

class Overflow : public ::testing::TestWithParam<int> {};  // stage

TEST_P(Overflow, OnOneRankSkipsTheStepOnAll) {
  const LogFile log;
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.optimizer = "AdamW";
    c.config.fp16 = {.enabled = true, .initial_scale_power = 8, .loss_scale_window = 3, .hysteresis = 2};
    Mlp model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, engine_config(c), comm, {.log = log.logger()});
    // Two overflows lower the scale (hysteresis 2); three good steps after the first raise it again.
    const std::vector<bool> overflows{false, true, true, false, false, false, false, false};
    const std::vector<double> scales{256, 256, 128, 128, 128, 128, 256, 256};
    for (size_t step = 0; step < overflows.size(); ++step) {
      SCOPED_TRACE(str("step ", step, " rank ", comm->rank()));
      const Tensors before = all_parameters(*engine);
      const int64_t skipped = engine->skipped_steps();
      train_step(*engine, static_cast<int>(step), overflows[step] && comm->rank() == 1);
      EXPECT_EQ(engine->skipped_steps() - skipped, overflows[step] ? 1 : 0);
      EXPECT_EQ(engine->global_steps(), static_cast<int64_t>(step) + 1);
      EXPECT_EQ(engine->loss_scale(), scales[step]);
      EXPECT_EQ(std::isinf(engine->gradient_norm()), overflows[step]);
      EXPECT_EQ(bit_equal(all_parameters(*engine), before), overflows[step]);
    }
  });
  const std::string text = log.text();
  EXPECT_THAT(
      text, ::testing::HasSubstr("step 2 skipped: 11 gradient elements are not finite, first in fc2.bias\n"));
  EXPECT_THAT(
      text,
      ::testing::HasSubstr(
          "step 3 skipped: 11 gradient elements are not finite, first in fc2.bias; loss scale 256 -> 128\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << "rank 0 alone talks: " << text;
}

// The schedule moves with the steps that are applied: a skipped one must not
// change the rate of those after it.
TEST_P(Overflow, InFp32AndBf16TooAndTrainingGoesOnAsIfNothingHadBeen) {
  for (const bool bf16 : {false, true}) {
    Tensors with, without;
    for (const bool overflow : {false, true})
      on_ranks(2, [&](comm::CommunicatorPtr comm) {
        Case c = small_units(2, GetParam());
        c.optimizer = "AdamW";
        c.config.bf16 = bf16;
        Mlp model;
        fill_parameters(*model, 1);
        EngineConfig config = engine_config(c);
        config.scheduler =
            WarmupLrOptions{.warmup_min_lr = {1e-4}, .warmup_max_lr = {0.05}, .warmup = {.num_steps = 10}};
        auto engine = initialize(model, config, comm);
        for (int step = 0; step < 4; ++step) {
          if (step == 2 && overflow) train_step(*engine, 77, comm->rank() == 0);
          train_step(*engine, step, false);
        }
        EXPECT_EQ(engine->skipped_steps(), overflow ? 1 : 0);
        EXPECT_EQ(engine->loss_scale(), 1);
        Tensors parameters = all_parameters(*engine);
        if (comm->rank() == 0) (overflow ? with : without) = std::move(parameters);
      });
    EXPECT_TRUE(bit_equal(with, without))
        << "a skipped step must leave no trace, in Adam's moments and step counts either";
  }
}

TEST_P(Overflow, AtTheSmallestScaleIsAnErrorThatCanBeSurvived) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.config.fp16 = {.enabled = true, .initial_scale_power = 0, .hysteresis = 1};
    Mlp model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, engine_config(c), comm);
    train_step(*engine, 0, false);
    const Tensors before = all_parameters(*engine);
    const std::string error = error_of([&] { train_step(*engine, 1, comm->rank() == 1); });
    EXPECT_THAT(error, ::testing::HasSubstr("fp16.min_loss_scale = 1"));
    EXPECT_THAT(error, ::testing::HasSubstr("first in fc2.bias"));
    EXPECT_TRUE(bit_equal(all_parameters(*engine), before));
    EXPECT_EQ(engine->skipped_steps(), 1);
    train_step(*engine, 2, false);
    EXPECT_FALSE(bit_equal(all_parameters(*engine), before));
    EXPECT_EQ(engine->global_steps(), 3);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Overflow, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

TEST(LossScale, AStaticOneStaysPutAndDoesNotChangeTheNumbers) {
  std::vector<TrainingRun> runs;
  for (const double scale : {128.0, 1.0}) {
    Case c = small_units(2, 2);
    c.config.fp16 = {.enabled = true, .loss_scale = scale};
    runs.push_back(
        engine_run<Mlp>(c, mlp_loss, [&](Engine& engine, int) { EXPECT_EQ(engine.loss_scale(), scale); }));
  }
  EXPECT_LT(largest_difference(runs[0].gradients[0], runs[1].gradients[0]), 2e-3)
      << "gradients are reported unscaled";
  EXPECT_NEAR(runs[0].norms[0], runs[1].norms[0], 2e-3);
  EXPECT_LT(largest_difference(runs[0].weights, runs[1].weights), 2e-3);
}

TEST(LossScale, ClippingIsOfTheUnscaledNorm) {
  const auto run = [](double clipping, bool fp16) {
    Case c = small_units(2, 2);
    c.clipping = clipping;
    c.config.fp16 = {.enabled = fp16, .loss_scale = 1024};
    return fp16 ? engine_run<Mlp>(c, mlp_loss) : plain_run<Mlp>(c, mlp_loss);
  };
  for (const double clipping : {0.05, 100.0}) {
    SCOPED_TRACE(clipping);
    const TrainingRun plain = run(clipping, false), scaled = run(clipping, true);
    EXPECT_EQ(plain.norms.front() > clipping, clipping < 1)
        << "the one is to clip, the other is not, though the scaled norm is above it";
    EXPECT_GT(1024 * plain.norms.front(), clipping);
    EXPECT_LT(largest_difference(scaled.weights, plain.weights), 3e-3);
  }
  EXPECT_GT(largest_difference(run(0.05, false).weights, run(100, false).weights), 0.02)
      << "or the test shows nothing";
}

TEST(LossScale, OfTwoToTheSixteenDoesNotItselfOverflowAnFp16LossUnderAccumulation) {
  Case c = small_units(1, 0);
  c.accumulation = 4;
  c.steps = 1;
  c.config.fp16 = {.enabled = true};  // 65536, above fp16's largest number
  engine_run<Mlp>(c, mlp_loss, [](Engine& engine, int) {
    EXPECT_EQ(engine.loss_scale(), 65536);
    EXPECT_EQ(engine.skipped_steps(), 0);
  });
}

// --------------------------------------------------------------------------------------------- autocast

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

TEST(Autocast, CastsOfReleasedUnitsAreReleased) {
  on_ranks(2, [](comm::CommunicatorPtr comm) {
    Case c = small_units(2, 3);
    c.config.autocast.enabled = true;
    c.config.zero.unit_numel = 170;  // one linear layer each
    c.config.zero.communication_buffers = 1;
    Mlp model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, engine_config(c), comm);
    int64_t weights = 0, largest_unit = 0;
    for (const auto& item : model->named_parameters())
      if (item.value().dim() == 2) weights += item.value().numel();
    for (const zero::UnitSpec& unit : engine->sharded_model().layout().units())
      largest_unit = std::max(largest_unit, unit.numel);
    ASSERT_GT(weights, largest_unit);
    ASSERT_EQ(engine->sharded_model().layout().num_units(), 3);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = engine->forward(randn({2, 7}, step), randn({2, 3}, step));
      EXPECT_LE(engine->sharded_model().residency().casts().live_bytes(), 2 * largest_unit)
          << "of " << 2 * weights;
      engine->backward(loss);
      engine->step();
      EXPECT_EQ(engine->sharded_model().residency().casts().live_bytes(), 0);
    }
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
  {
    const AutocastScope off({.enabled = false}, at::kCPU);
    EXPECT_EQ(at::matmul(a, b).scalar_type(), at::kFloat);
  }
}

// ------------------------------------------------------------------------------------- inputs and buffers

/// Tells the dtypes of everything it is given.
struct ListenerImpl : torch::nn::Module {
  ListenerImpl() {
    weight = register_parameter("weight", at::ones({1}));
    register_buffer("mean", at::ones({1}));
    register_buffer("count", at::ones({1}, at::kLong));
  }
  std::string forward(at::Tensor a, std::vector<at::Tensor> list, std::optional<at::Tensor> maybe,
                      const std::pair<at::Tensor, int>& pair, std::map<std::string, at::Tensor> named,
                      c10::IValue value, const std::string& text) {
    std::ostringstream out;
    const auto say = [&](const at::Tensor& tensor) {
      out << (tensor.defined() ? c10::toString(tensor.scalar_type()) : "none") << ' ';
    };
    say(a);
    for (const at::Tensor& tensor : list) say(tensor);
    say(maybe.value_or(at::Tensor()));
    say(pair.first);
    say(named.at("x"));
    say(value.toTupleRef().elements()[0].toTensor());
    say(value.toTupleRef().elements()[1].toTensorVector()[1]);
    out << pair.second << text;
    return out.str();
  }
  at::Tensor weight;
};
TORCH_MODULE(Listener);

std::string heard(const EngineConfig& config, bool maybe) {
  Listener model;
  EngineConfig complete = config;
  complete.train_micro_batch_size_per_gpu = 1;
  std::string line;
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = initialize(model, complete, comm);
    const at::Tensor f32 = at::ones({1}), f64 = at::ones({1}, at::kDouble), i64 = at::ones({1}, at::kLong),
                     yes = at::ones({1}, at::kBool);
    const std::vector<at::Tensor> list{f64, i64, at::Tensor()};
    line = engine->forward(f32, list, maybe ? std::optional(f32) : std::nullopt, std::pair(f32, 7),
                           std::map<std::string, at::Tensor>{{"x", yes}},
                           c10::IValue(std::make_tuple(f32, std::vector<at::Tensor>{i64, f32})), "!");
    EXPECT_EQ(list[0].scalar_type(), at::kDouble) << "the caller's own are left alone";
  });
  return line;
}

TEST(Inputs, FloatingOnesTakeTheDtypeOf16BitModels) {
  EngineConfig config;
  EXPECT_EQ(heard(config, true), "Float Double Long none Float Float Bool Float Float 7!");
  config.bf16 = true;
  EXPECT_EQ(heard(config, true), "BFloat16 BFloat16 Long none BFloat16 BFloat16 Bool BFloat16 BFloat16 7!");
  config.bf16 = false;
  config.fp16.enabled = true;
  EXPECT_EQ(heard(config, false), "Half Half Long none none Half Bool Half Half 7!");
}

TEST(Inputs, BuffersFollowTheModelsDtypeAndCountersStay) {
  Listener model;
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.bf16 = true;
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = initialize(model, config, comm);
    EXPECT_EQ(model->named_buffers()["mean"].scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->named_buffers()["count"].scalar_type(), at::kLong);
  });
}

}  // namespace
}  // namespace tessera::testing
