// An optimizer of torch::optim that has no formula here: its own numbers at every stage and number of ranks,
// its states in checkpoints, its rates, and what is refused.
#include "engine/torch_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/serialize.h>
#include <torch/optim/sgd.h>

#include "checkpoint/checkpoint_error.h"
#include "core/files/temporary_folder.h"
#include "engine/checkpointing.h"
#include "engine/client_optimizer.h"
#include "tests/engine/optimizer/bowls.h"
#include "tests/support/log_file.h"
#include "zero/optimizer/state_values.h"

namespace tessera::testing::torch_optimizer {
namespace {

using ::testing::HasSubstr;
namespace optim = torch::optim;

/// Steps by the sign of each row's mean of the momentum: it needs whole rows.
struct RowsOptions : optim::OptimizerCloneableOptions<RowsOptions> {
  RowsOptions(double lr = 0.01) : lr_(lr) {}  // NOLINT: as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0.9;
  using Pair = std::tuple<double, double>;
  TORCH_ARG(Pair, betas) = std::make_tuple(0.5, std::numeric_limits<double>::infinity());

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Pair, betas);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

struct RowsState : optim::OptimizerCloneableParamState<RowsState> {
  TORCH_ARG(at::Tensor, momentum);
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(std::vector<int64_t>, steps);
  TORCH_ARG(std::string, note);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, momentum);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::vector<int64_t>, steps);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, note);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(steps);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(note);
  }
};

struct Rows : optim::Optimizer {
  Rows(const std::vector<optim::OptimizerParamGroup>& groups, RowsOptions defaults)
      : Optimizer(groups, std::make_unique<RowsOptions>(defaults)) {}
  Rows(std::vector<at::Tensor> parameters, RowsOptions defaults)
      : Rows(std::vector<optim::OptimizerParamGroup>{optim::OptimizerParamGroup(std::move(parameters))},
             defaults) {}

  at::Tensor step(LossClosure = nullptr) override {
    const at::NoGradGuard no_grad;
    for (optim::OptimizerParamGroup& group : param_groups()) {
      const auto& options = static_cast<const RowsOptions&>(group.options());
      for (at::Tensor& p : group.params()) {
        EXPECT_TRUE(p.grad().defined()) << "a parameter of another rank";
        auto& held = state()[p.unsafeGetTensorImpl()];
        if (!held) {
          held = std::make_unique<RowsState>();
          static_cast<RowsState&>(*held).momentum(at::zeros_like(p)).note("ünïcode");
        }
        auto& mine = static_cast<RowsState&>(*held);
        mine.step(mine.step() + 1);
        mine.steps().push_back(mine.step());
        mine.momentum().mul_(options.momentum()).add_(p.grad());
        const double rate = options.lr() / std::sqrt(static_cast<double>(mine.steps().size()));
        p.sub_(mine.momentum().mean(-1, true).tanh(), rate);
      }
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    optim::serialize<RowsState, RowsOptions>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    optim::serialize<RowsState, RowsOptions>(archive, *this);
  }
};

using Made = std::shared_ptr<optim::Optimizer>;
struct Client {
  friend void PrintTo(const Client& client, std::ostream* out) { *out << client.name; }
  std::string name;
  std::function<Made(BowlImpl&)> make;
};

/// Two groups of other options.
template <class Optimizer, class Options>
std::function<Made(BowlImpl&)> in_groups(Options first, Options second) {
  return [=](BowlImpl& model) {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{}, std::make_unique<Options>(first));
    groups.emplace_back(std::vector<at::Tensor>{model.weight, model.bias}, std::make_unique<Options>(first));
    groups.emplace_back(std::vector<at::Tensor>{model.norm_weight, model.matrix},
                        std::make_unique<Options>(second));
    auto optimizer = std::make_shared<Optimizer>(groups, first);
    // torch 2.15 gives a group of a class that it does not know the defaults in place of the group's options.
    static_cast<Options&>(optimizer->param_groups()[2].options()) = second;
    return optimizer;
  };
}

const Client& rows() {
  static const Client client{"Rows", in_groups<Rows>(RowsOptions(0.02), RowsOptions(0.05).momentum(0.5))};
  return client;
}

