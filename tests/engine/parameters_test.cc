// The engine owns the parameters: one that was moved, replaced or written in place is refused by name, at
// every stage and in every dtype. Values written inside a GatheredParameters are used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <sstream>

#include "comm/torch_dtype.h"
#include "core/str.h"
#include "tests/support/backend.h"
#include "tests/support/losses.h"
#include "zero/gathered_parameters.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

enum class Precision { kFp32, kBf16, kFp16 };

class ParametersAt
    : public ::testing::TestWithParam<std::tuple<std::string, int, Precision>> {  // backend, stage
 protected:
  int stage() const { return std::get<1>(GetParam()); }
  void on_two_ranks(const std::function<void(comm::CommunicatorPtr)>& body) const {
    on_ranks(2, body, std::get<0>(GetParam()));
  }
  EngineConfig config() const {
    Case c = small_units(2, stage());
    c.config.bf16 = std::get<2>(GetParam()) == Precision::kBf16;
    c.config.fp16 = {.enabled = std::get<2>(GetParam()) == Precision::kFp16, .initial_scale_power = 4};
    return engine_config(c);
  }
};

void train_step(TypedEngine<MlpImpl>& engine, int step) {
  engine.backward(step_loss(engine, step));
  engine.step();
}

std::string forward_error(TypedEngine<MlpImpl>& engine) {
  return error_of<Error>([&] { engine.forward(randn({2, 7}, 1), randn({2, 3}, 2)); });
}

/// Takes a loss first, while the model may still be called.
std::string backward_error(TypedEngine<MlpImpl>& engine, const std::function<void()>& meanwhile) {
  const at::Tensor loss = mlp_loss(engine.module(), 0, 0, 2);
  meanwhile();
  return error_of<Error>([&] { engine.backward(loss); });
}

// ------------------------------------------------------------------------------------- replaced memory

TEST_P(ParametersAt, AModelMovedOutOfItsUnitsIsRefusedByName) {
  TESSERA_ON_ONE_BACKEND();
  on_two_ranks([&](comm::CommunicatorPtr comm) {
    const at::ScalarType dtype = to_torch(config().compute_dtype());
    const auto with_engine = [&](const std::function<void(TypedEngine<MlpImpl>&)>& body) {
      Mlp model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, config(), comm);
      train_step(*engine, 0);
      const zero::GatheredParameters gathered(engine->sharded_model(), {});  // so that the model can be read
      body(*engine);
    };
    with_engine([&](TypedEngine<MlpImpl>& engine) {
      engine.module().to(at::kDouble);
      EXPECT_THAT(forward_error(engine), AllOf(HasSubstr("parameter fc1.weight"),
                                               HasSubstr(c10::toString(dtype)), HasSubstr("Double")));
    });
    with_engine([&](TypedEngine<MlpImpl>& engine) {
      engine.module().to(at::kDouble);
      engine.module().to(dtype);  // changes no value
      EXPECT_THAT(forward_error(engine),
                  AllOf(HasSubstr("parameter fc1.weight is not in the engine's memory"),
                        HasSubstr("load_weights()")));
      EXPECT_THAT(error_of<Error>([&] { engine.save_checkpoint("/nowhere"); }), HasSubstr("fc1.weight"));
    });
    with_engine([&](TypedEngine<MlpImpl>& engine) {
      EXPECT_THAT(backward_error(engine, [&] { engine.module().fc2->bias.set_data(at::ones({11}, dtype)); }),
                  HasSubstr("parameter fc2.bias is not in the engine's memory"));
    });
    with_engine([&](TypedEngine<MlpImpl>& engine) { EXPECT_EQ(forward_error(engine), ""); });
  });
}

TEST(Parameters, TorchLoadIntoAModelOfAnEngineIsRefused) {
  std::stringstream file;
  Mlp saved;
  fill_parameters(*saved, 5);
  torch::save(saved, file);
  for (int stage = 0; stage <= 3; ++stage) {
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Mlp model;
      auto engine = initialize(model, engine_config(small_units(1, stage)), comm);
      std::stringstream copy(file.str());
      const auto names_the_parameter = AllOf(HasSubstr("writes into unit 0 (fc1.weight"),
                                             HasSubstr("parameter fc1.weight belongs to the engine"));
      EXPECT_THAT(error_of<c10::Error>([&] { torch::load(model, copy); }), names_the_parameter);
      EXPECT_THAT(forward_error(*engine), names_the_parameter);
    });
  }
}

// ------------------------------------------------------------------------------------ replaced tensors

