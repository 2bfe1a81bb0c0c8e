// initialize() with a function that makes the model: the same values and generators as ordinary making.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/str.h"
#include "examples/fashion_mnist/model.h"
#include "examples/language_model/model.h"
#include "examples/segmentation/model.h"
#include "examples/text_classification/model.h"
#include "tests/engine/unusual_models.h"
#include "tests/support/errors.h"
#include "tests/support/log_file.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

at::Tensor generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// What a model is after it was made: values by name, and the generator's state.
struct Made {
  Tensors parameters, buffers;
  std::vector<at::Tensor> others;
  at::Tensor generator;
};

template <class Model>
std::vector<at::Tensor> others_of(const Model& model) {
  std::vector<at::Tensor> others;
  if constexpr (requires { model.others; })
    for (const at::Tensor& tensor : model.others) others.push_back(tensor.detach().clone());
  return others;
}

template <class Make>
Made made_in_the_ordinary_way(const Make& make) {
  at::manual_seed(5);
  const auto model = make();
  Made made;
  for (const auto& item : model->named_parameters())
    made.parameters[item.key()] = item.value().detach().to(at::kFloat).clone();
  for (const auto& item : model->named_buffers()) made.buffers[item.key()] = item.value().clone();
  made.others = others_of(*model);
  made.generator = generator_state();
  return made;
}

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& name) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << name;
  EXPECT_TRUE(at::equal(found, expected)) << name;
}

struct Expected {
  bool whole = false;     // made in the ordinary way
  bool computed = false;  // something, by every rank
};

template <class Make>
void expect_same_everywhere(const Make& make, Expected expected) {
  const Made ordinary = made_in_the_ordinary_way(make);
  for (const auto& [world, stage] : {std::pair(1, 0), {1, 3}, {2, 1}, {3, 3}}) {
    // Threads that make the model in the ordinary way draw from one generator in turns.
    if (expected.whole && world > 1) continue;
    SCOPED_TRACE(str("stage ", stage, ", ", world, " ranks"));
    at::manual_seed(5);
    std::vector<zero::MakingCounts> counts(static_cast<size_t>(world));
    on_ranks(world, [&, world = world, stage = stage](comm::CommunicatorPtr comm) {
      const auto engine = initialize(make, engine_config(small_units(world, stage)), comm, {},
                                     &counts[static_cast<size_t>(comm->rank())]);
      for (const auto& [name, value] : ordinary.parameters)
        expect_same(engine->full_parameter(name), value, name);
      for (const zero::NamedTensor& buffer : engine->sharded_model().buffers())
        expect_same(buffer.tensor, ordinary.buffers.at(buffer.name), buffer.name);
      const std::vector<at::Tensor> others = others_of(engine->module());
      ASSERT_EQ(others.size(), ordinary.others.size());
      for (size_t i = 0; i < others.size(); ++i) expect_same(others[i], ordinary.others[i], str("other ", i));
      // Ranks are threads here, and have one generator.
      expect_same(generator_state(), ordinary.generator, "generator");
    });
    for (int rank = 0; rank < world; ++rank) {
      const zero::MakingCounts& made = counts[static_cast<size_t>(rank)];
      EXPECT_EQ(made.whole, expected.whole);
      if (rank > 0 && !expected.computed) {
        EXPECT_EQ(made.num_drawn, 0);
        EXPECT_EQ(made.num_run, 0);
      }
    }
  }
}

class MakingUnusual : public ::testing::TestWithParam<UnusualModel> {};
INSTANTIATE_TEST_SUITE_P(Models, MakingUnusual, ::testing::ValuesIn(unusual_models()),
                         [](const auto& info) { return info.param.name; });

TEST_P(MakingUnusual, GivesTheSameBits) {
  const UnusualModel& model = GetParam();
  expect_same_everywhere([&] { return std::make_shared<BuiltImpl>(model.build); },
                         {model.whole, model.computed});
}

TEST(Making, ExamplesGetTheSameBits) {
  expect_same_everywhere([] { return Gpt(GptOptions{.dim = 32, .layers = 2, .sequence = 16}); }, {});
  expect_same_everywhere([] { return FashionCnn(FashionCnnOptions{}); }, {});
  expect_same_everywhere([] { return UNet(UNetOptions{.base_channels = 4, .depth = 2}); }, {});
  expect_same_everywhere(
      [] {
        return BertForSequenceClassification(BertOptions{.vocab_size = 60,
                                                         .hidden_size = 16,
                                                         .num_hidden_layers = 2,
                                                         .num_attention_heads = 2,
                                                         .intermediate_size = 32});
      },
      {});
  expect_same_everywhere([] { return Zoo(); }, {});
  expect_same_everywhere([] { return Odds(); }, {});
}