std::vector<Client> clients() {
  using optim::AdagradOptions, optim::RMSpropOptions;
  return {rows(),
          {"Adagrad", in_groups<optim::Adagrad>(AdagradOptions(0.1).initial_accumulator_value(0.5),
                                                AdagradOptions(0.2).initial_accumulator_value(0.1))},
          {"RMSprop", in_groups<optim::RMSprop>(RMSpropOptions(0.01), RMSpropOptions(0.02).centered(true))}};
}

/// An engine of a Bowl, and the optimizer that it was given.
auto engine_of(const Client& client, const comm::CommunicatorPtr& comm, int stage,
               Division division = Division::kParameters, const EngineConfig* config = nullptr) {
  Bowl model;
  fill_parameters(*model, 1);
  const Made optimizer = client.make(*model);
  auto engine =
      initialize(model, optimizer, config != nullptr ? *config : bowl_config(stage), comm, {}, division);
  return std::pair(std::move(engine), optimizer);
}

class TorchOptimizer : public ::testing::TestWithParam<Client> {};

TEST_P(TorchOptimizer, TrainsAsItDoesByItself) {
  const Tensors plain = plain_bowl(GetParam().make, 10);
  const bool in_full = GetParam().name == "Rows";  // all that depends on stages is the same for every class
  for (const int world : in_full ? std::vector<int>{1, 2, 3} : std::vector<int>{2})
    for (const int stage : in_full ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 3})
      for (const Division division : {Division::kParameters, Division::kRank0})
        on_ranks(world, [&](comm::CommunicatorPtr comm) {
          const auto [engine, optimizer] = engine_of(GetParam(), comm, stage, division);
          train_bowl(*engine, 10);
          const Tensors weights = full_parameters(*engine);
          // The mean of two equal gradients is that gradient; of three it may be rounded.
          if (world < 3) {
            EXPECT_TRUE(bit_equal(weights, plain)) << "world " << world << " stage " << stage;
          } else {
            EXPECT_LT(largest_difference(weights, plain), 1e-5) << "stage " << stage;
          }
          const size_t num_states = optimizer->state().size();
          const bool on_rank_0 = division == Division::kRank0 && GetParam().name == "Rows";
          EXPECT_LE(num_states, 4U);
          EXPECT_EQ(num_states == 4, world == 1 || (on_rank_0 && comm->rank() == 0));
          for (const auto& group : optimizer->param_groups())
            EXPECT_NE(group.params().size(), 1U) << "all of them are in the groups between steps";
        });
}

TEST_P(TorchOptimizer, CheckpointsLoadOnOtherNumbersOfRanks) {
  const bool in_full = GetParam().name == "Rows";
  for (const int saved_by : in_full ? std::vector<int>{1, 2} : std::vector<int>{2}) {
    const TemporaryFolder folder("torch_optimizer");
    Tensors expected;
    on_ranks(saved_by, [&](comm::CommunicatorPtr comm) {
      const auto engine = engine_of(GetParam(), comm, 2).first;
      train_bowl(*engine, 3);
      engine->save_checkpoint(folder.path().string());
      train_bowl(*engine, 3);
      const Tensors mine = full_parameters(*engine);
      if (comm->rank() == 0) expected = mine;
    });
    for (const int world : in_full ? std::vector<int>{1, 2, 3} : std::vector<int>{1})
      on_ranks(world, [&](comm::CommunicatorPtr comm) {
        const auto [engine, optimizer] = engine_of(GetParam(), comm, 3);
        train_bowl(*engine, 1);  // what it has by then is replaced
        for (auto& group : optimizer->param_groups()) group.options().set_lr(100);  // and so are its options
        engine->load_checkpoint(folder.path().string());
        train_bowl(*engine, 3);
        const Tensors weights = full_parameters(*engine);
        if (world < 3) {
          EXPECT_TRUE(bit_equal(weights, expected)) << "from " << saved_by << " ranks to " << world;
        } else {
          EXPECT_LT(largest_difference(weights, expected), 1e-5) << "from " << saved_by << " ranks to 3";
        }
      });
  }
}

INSTANTIATE_TEST_SUITE_P(All, TorchOptimizer, ::testing::ValuesIn(clients()),
                         [](const auto& info) { return info.param.name; });

