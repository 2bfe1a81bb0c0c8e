// Models whose parameters have several dtypes: a frozen bf16 base with fp32 adapters, trainable parameters of
// both, and what the sections bf16 and fp16 make of them; against a plain loop with masters by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "checkpoint/read/reader.h"
#include "core/str.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/backend.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

/// Two linear layers with low-rank adapters (Hu et al. 2021), and a head.
struct LoraImpl : torch::nn::Module {
  LoraImpl(at::ScalarType base_dtype, at::ScalarType adapter_dtype, bool casts, bool train_base)
      : casts(casts) {
    for (int i = 0; i < 2; ++i) {
      base[i] = register_module(str("base", i), torch::nn::Linear(24, 24));
      a[i] = register_parameter(str("a", i), at::zeros({3, 24}));
      b[i] = register_parameter(str("b", i), at::zeros({24, 3}));
    }
    head = register_module("head", torch::nn::Linear(24, 5));
    fill_parameters(*this, 1);
    to(adapter_dtype);
    for (auto& layer : base) {
      layer->to(base_dtype);
      for (auto& parameter : layer->parameters()) parameter.set_requires_grad(train_base);
    }
  }
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target) {
    at::Tensor x = input;
    for (int i = 0; i < 2; ++i) {
      at::Tensor y = base[i]->forward(casts ? x.to(base[i]->weight.scalar_type()) : x);
      if (casts) y = y.to(x.scalar_type());
      x = at::tanh(y + at::linear(at::linear(x, a[i]), b[i]));
    }
    return at::mse_loss(head->forward(x).to(at::kFloat), target.to(at::kFloat));
  }
  bool casts;
  torch::nn::Linear base[2]{nullptr, nullptr}, head{nullptr};
  at::Tensor a[2], b[2];
};
TORCH_MODULE(Lora);

/// How a model is made and trained.
struct Way {
  const char* name;
  at::ScalarType base = at::kBFloat16, adapters = at::kFloat;
  bool casts = true;      // the model casts between them
  bool autocast = false;  // or they run under autocast
  bool train_base = false;
  Lora make() const { return Lora(base, adapters, casts, train_base); }
};

constexpr Way kWays[] = {{.name = "LoraWithCasts"},
                         {.name = "LoraUnderAutocast", .casts = false, .autocast = true},
                         {.name = "LoraOnFp16", .base = at::kHalf},
                         {.name = "LoraAllBf16", .adapters = at::kBFloat16, .casts = false},
                         {.name = "TrainableOfTwoDtypes", .train_base = true}};

at::Tensor lora_loss(LoraImpl& model, int step, int64_t first, int64_t num) {
  const at::ScalarType dtype = model.a[0].scalar_type();
  return model.forward(randn({8, 24}, 100 + step).narrow(0, first, num).to(dtype),
                       randn({8, 5}, 200 + step).narrow(0, first, num));
}

Case lora_case(const Way& way, int world, int stage, const std::string& backend) {
  Case c = small_units(world, stage);
  c.backend = backend;
  c.steps = 4;
  c.config.zero.unit_numel = 700;
  c.config.autocast.enabled = way.autocast;
  return c;
}

TrainingRun plain_lora_run(const Case& c, const Way& way) {
  Lora model = way.make();
  const auto loss_of = [&](int step, int64_t first, int64_t num) {
    const AutocastScope scope({.enabled = way.autocast}, at::kCPU);
    return lora_loss(*model, step, first, num);
  };
  return plain_master_run(c, *model, fp32_masters(*model), loss_of);
}

using Look = std::function<void(TypedEngine<LoraImpl>&)>;
TrainingRun lora_run(const Case& c, const Way& way, const Look& look = {}) {
  TrainingRun run;
  on_ranks(
      c.world,
      [&](comm::CommunicatorPtr comm) {
        Lora model = way.make();
        auto engine = initialize(model, engine_config(c), comm);
        const auto loss = [&](int step, int64_t first, int64_t num) {
          const AutocastScope scope(c.config.autocast, at::kCPU);
          return lora_loss(*model, step, first, num);
        };
        TrainingRun mine = rank_run(c, *engine, loss, {});
        if (look) look(*engine);
        if (comm->rank() == 0) run = std::move(mine);
      },
      c.backend);
  return run;
}

class Dtypes : public ::testing::TestWithParam<std::tuple<Way, int, std::string>> {  // world, backend
 protected:
  const Way& way() const { return std::get<0>(GetParam()); }
  Case make_case(int stage) const {
    return lora_case(way(), std::get<1>(GetParam()), stage, std::get<2>(GetParam()));
  }
};