/// Draws from a generator of this rank's own, since ranks are threads.
struct OwnGenerator {
  explicit OwnGenerator(uint64_t seed) : generator(at::detail::createCPUGenerator(seed)) {}
  std::shared_ptr<BuiltImpl> operator()() const {
    return std::make_shared<BuiltImpl>([this](BuiltImpl& m) {
      m.parameter("a", at::randn({300, 300}, generator));
      m.parameter("b", at::rand({40}, generator));
      at::normal(0, 1, {50}, generator);  // dropped, but drawn
    });
  }
  at::Generator generator;
};

TEST(Making, EachRanksGeneratorEndsWhereItWould) {
  for (const bool same_seed : {true, false}) {
    const auto seed_of = [&](int rank) { return same_seed ? 3 : 3 + static_cast<uint64_t>(rank); };
    on_ranks(3, [&](comm::CommunicatorPtr comm) {
      const OwnGenerator first(seed_of(0)), plain(seed_of(comm->rank())), deferred(seed_of(comm->rank()));
      const auto expected = first();
      plain();
      zero::MakingCounts counts;
      const auto engine = initialize(deferred, engine_config(small_units(3, 3)), comm, {}, &counts);
      expect_same(deferred.generator.get_state(), plain.generator.get_state(), "generator");
      for (const auto& item : expected->named_parameters())
        expect_same(engine->full_parameter(item.key()), item.value().detach(), item.key());
      // A rank that began with another state has to draw for the sake of its own.
      EXPECT_EQ(counts.num_drawn > 0, comm->rank() == 0 || !same_seed);
    });
  }
}

TEST(Making, NobodyComputesWhatIsLoadedNext) {
  at::manual_seed(5);
  const at::Tensor before = generator_state();
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    InitOptions options;
    options.loaded_next = [](const std::string& name) { return !name.starts_with("norm"); };
    zero::MakingCounts counts;
    const auto engine =
        initialize([] { return Mlp(); }, engine_config(small_units(2, 3)), comm, options, &counts);
    for (const zero::ParameterSpec& parameter : engine->sharded_model().layout().parameters()) {
      const double expected = parameter.name == "norm.weight" ? 1 : 0;
      EXPECT_TRUE(engine->full_parameter(parameter.name).eq(expected).all().item<bool>()) << parameter.name;
    }
    EXPECT_EQ(counts.num_drawn, 0);
    expect_same(generator_state(), before, "generator");
  });
}

// A name that loading may ask for decides, whichever of a tied parameter's names it is.
TEST(Making, ATiedParameterIsComputedWhereOneOfItsNamesMayBeMissing) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    InitOptions options;
    options.loaded_next = [](const std::string& name) { return name != "b"; };
    const auto engine = initialize(
        [] {
          return std::make_shared<BuiltImpl>([](BuiltImpl& m) {
            m.parameter("a", at::ones({300, 300}));
            m.parameter("b", m.named_parameters()["a"]);
            m.parameter("c", at::ones({300, 300}));
          });
        },
        engine_config(small_units(2, 2)), comm, options);
    EXPECT_EQ(engine->full_parameter("a").sum().item<float>(), 300 * 300);
    EXPECT_EQ(engine->full_parameter("c").sum().item<float>(), 0);
  });
}

TEST(Making, WhatTheFunctionThrowsIsThrown) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto make = [] {
      return std::make_shared<BuiltImpl>(
          [](BuiltImpl& m) { m.parameter("a", at::randn({3})).add_(at::ones({4})); });
    };
    EXPECT_THAT(error_of<std::exception>([&] { initialize(make, engine_config(small_units(1, 3)), comm); }),
                ::testing::HasSubstr("leaf Variable that requires grad"));
  });
}

TEST(Making, SaysWhenTheModelWasMadeWhole) {
  LogFile log;
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    initialize(
        [] {
          return std::make_shared<BuiltImpl>([](BuiltImpl& m) {
            at::Tensor weight = at::randn({8, 8});
            weight.data_ptr<float>()[0] = 1;
            m.parameter("weight", weight);
          });
        },
        engine_config(small_units(1, 3)), comm, {.log = log.logger()});
  });
  EXPECT_THAT(log.text(), ::testing::HasSubstr("the model could not be made unit by unit"));
  EXPECT_THAT(log.text(), ::testing::HasSubstr("a raw pointer"));
}

}  // namespace
}  // namespace tessera::testing