TEST(TorchOptimizer, ASchedulerOfTorchWorksOnIt) {
  std::unique_ptr<optim::StepLR> scheduler;
  const Tensors plain = plain_bowl(rows().make, 6, [&](optim::Optimizer& optimizer, int step) {
    if (step == 0) scheduler = std::make_unique<optim::StepLR>(optimizer, 2, 0.5);
    if (step > 0) scheduler->step();
  });
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto [engine, optimizer] = engine_of(rows(), comm, 3);
    train_bowl(*engine, 1);
    optim::StepLR own(*optimizer, 2, 0.5);
    for (int step = 1; step < 6; ++step) {
      train_bowl(*engine, 1);
      own.step();
    }
    EXPECT_TRUE(bit_equal(full_parameters(*engine), plain));
  });
}

TEST(TorchOptimizer, TheEnginesRatesAreWrittenIntoIt) {
  const Tensors plain = plain_bowl(rows().make, 4, [](optim::Optimizer& optimizer, int step) {
    for (auto& group : optimizer.param_groups())
      if (step == 1) group.options().set_lr(group.options().get_lr() / 2);
  });
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto engine = engine_of(rows(), comm, 2).first;
    EXPECT_EQ(engine->learning_rates(), (std::vector<double>{0.02, 0.05}));
    train_bowl(*engine, 2);
    engine->set_learning_rates({0.01, comm->rank() == 1 ? 0.25 : 0.025});
    engine->backward(engine->forward());
    EXPECT_THAT(error_of([&] { engine->step(); }),
                HasSubstr("param group 1 has lr 0.025 on rank 0, but 0.25 on rank 1"));
    engine->set_learning_rates({0.01, 0.025});
    train_bowl(*engine, 2);
    EXPECT_TRUE(bit_equal(full_parameters(*engine), plain));
  });
  EngineConfig config = bowl_config(2);
  config.scheduler = StepLrOptions{.step_size = 2, .gamma = 0.5};
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto engine = engine_of(rows(), comm, 2, Division::kParameters, &config).first;
    train_bowl(*engine, 4);
    EXPECT_TRUE(bit_equal(full_parameters(*engine), plain));
  });
}

struct NothingSaved final : Rows {
  using Rows::Rows;
  void save(torch::serialize::OutputArchive&) const override {}
};
struct NothingLoaded final : Rows {
  using Rows::Rows;
  void load(torch::serialize::InputArchive&) override {}
};

TEST(TorchOptimizer, StatesThatCannotBeSavedOrLoadedAreErrors) {
  const TemporaryFolder folder("torch_optimizer");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    const auto make = [](auto rows) { return rows; };
    const auto engine =
        initialize(model, make(std::make_shared<NothingSaved>(model->parameters(), RowsOptions(0.01))),
                   bowl_config(2), comm, {}, Division::kParameters);
    train_bowl(*engine, 1);
    EXPECT_THAT(
        error_of<CheckpointError>([&] { engine->save_checkpoint(folder.path().string()); }),
        AllOf(HasSubstr("NothingSaved: save() writes nothing"), HasSubstr("override save() and load()")));
    Bowl second;
    const auto loads =
        initialize(second, make(std::make_shared<NothingLoaded>(second->parameters(), RowsOptions(0.01))),
                   bowl_config(2), comm, {}, Division::kParameters);
    train_bowl(*loads, 1);
    EXPECT_THAT(error_of<CheckpointError>([&] { loads->save_checkpoint(folder.path().string()); }),
                HasSubstr("load() has restored 0 of"))
        << "before it is needed";
  });
}

