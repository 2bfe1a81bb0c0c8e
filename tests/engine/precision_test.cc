// bf16 and fp16 models against a plain loop with fp32 masters; the dtypes of inputs and buffers.
#include <gtest/gtest.h>

#include <sstream>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

// ------------------------------------------------------------------- 16-bit models, fp32 masters

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
      Mlp model;
      fill_parameters(*model, 1);
      const std::vector<at::Tensor> masters = fp32_masters(*model);
      model->to(fp16 ? at::kHalf : at::kBFloat16);
      const auto loss_of = [&](int step, int64_t first, int64_t num) {
        return mlp_loss(*model, step, first, num);
      };
      const TrainingRun plain = plain_master_run(c, *model, masters, loss_of, fp16 ? 1024 : 1);
      bool in_16_bits = true;
      const TrainingRun run = engine_run<Mlp>(c, mlp_loss, [&](Engine& engine, int) {
        for (const zero::UnitSpec& unit : engine.sharded_model().layout().units())
          if (unit.dtype == DType::kFloat32) in_16_bits = false;
        if (engine.skipped_steps() != 0) throw Error("no step is to be skipped");
      });
      EXPECT_TRUE(in_16_bits);
      for (int step = 0; step < c.steps; ++step)
        EXPECT_NEAR(run.losses[step], plain.losses[step], 1e-3 * plain.losses[step]) << step;
      // Differences in the last bit change some 16-bit roundings. A lost master would give 100 times more.
      EXPECT_LT(largest_difference(run.weights, plain.weights), optimizer == "SGD" ? 2e-4 : 2e-2);
      for (const auto& [name, weight] : run.weights) {
        EXPECT_EQ(weight.scalar_type(), at::kFloat);
        EXPECT_FALSE(at::equal(weight, weight.to(at::kBFloat16).to(at::kFloat)))
            << name << " has lost its fp32 digits";
      }
    }
}

INSTANTIATE_TEST_SUITE_P(WorldsAndStages, Mixed,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return str("World", std::get<0>(info.param), "Stage", std::get<1>(info.param));
                         });

// ------------------------------------------------------------------------------------- inputs and buffers

/// Returns the dtypes of its arguments.
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

TEST(Inputs, BuffersKeepTheirDtypeUnlessTheConfigurationSaysOtherwise) {
  Listener model;
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.bf16 = true;
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = initialize(model, config, comm);
    EXPECT_EQ(model->named_buffers()["mean"].scalar_type(), at::kFloat);
    config.buffer_dtype = DType::kFloat16;
    Listener other;
    engine = initialize(other, config, comm);
    EXPECT_EQ(other->named_buffers()["mean"].scalar_type(), at::kHalf);
    EXPECT_EQ(other->named_buffers()["count"].scalar_type(), at::kLong);
  });
}

}  // namespace
}  // namespace tessera::testing