TEST_P(Dtypes, TrainAsInPlainLibtorchAtEveryStage) {
  TESSERA_ON_ONE_BACKEND();
  const TrainingRun plain = plain_lora_run(make_case(0), way());
  EXPECT_LT(plain.losses.back(), plain.losses.front());
  TrainingRun at_stage_0;
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    const TrainingRun run = lora_run(make_case(stage), way(), [&](TypedEngine<LoraImpl>& engine) {
      EXPECT_EQ(engine.module().base[1]->weight.scalar_type(), way().base);
      EXPECT_EQ(engine.module().a[1].scalar_type(), way().adapters);
      EXPECT_EQ(engine.measured_bytes(), engine.formula_bytes());
    });
    for (size_t step = 0; step < plain.losses.size(); ++step)
      EXPECT_NEAR(run.losses[step], plain.losses[step], 1e-5) << step;
    EXPECT_LT(largest_difference(run.weights, plain.weights),
              way().train_base || way().adapters != at::kFloat ? 1e-4 : 1e-5);
    if (stage == 0) at_stage_0 = run;
    EXPECT_EQ(run.losses, at_stage_0.losses);
    EXPECT_TRUE(bit_equal(run.weights, at_stage_0.weights));
  }
}

std::string name_of_way(const ::testing::TestParamInfo<std::tuple<Way, int, std::string>>& info) {
  return str(std::get<0>(info.param).name, std::get<1>(info.param), std::get<2>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Alone, Dtypes,
                         ::testing::Combine(::testing::ValuesIn(kWays), ::testing::Values(1),
                                            ::testing::Values("gloo")),
                         name_of_way);
INSTANTIATE_TEST_SUITE_P(Ranks, Dtypes,
                         ::testing::Combine(::testing::ValuesIn(kWays), ::testing::Values(2),
                                            ::testing::Values("gloo", "shm")),
                         name_of_way);

TEST(Dtypes, AFrozenBf16BaseIsTwoBytesAnElement) {
  for (const std::string backend : {"gloo", "shm"})
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(str(backend, " stage ", stage));
      const Case c = lora_case(kWays[0], 2, stage, backend);
      lora_run(c, kWays[0], [&](TypedEngine<LoraImpl>& engine) {
        constexpr int64_t kBase = 2 * (24 * 24 + 24), kTrainable = 4 * 3 * 24 + 5 * 24 + 5;
        const int64_t base_parts = stage == 3 ? 2 : 1,
                      trainable_parts = stage == 3 || (stage > 0 && backend == "shm") ? 2 : 1;
        constexpr int64_t kPadding = 2 * 64 * 12;  // bytes: units end at 64 a rank, parameters begin at 64
        const zero::StateBytes bytes = engine.measured_bytes();
        const int64_t expected = 2 * kBase / base_parts + 4 * kTrainable / trainable_parts;
        EXPECT_GE(bytes.parameters, expected);
        EXPECT_LE(bytes.parameters, expected + kPadding);
        EXPECT_EQ(bytes.master, 0) << "frozen parameters have none, and fp32 ones are their own";
        EXPECT_LE(bytes.optimizer, 4 * kTrainable / (stage == 0 ? 1 : 2) + 2 * kPadding)
            << "momentum of the adapters";
      });
    }
}

