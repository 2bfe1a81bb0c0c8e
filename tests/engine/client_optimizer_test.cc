// An optimizer of torch::optim given to initialize(): the same weights as training with that optimizer
// itself, at every stage; and what is refused.
#include "engine/client_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "engine/config/parse.h"
#include "tests/engine/optimizer/bowls.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
namespace optim = torch::optim;

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(BowlImpl&)>;

struct Client {
  friend void PrintTo(const Client& client, std::ostream* out) { *out << client.name; }
  std::string name;
  MakeOptimizer make;
};

/// Three groups: weight with `first`, bias and norm_weight with `second`, matrix with `third`.
template <class Optimizer, class Options>
MakeOptimizer in_groups(Options first, Options second, Options third) {
  return [=](BowlImpl& model) {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{model.weight}, std::make_unique<Options>(first));
    groups.emplace_back(std::vector<at::Tensor>{model.bias, model.norm_weight},
                        std::make_unique<Options>(second));
    groups.emplace_back(std::vector<at::Tensor>{model.matrix}, std::make_unique<Options>(third));
    return std::make_unique<Optimizer>(groups, first);
  };
}

std::vector<Client> clients() {
  using optim::AdagradOptions, optim::AdamOptions, optim::AdamWOptions, optim::RMSpropOptions,
      optim::SGDOptions;
  return {
      {"Adam", in_groups<optim::Adam>(AdamOptions(0.02).weight_decay(0.1), AdamOptions(0.02),
                                      AdamOptions(0.05).betas({0.8, 0.95}))},
      {"AdamW",
       in_groups<optim::AdamW>(AdamWOptions(0.02).weight_decay(0.3), AdamWOptions(0.02).weight_decay(0),
                               AdamWOptions(0.05).betas({0.8, 0.95}).eps(1e-6))},
      {"SGD", in_groups<optim::SGD>(SGDOptions(0.02).momentum(0.9).weight_decay(0.1),
                                    SGDOptions(0.01).momentum(0.8).dampening(0.3),
                                    SGDOptions(0.01).momentum(0.8).nesterov(true))},
      {"SGD", in_groups<optim::SGD>(SGDOptions(0.01), SGDOptions(0.01), SGDOptions(0.01).momentum(0.9))},
      {"Adam", in_groups<optim::Adam>(AdamOptions(0.02).amsgrad(true), AdamOptions(0.02),
                                      AdamOptions(0.05).amsgrad(true).weight_decay(0.1))},
      {"RMSprop",
       in_groups<optim::RMSprop>(RMSpropOptions(0.01).momentum(0.9), RMSpropOptions(0.02).alpha(0.9),
                                 RMSpropOptions(0.01).eps(1e-4).weight_decay(0.1))},
      {"Adagrad", in_groups<optim::Adagrad>(AdagradOptions(0.1), AdagradOptions(0.2).lr_decay(0.05),
                                            AdagradOptions(0.1).weight_decay(0.1).eps(1e-2))},
  };
}

class ClientOptimizer : public ::testing::TestWithParam<Client> {};

TEST_P(ClientOptimizer, TrainsAsTheOptimizerItselfDoes) {
  const Tensors plain = plain_bowl(GetParam().make);
  for (const int stage : {0, 3})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      EngineConfig config = bowl_config(stage, LionOptions{.lr = 100});  // is overruled
      config.optimizer.param_groups = {{.match = {"*"}, .params = {{"lr", 200}}}};
      Bowl model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, *GetParam().make(*model), config, comm);
      EXPECT_EQ(type_of(engine->config().optimizer.options), GetParam().name);
      EXPECT_EQ(engine->learning_rates().size(), 3U) << "one for each of the optimizer's groups";
      train_bowl(*engine);
      EXPECT_LT(largest_difference(full_parameters(*engine), plain), 2e-6) << "stage " << stage;
    });
}

INSTANTIATE_TEST_SUITE_P(All, ClientOptimizer, ::testing::ValuesIn(clients()),
                         [](const auto& info) { return str(info.param.name, info.index); });

OptimizerConfig config_of(const optim::Optimizer& optimizer, BowlImpl& model) {
  return client_optimizer(optimizer, zero::parameters_of(model));
}

TEST(ClientOptimizer, OneGroupNeedsNoParamGroups) {
  Bowl model;
  model->bias.requires_grad_(false);  // and may be left out
  const optim::SGD optimizer({model->weight, model->matrix, model->norm_weight}, optim::SGDOptions(0.5));
  EXPECT_EQ(config_of(optimizer, *model), (OptimizerConfig{.options = SGDOptions{.lr = 0.5}}));
}

TEST(ClientOptimizer, GroupsAreTheConfigurationsWithTheNamesOfTheirParameters) {
  Bowl model;
  const auto optimizer = clients()[1].make(*model);
  optimizer->add_param_group(optim::OptimizerParamGroup(std::vector<at::Tensor>{}));  // is ignored
  const OptimizerConfig config = config_of(*optimizer, *model);
  EXPECT_EQ(config.options, OptimizerOptions(AdamWOptions{.lr = 0.02, .weight_decay = 0.3}));
  std::vector<ParamGroupConfig> groups = {
      {.match = {}, .params = {{"weight_decay", 0}}, .parameters = {"bias", "norm_weight"}},
      {.match = {},
       .params = {{"lr", 0.05}, {"beta1", 0.8}, {"beta2", 0.95}, {"eps", 1e-6}, {"weight_decay", 0.01}},
       .parameters = {"matrix"}}};
  // From torch 2.15 on a group takes what its options do not set from the optimizer's defaults.
  const auto& options = static_cast<const optim::AdamWOptions&>(optimizer->param_groups()[2].options());
  if (options.weight_decay() == 0.3) groups[1].params.erase("weight_decay");
  EXPECT_EQ(config.param_groups, groups);
}