TEST(TorchOptimizer, DamagedStatesAreRefused) {
  Bowl model;
  fill_parameters(*model, 1);
  const std::vector<zero::NamedTensor> parameters = zero::parameters_of(*model);
  std::vector<zero::ParameterSpec> specs(parameters.size());
  const auto owning = [&] {
    auto whole = run_as_it_is(rows().make(*model), parameters, false, {-1, 0, 1});
    std::vector<zero::OwnedTensor> owned;
    for (size_t i = 0; i < parameters.size(); ++i) owned.push_back({&specs[i], parameters[i].tensor});
    whole->own(owned);
    return whole;
  };
  const auto whole = owning();
  model->forward().backward();
  whole->step({{.lr = 0.02}, {.lr = 0.05}});
  const at::Tensor saved = whole->state();
  EXPECT_EQ(error_of([&] { owning()->set_state({saved}, nullptr); }), "");
  for (const int64_t size : {int64_t{0}, int64_t{5}, int64_t{20}, saved.numel() - 1})
    EXPECT_NE(error_of([&] { owning()->set_state({saved.narrow(0, 0, size)}, nullptr); }), "") << size;
  // A key would stand in a text that libtorch compiles.
  int64_t length = 0;
  std::memcpy(&length, saved.data_ptr(), sizeof(length));
  const std::string text(static_cast<const char*>(saved.const_data_ptr()) + 8, static_cast<size_t>(length));
  const auto with_text = [&](const std::string& other) {
    const auto size = static_cast<int64_t>(other.size());
    at::Tensor data = at::empty({8 + size}, at::kByte);
    std::memcpy(data.data_ptr(), &size, sizeof(size));
    std::memcpy(static_cast<char*>(data.data_ptr()) + 8, other.data(), other.size());
    return at::cat({data, saved.narrow(0, 8 + length, saved.numel() - 8 - length)});
  };
  const auto said = [&](const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    std::string other = text;
    if (at != std::string::npos) other.replace(at, from.size(), to);
    return error_of([&] { owning()->set_state({with_text(other)}, nullptr); });
  };
  EXPECT_EQ(said("torch::optim", "torch::optim"), "");
  // What is taken of no parameter of the model is no damage; a tied one may have another name there.
  const zero::NamesInCheckpoint names{{"weight", "other"}};
  const auto some = owning();
  for (int step = 0; step < 2; ++step) some->step({{.lr = 0.02}, {.lr = 0.05}});
  const at::Tensor before = some->state();
  std::string renamed = text;
  renamed.replace(renamed.find(R"("groups":[[],["weight")"), 22, R"("groups":[[],["other")");
  EXPECT_EQ(error_of([&] { some->set_state({with_text(renamed)}, &names); }), "");
  EXPECT_FALSE(at::equal(some->state(), before)) << "the states of weight are taken";
  EXPECT_FALSE(at::equal(some->state(), saved)) << "the others stay";
  for (const char* key :
       {R"("a\"] = int\n  def __setstate__(self, x: Any) -> None:\n    print(1)\n  __annotations__[\"b":)",
        R"("a.b":)", R"("":)", R"("ä":)", R"("a\\":)"})
    EXPECT_THAT(said(R"("momentum":)", key),
                HasSubstr("has a key that save() of an optimizer does not write"))
        << key;
  EXPECT_THAT(said(R"("momentum":)", R"("momentun":)"), HasSubstr("states of "));
  EXPECT_THAT(said(R"("pytorch_version":"1.5.0")", R"("pytorch_version":"1.5.1")"), HasSubstr("states of "));
  EXPECT_THAT(said(R"("groups":[[],["weight")", R"("groups":[[],["other")"),
              HasSubstr("a parameter of the model"));
  EXPECT_THAT(said(R"("groups":[[],)", R"("groups":[)"), HasSubstr("the optimizer's 3 groups"));
  EXPECT_THAT(said(R"("num_states":4)", R"("num_states":5)"), HasSubstr("has restored 4 of 5"));
  EXPECT_THAT(said(R"("$tessera":"tensor")", R"("$tessera":"tensot")"), HasSubstr("states of "));
}

TEST(TorchOptimizer, RatesAfterALoad) {
  const TemporaryFolder folder("torch_optimizer");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto engine = engine_of(rows(), comm, 2).first;
    engine->set_learning_rates({0.001, 0.002});
    train_bowl(*engine, 2);
    engine->save_checkpoint(folder.path().string());
    const auto [loaded, optimizer] = engine_of(rows(), comm, 2);
    loaded->load_checkpoint(folder.path().string());
    EXPECT_EQ(loaded->learning_rates(), (std::vector<double>{0.001, 0.002})) << "those that were saved";
    loaded->set_learning_rates({0.02, 0.05});  // as in the constructor
    train_bowl(*loaded, 1);
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.02);
    loaded->use_configured_rates();
    optimizer->param_groups()[1].options().set_lr(0.03);
    EXPECT_EQ(loaded->learning_rates(), (std::vector<double>{0.03, 0.05}));
    train_bowl(*loaded, 1);
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.03);
  });
}