TEST(Parameters, AnotherTensorInTheModuleIsRefusedByName) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      torch::jit::Module model("Net");
      model.register_parameter("weight", randn({3, 7}, 1).set_requires_grad(true), false);
      model.register_parameter("bias", randn({3}, 2).set_requires_grad(true), false);
      model.register_attribute("training", c10::BoolType::get(), true);
      model.define(
          "def forward(self, x):\n  return torch.linear(x, self.weight, self.bias).square().mean()\n");
      auto engine = initialize(model, engine_config(small_units(1, stage)), comm);
      const auto step = [&] {
        engine->backward(engine->forward(randn({2, 7}, 3)).toTensor());
        engine->step();
      };
      step();
      model.setattr("bias", at::ones({3}).set_requires_grad(true));
      EXPECT_THAT(error_of<Error>(step),
                  HasSubstr("parameter bias was replaced by another tensor after initialize()"));
    });
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      struct NetImpl : torch::nn::Module {
        at::Tensor forward(const at::Tensor& x) {
          return dict->get("a").mul(x).sum() + linear->forward(x).sum();
        }
        torch::nn::ParameterDict dict{register_module("dict", torch::nn::ParameterDict())};
        torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 3))};
      };
      const auto model = std::make_shared<NetImpl>();
      model->dict->insert("a", randn({3}, 1).set_requires_grad(true));
      auto engine = initialize(model, engine_config(small_units(1, stage)), comm);
      const auto step = [&] {
        engine->backward(engine->forward(randn({3}, 3)));
        engine->step();
      };
      step();
      model->dict->insert("b", at::ones({3}).set_requires_grad(true));
      EXPECT_THAT(error_of<Error>(step), HasSubstr("parameter dict.b was registered after initialize()"));
      model->dict->pop("b");
      step();
      model->dict->pop("a");
      EXPECT_THAT(error_of<Error>([&] { engine->backward(model->linear->forward(randn({3}, 3)).sum()); }),
                  HasSubstr("parameter dict.a was removed from the model after initialize()"));
    });
  }
}

// -------------------------------------------------------------------------------------- in-place writes

TEST_P(ParametersAt, AWriteInPlaceBetweenStepsIsRefused) {
  TESSERA_ON_ONE_BACKEND();
  on_two_ranks([&](comm::CommunicatorPtr comm) {
    const std::vector<std::function<void(at::Tensor)>> writes{
        [](at::Tensor p) { p.mul_(0.5); }, [](at::Tensor p) { p[1].zero_(); },
        [](at::Tensor p) { p.detach().fill_(1); }, [](at::Tensor p) { p.data().clamp_(-1, 1); }};
    for (size_t i = 0; i < writes.size(); ++i) {
      SCOPED_TRACE(i);
      Mlp model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, config(), comm);
      train_step(*engine, 0);
      const std::string expected = "parameter fc2.weight belongs to the engine";
      {
        const at::NoGradGuard no_grad;
        EXPECT_THAT(error_of<c10::Error>([&] { writes[i](model->fc2->weight); }), HasSubstr(expected));
      }
      EXPECT_THAT(forward_error(*engine),
                  AllOf(HasSubstr(expected), HasSubstr("inside a GatheredParameters with modifier_rank")));
      EXPECT_THAT(error_of<Error>([&] { engine->step(); }), HasSubstr(expected));
      EXPECT_THAT(error_of<Error>([&] { engine->save_checkpoint("/nowhere"); }), HasSubstr(expected));
    }
  });
}

TEST_P(ParametersAt, WritesInsideAGatheredParametersAreTrainedOnOnAllRanks) {
  TESSERA_ON_ONE_BACKEND();
  // By hand: a step of SGD from the values that were written.
  const at::ScalarType dtype = to_torch(config().compute_dtype());
  const auto bias = [](int rank) { return at::full({3}, 0.5 + rank); };
  Mlp plain;
  fill_parameters(*plain, 1);
  {
    const at::NoGradGuard no_grad;
    plain->fc3->bias.copy_(bias(1));
  }
  plain->to(dtype);
  at::Tensor gradient = at::zeros({3});
  for (int rank = 0; rank < 2; ++rank) {
    plain->zero_grad();
    mlp_loss(*plain, 0, 2 * rank, 2).backward();
    gradient += plain->fc3->bias.grad().to(at::kFloat) / 2;
  }
  const at::Tensor expected = bias(1) - 0.1 * (gradient + 0.01 * bias(1));
  on_two_ranks([&](comm::CommunicatorPtr comm) {
    Mlp model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, config(), comm);
    {
      zero::GatheredParameters gathered(engine->sharded_model(), {"fc3.bias"}, /*modifier_rank=*/1);
      const at::NoGradGuard no_grad;
      model->fc3->bias.copy_(bias(comm->rank()));
      EXPECT_TRUE(at::equal(model->fc3->bias.to(at::kFloat), bias(comm->rank())))
          << "each rank sees its own until it is closed";
      gathered.close();
    }
    train_step(*engine, 0);
    EXPECT_TRUE(
        at::allclose(engine->full_parameter("fc3.bias"), expected, 1e-3, dtype == at::kFloat ? 1e-6 : 2e-3))
        << engine->full_parameter("fc3.bias") << " expected " << expected;
    EXPECT_EQ(engine->global_steps() - engine->skipped_steps(), 1);
    train_step(*engine, 1);
  });
}

std::string name_of_case(const ::testing::TestParamInfo<ParametersAt::ParamType>& info) {
  const auto& [backend, stage, precision] = info.param;
  return str(backend, "Stage", stage,
             precision == Precision::kFp32   ? "Fp32"
             : precision == Precision::kBf16 ? "Bf16"
                                             : "Fp16");
}
// Host-shared units and those of a rank's own, in full and in 16 bits; the rest is for test-full.
INSTANTIATE_TEST_SUITE_P(
    All, ParametersAt,
    ::testing::Combine(::testing::Values("gloo", "shm", "hybrid"), ::testing::Values(0, 1, 2, 3),
                       ::testing::Values(Precision::kFp32, Precision::kBf16, Precision::kFp16)),
    name_of_case);

}  // namespace
}  // namespace tessera::testing