TEST(ClientOptimizer, WhatCannotBeTakenIsNamed) {
  Bowl model;
  const std::vector<at::Tensor> all = model->parameters();
  const auto error = [&](const optim::Optimizer& optimizer) {
    return error_of<ConfigError>([&] { config_of(optimizer, *model); });
  };
  EXPECT_EQ(error(*in_groups<optim::RMSprop>(optim::RMSpropOptions(0.1), optim::RMSpropOptions(0.1),
                                             optim::RMSpropOptions(0.1).centered(true))(*model)),
            "torch::optim::RMSprop: centered is the same in all groups of the formula");
  EXPECT_EQ(error(optim::Adagrad(all, optim::AdagradOptions(0.1).initial_accumulator_value(1))),
            "torch::optim::Adagrad: the formula's sum of squares starts at 0, and not at "
            "initial_accumulator_value");
  EXPECT_THAT(error(optim::LBFGS(all, optim::LBFGSOptions(0.1))),
              HasSubstr("torch::optim::LBFGS has no formula here, as torch::optim::Adam, AdamW, SGD"));
  EXPECT_EQ(error(optim::SGD(std::vector<at::Tensor>{}, optim::SGDOptions(0.1))),
            "the optimizer has no parameters");
  std::vector<at::Tensor> more = all;
  more.push_back(at::zeros({3, 4}));
  EXPECT_EQ(error(optim::SGD(more, optim::SGDOptions(0.1))),
            "the optimizer has a tensor of shape [3, 4] that is not a parameter of the model");
  for (const Client& client : clients()) {
    const auto stepped = client.make(*model);
    model->forward().backward();
    stepped->step();
    EXPECT_THAT(error(*stepped), HasSubstr("the optimizer has taken steps")) << client.name;
  }
}

/// Names that would match each other as patterns.
struct NamedImpl : torch::nn::Module {
  NamedImpl() {
    for (const char* name : {"*", "w*", "w", "w?", "w1"})
      parameters_by_name[name] = register_parameter(name, at::full({40}, 1.0));
  }
  at::Tensor forward() {
    at::Tensor sum = at::zeros({});
    for (const auto& [name, parameter] : parameters_by_name) sum = sum + parameter.square().sum();
    return sum;
  }
  std::map<std::string, at::Tensor> parameters_by_name;
};
TORCH_MODULE(Named);

TEST(ClientOptimizer, GroupsAreTheirParametersAndNotPatterns) {
  const auto make = [](NamedImpl& model) {
    std::vector<optim::OptimizerParamGroup> groups;
    for (const auto& item : model.named_parameters())
      groups.emplace_back(std::vector<at::Tensor>{item.value()},
                          std::make_unique<optim::SGDOptions>(0.01 * static_cast<double>(groups.size())));
    return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.5));
  };
  Named plain;
  const auto optimizer = make(*plain);
  for (int step = 0; step < 2; ++step) {
    optimizer->zero_grad();
    plain->forward().backward();
    optimizer->step();
  }
  for (const int stage : {0, 3})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      EngineConfig config = bowl_config(stage);
      config.zero.unit_numel = 100;
      Named model;
      auto engine = initialize(model, *make(*model), config, comm);
      train_bowl(*engine, 2);
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::allclose(engine->full_parameter(item.key()), item.value().detach())) << item.key();
      const EngineConfig again = parse_engine_config(dump_resolved(engine->config()), {.world_size = 2});
      EXPECT_EQ(again.optimizer, engine->config().optimizer) << "what is written can be read";
    });
}

TEST(ClientOptimizer, ParametersInNoGroupKeepTheirValues) {
  const auto make = [](BowlImpl& model) {
    return std::make_unique<optim::AdamW>(std::vector<at::Tensor>{model.weight}, optim::AdamWOptions(0.02));
  };
  const Tensors plain = plain_bowl(make, 3);
  for (const int stage : {0, 3})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      Bowl model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, *make(*model), bowl_config(stage), comm);
      for (int step = 0; step < 3; ++step) {
        engine->backward(engine->forward());
        EXPECT_FALSE(model->bias.grad().defined());
        engine->step();
      }
      EXPECT_LT(largest_difference(full_parameters(*engine), plain), 2e-6) << "stage " << stage;
      EXPECT_TRUE(model->bias.requires_grad());
    });
}

TEST(ClientOptimizer, OfATorchScriptModule) {
  on_ranks(2, [](comm::CommunicatorPtr comm) {
    torch::jit::Module model("Line");
    model.register_parameter("slope", at::ones({3}).requires_grad_(), /*is_buffer=*/false);
    model.define("def forward(self, x): return (self.slope * x).sum()\n");
    const optim::SGD optimizer({model.attr("slope").toTensor()}, optim::SGDOptions(0.5));
    auto engine = initialize(model, optimizer, bowl_config(3), comm);
    engine->backward(engine->forward(at::ones({3})).toTensor());
    engine->step();
    EXPECT_TRUE(at::equal(engine->full_parameter("slope"), at::full({3}, 0.5)));
  });
}

TEST(ClientOptimizer, ParamGroupsAreGivenOnce) {
  on_ranks(1, [](comm::CommunicatorPtr comm) {
    Bowl model;
    const optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1));
    EXPECT_THAT(error_of<ConfigError>([&] {
                  initialize(model, optimizer, {}, comm,
                             {.param_groups = {{.match = {"bias"}, .params = {}}}});
                }),
                HasSubstr("InitOptions has param_groups beside an optimizer"));
  });
}

}  // namespace
}  // namespace tessera::testing