/// A frozen parameter, one in no group, one without a gradient and a tied one.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    for (const char* name : {"used", "frozen", "free", "idle"})
      register_parameter(name, at::linspace(-1, 1, 60).reshape({6, 10}).clone(),
                         std::string(name) != "frozen");
    tied = register_parameter("tied", parameters()[0]);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto all = named_parameters();
    return (x.matmul(all["used"].t()).tanh().sum(1) + x.matmul(all["frozen"].t()).sum(1) +
            x.matmul(all["free"].t()).square().sum(1) + x.matmul(tied.t()).sum(1))
        .mean();
  }
  at::Tensor tied;
};
TORCH_MODULE(Odd);

/// Each rank has other data: the mean of the gradients counts. Made as torch's classes, which pass over what
/// has no gradient.
TEST(TorchOptimizer, FrozenFreeIdleAndTiedParameters) {
  const auto make = [](OddImpl& model) {
    const auto all = model.named_parameters();
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{all["used"], all["idle"]});
    groups.emplace_back(std::vector<at::Tensor>{all["frozen"]});
    return std::make_shared<optim::Adagrad>(groups,
                                            optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
  };
  Odd plain;
  const auto optimizer = make(*plain);
  for (int step = 0; step < 4; ++step) {
    optimizer->zero_grad();
    ((plain->forward(randn({3, 10}, 10 + step)) + plain->forward(randn({3, 10}, 20 + step))) / 2).backward();
    optimizer->step();
  }
  const TemporaryFolder folder("torch_optimizer");
  for (int stage = 0; stage <= 3; ++stage)
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      std::vector<Tensors> found;
      for (const bool resumed : {false, true}) {
        Odd model;
        EngineConfig config = bowl_config(stage);
        const auto engine = initialize(model, make(*model), config, comm);
        if (resumed) engine->load_checkpoint(folder.path().string(), str("stage", stage));
        for (int step = resumed ? 2 : 0; step < 4; ++step) {
          engine->backward(engine->forward(randn({3, 10}, 10 * (comm->rank() + 1) + step)));
          engine->step();
          if (step == 1) engine->save_checkpoint(folder.path().string(), str("stage", stage));
        }
        found.push_back(full_parameters(*engine));
      }
      EXPECT_TRUE(bit_equal(found[0], found[1])) << "stage " << stage;
      for (const auto& item : plain->named_parameters())
        if (found[0].contains(item.key())) {
          EXPECT_LT((found[0].at(item.key()) - item.value().detach()).abs().max().item<double>(), 1e-6)
              << item.key() << " stage " << stage;
        }
    });
}

struct NoRate : optim::OptimizerCloneableOptions<NoRate> {};
struct WithoutRate final : optim::Optimizer {
  explicit WithoutRate(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<NoRate>()) {}
  at::Tensor step(LossClosure = nullptr) override { return {}; }
};

TEST(TorchOptimizer, WhatCannotRunIsNamed) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    const auto said = [&](const Made& optimizer, EngineConfig config = bowl_config(1)) {
      return error_of<ConfigError>([&] { initialize(model, optimizer, config, comm); });
    };
    EXPECT_THAT(said(std::make_shared<optim::LBFGS>(model->parameters(), optim::LBFGSOptions(0.1))),
                HasSubstr("torch::optim::LBFGS calls a closure"));
    EXPECT_THAT(said(std::make_shared<WithoutRate>(model->parameters())),
                HasSubstr("do not override get_lr() and set_lr()"));
    EngineConfig cycle = bowl_config(1);
    cycle.scheduler = OneCycleOptions{.cycle_min_lr = {0.01}, .cycle_max_lr = {0.1}};
    EXPECT_THAT(said(rows().make(*model), cycle), HasSubstr("OneCycle with cycle_momentum"));
    const Rows on_the_stack(model->parameters(), RowsOptions(0.1));
    EXPECT_THAT(error_of<ConfigError>([&] { initialize(model, on_the_stack, bowl_config(1), comm); }),
                AllOf(HasSubstr("Rows has no formula here"), HasSubstr("expected a std::shared_ptr of it")));
  });
}

TEST(TorchOptimizer, WhoUpdatesAllIsSaid) {
  for (const Division division : {Division::kParameters, Division::kRank0})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      LogFile log;
      InitOptions options;
      options.log = log.logger();
      Bowl model;
      initialize(model, rows().make(*model), bowl_config(1), comm, options, division);
      EXPECT_EQ(log.text().find("Division::kParameters divides them") != std::string::npos,
                division == Division::kRank0 && comm->rank() == 0)
          << log.text();
    });
}

}  // namespace
}  // namespace tessera::testing::torch_optimizer