TEST(Dtypes, CheckpointsKeepThem) {
  const TestFolder folder("dtypes");
  const Way way = kWays[0];
  Tensors saved, consolidated;
  double next_loss = 0;
  lora_run(lora_case(way, 2, 3, "shm"), way, [&](TypedEngine<LoraImpl>& engine) {
    engine.save_checkpoint(folder.string(), "tag");
    Tensors state = whole_state(engine);
    engine.backward(lora_loss(engine.module(), 9, 0, 4));
    engine.step();
    const double loss = lora_loss(engine.module(), 10, 0, 4).item<double>();
    if (engine.rank() == 0) saved = std::move(state), next_loss = loss;
  });
  const checkpoint::SavedLayout layout =
      checkpoint::Checkpoint::open(folder.string(), "tag").manifest().layout;
  for (const checkpoint::SavedParameter& parameter : layout.parameters) {
    const bool base = parameter.name.starts_with("base");
    EXPECT_EQ(layout.units[parameter.unit].trainable, !base) << parameter.name;
    EXPECT_EQ(layout.units[parameter.unit].dtype, base ? DType::kBFloat16 : DType::kFloat32)
        << parameter.name;
  }
  checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
  options.directory = folder.string();
  options.tag = "tag";
  options.output = folder / "model.safetensors";
  checkpoint::convert_checkpoint(options);
  for (int stage = 0; stage <= 3; ++stage)
    for (const bool weights_alone : {false, true}) {
      SCOPED_TRACE(str("stage ", stage, weights_alone ? " weights" : ""));
      on_ranks(1, [&](comm::CommunicatorPtr comm) {
        Lora model = way.make();
        {
          const at::NoGradGuard no_grad;
          for (auto& parameter : model->parameters()) parameter.fill_(7);
        }
        Case c = lora_case(way, 1, stage, "gloo");
        c.micro_batch = 4;
        auto engine = initialize(model, engine_config(c), comm);
        if (weights_alone) {
          engine->load_weights(folder / "model.safetensors");
        } else {
          engine->load_checkpoint(folder.string(), "tag");
          EXPECT_TRUE(bit_equal(whole_state(*engine), saved));
        }
        for (const auto& item : way.make()->named_parameters())
          EXPECT_TRUE(at::equal(engine->full_parameter(item.key()), saved.at(item.key()))) << item.key();
        EXPECT_EQ(model->base[0]->weight.scalar_type(), at::kBFloat16);
        if (weights_alone) return;  // without momentum
        engine->backward(lora_loss(*model, 9, 0, 4));
        engine->step();
        EXPECT_NEAR(lora_loss(*model, 10, 0, 4).item<double>(), next_loss, 1e-5);
      });
    }
}

TEST(Dtypes, TheSectionsCastAllParametersAsDeepSpeedDoes) {
  for (const bool fp16 : {false, true})
    for (int stage : {0, 3})
      on_ranks(2, [&](comm::CommunicatorPtr comm) {
        Lora model(at::kBFloat16, at::kFloat, true, false);
        Case c = lora_case(kWays[0], 2, stage, "gloo");
        c.config.bf16 = !fp16;
        c.config.fp16 = {.enabled = fp16, .initial_scale_power = 4};
        auto engine = initialize(model, engine_config(c), comm);
        for (const auto& parameter : model->parameters())
          EXPECT_EQ(parameter.scalar_type(), fp16 ? at::kHalf : at::kBFloat16);
        const at::Tensor before = engine->full_parameter("a0");
        EXPECT_FALSE(at::equal(before, before.to(at::kBFloat16).to(at::kFloat)))
            << "adapters have fp32 masters";
        engine->backward(engine->forward(randn({2, 24}, 1), randn({2, 5}, 2)));
        engine->step();
        EXPECT_FALSE(at::equal(engine->full_parameter("a0"), before));
        EXPECT_EQ(engine->measured_bytes(), engine->formula_bytes());
      });
}

TEST(Dtypes, AnUnscaledTrainableFp16ParameterIsRefusedByName) {
  on_ranks(1, [](comm::CommunicatorPtr comm) {
    const auto error = [&](at::ScalarType base, at::ScalarType adapters, bool autocast) {
      Lora model(base, adapters, true, false);
      Case c = lora_case(kWays[0], 1, 1, "gloo");
      c.config.autocast = {.enabled = autocast, .dtype = DType::kFloat16};
      return error_of<ConfigError>([&] { initialize(model, engine_config(c), comm); });
    };
    EXPECT_THAT(error(at::kBFloat16, at::kHalf, false),
                HasSubstr("parameter a0 is trainable and fp16, whose gradients need a loss scale"));
    EXPECT_EQ(error(at::kBFloat16, at::kHalf, true), "") << "there it is scaled";
    EXPECT_EQ(error(at::kHalf, at::kFloat, false), "") << "frozen ones have no gradients";
  });
}

TEST(Dtypes, InputsFollowAModelOfOne16BitDtype) {
  for (int stage : {0, 3})
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Lora model(at::kBFloat16, at::kBFloat16, false, true);
      auto engine = initialize(model, engine_config(lora_case(kWays[0], 1, stage, "gloo")), comm);
      engine->backward(engine->forward(randn({2, 24}, 1), randn({2, 5}, 2)));  // fp32 inputs
      engine->step();
      const at::Tensor master = engine->full_parameter("base0.weight");
      EXPECT_FALSE(at::equal(master, master.to(at::kBFloat16).to(at::kFloat))) << "updates are kept in fp32";
      EXPECT_GT(engine->measured_bytes().master, 0);
    });
}

}  // namespace
}  // namespace tessera::testing
