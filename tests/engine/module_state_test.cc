// Buffers are what the module has when they are used: TorchScript assigns them anew, C++ code gives them
// other memory. And tensors that lie in a parameter's memory, which would keep its first values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/sharded/manifest.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Counts its calls in training, and keeps a running mean; both are assigned anew.
torch::jit::Module counting() {
  torch::jit::Module model("Counting");
  model.register_parameter("weight", randn({3, 7}, 1).set_requires_grad(true), false);
  model.register_buffer("count", at::zeros({}, at::kLong));
  model.register_buffer("mean", at::zeros({3}));
  model.register_buffer("seen", at::zeros({0}));
  model.register_attribute("training", c10::BoolType::get(), true);
  model.define(R"(
    def forward(self, x):
        y = torch.linear(x, self.weight)
        if self.training:
            self.count = self.count + 1
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            self.seen = torch.cat([self.seen, self.mean[:1]])
        return (y - self.mean).square().mean()
  )");
  return model;
}

Tensors buffers_in(const torch::jit::Module& model) {
  Tensors all;
  for (const auto& item : model.named_buffers()) all[item.name] = item.value.clone();
  return all;
}

void train(TypedEngine<torch::jit::Module>& engine, int first, int last) {
  for (int step = first; step < last; ++step) {
    engine.backward(engine.forward(randn({2, 7}, 10 * step + engine.rank())).toTensor());
    engine.step();
  }
}

TEST(ModuleState, BuffersThatTorchScriptAssignsAreSavedMadeEqualAndResumed) {
  for (const int stage : {0, 3}) {
    const TestFolder folder("assigned");
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      torch::jit::Module model = counting();
      auto engine = initialize(model, engine_config(small_units(2, stage)), comm);
      train(*engine, 0, 3);
      EXPECT_EQ(model.attr("count").toTensor().item<int64_t>(), 3);
      engine->save_checkpoint(folder.string());
      const Tensors saved = buffers_in(model);
      EXPECT_EQ(saved.at("seen").numel(), 3);

      torch::jit::Module resumed = counting();
      auto other = initialize(resumed, engine_config(small_units(2, stage)), comm);
      other->load_checkpoint(folder.string());
      EXPECT_TRUE(bit_equal(buffers_in(resumed), saved));
      train(*engine, 3, 5);
      train(*other, 3, 5);
      engine->eval();
      other->eval();
      EXPECT_TRUE(bit_equal(buffers_in(resumed), buffers_in(model)));
      const at::Tensor mean = model.attr("mean").toTensor(), all = at::empty({6});
      comm->all_gather(all, mean.clone(), "means")->wait();
      EXPECT_TRUE(at::equal(all.narrow(0, 0, 3), all.narrow(0, 3, 3))) << "ranks differ";
    });
  }
}

struct GrowingImpl : torch::nn::Module {
  GrowingImpl() {
    weight = register_parameter("weight", randn({3, 7}, 1));
    memory = register_buffer("memory", at::zeros({2}));
  }
  at::Tensor weight, memory;
};
TORCH_MODULE(Growing);

TEST(ModuleState, ABufferOfAnotherShapeAndTypeIsWhatItWasWhenTheModelBeganAlike) {
  const TestFolder folder("growing");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Growing model, resumed;
    auto engine = initialize(model, engine_config(small_units(2, 1)), comm);
    model->memory.set_data(at::full({4, 2}, 3 + comm->rank(), at::kDouble));
    engine->eval();
    EXPECT_EQ(model->memory.sum().item<double>(), 24) << "rank 0's";
    engine->save_checkpoint(folder.string());
    auto other = initialize(resumed, engine_config(small_units(2, 1)), comm);
    other->load_checkpoint(folder.string());
    EXPECT_TRUE(at::equal(resumed->memory, model->memory));

    Growing unlike;
    unlike->memory.set_data(at::zeros({5}));
    auto third = initialize(unlike, engine_config(small_units(2, 1)), comm);
    EXPECT_THAT(error_of<CheckpointError>([&] { third->load_checkpoint(folder.string()); }),
                HasSubstr("buffer memory: [4, 2] in the checkpoint, [5] in the model"));
  });
}

TEST(ModuleState, ANameMayHaveAnyCharacters) {
  const TestFolder folder("odd_names");
  const std::vector<std::string> names = {"two\nlines", "\n\t3\t", "a\ttab", "\"quoted\"", "größe"};
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto make = [&](int first) {
      torch::nn::Linear model(7, 3);
      fill_parameters(*model, 1);
      for (size_t i = 0; i < names.size(); ++i)
        model->register_buffer(names[i], at::full({2, static_cast<int64_t>(i)}, first + comm->rank()));
      return model;
    };
    torch::nn::Linear model = make(1), resumed = make(5);
    auto engine = initialize(model, engine_config(small_units(2, 1)), comm);
    engine->eval();
    engine->save_checkpoint(folder.string());
    auto other = initialize(resumed, engine_config(small_units(2, 1)), comm);
    other->load_checkpoint(folder.string());
    for (const auto& buffer : resumed->named_buffers())
      EXPECT_EQ((buffer.value() == 1).all().item<bool>(), true) << buffer.key();
  });
}

TEST(ModuleState, OtherNamesOnAnotherRankAreTold) {
  const std::string error = error_of<CommError>([] {
    on_ranks(2, [](comm::CommunicatorPtr comm) {
      torch::nn::Linear model(7, 3);
      fill_parameters(*model, 1);
      model->register_buffer(comm->rank() == 0 ? "two\nlines" : "two", at::zeros({2}));
      initialize(model, engine_config(small_units(2, 1)), comm);
    });
  });
  EXPECT_THAT(error, AllOf(HasSubstr("two"), HasSubstr("all ranks must register the same buffers")));
}

TEST(ModuleState, ACheckpointWithoutARecordOfItIsLoaded) {
  const TestFolder folder("before");
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    torch::jit::Module model = counting();
    auto engine = initialize(model, engine_config(small_units(1, 0)), comm);
    model.attr("mean").toTensor().fill_(5);
    engine->save_checkpoint(folder.string(), "tag");
    const std::filesystem::path path = folder / "tag/manifest.json";
    const std::string text = read_text(path);
    const size_t begin = text.find("\"module\":"), end = text.find("\"optimizer\":", begin);
    ASSERT_NE(end, std::string::npos);
    const std::string older = text.substr(0, begin) + text.substr(end);
    write_text(path, checkpoint::seal_manifest(older.substr(0, older.find("\"digest\""))));

    torch::jit::Module other = counting();
    auto again = initialize(other, engine_config(small_units(1, 0)), comm);
    again->load_checkpoint(folder.string());
    EXPECT_TRUE(bit_equal(buffers_in(other), buffers_in(model)));
  });
}

// ------------------------------------------------------------------------------------------ views of
// parameters

struct TiedByViewImpl : torch::nn::Module {
  explicit TiedByViewImpl(bool as_buffer) {
    encoder = register_module("encoder", torch::nn::Linear(3, 3));
    view = encoder->weight.t();
    if (as_buffer) register_buffer("decoder", encoder->weight.detach().t());
  }
  torch::nn::Linear encoder{nullptr};
  at::Tensor view;
};
TORCH_MODULE(TiedByView);

TEST(ModuleState, ATensorInAParametersMemoryIsRefusedByName) {
  for (const int stage : {0, 3})
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      const auto refusal = [&](const auto& model) {
        return error_of<ConfigError>([&] { initialize(model, engine_config(small_units(1, stage)), comm); });
      };
      EXPECT_THAT(refusal(TiedByView(false)),
                  AllOf(HasSubstr("the memory of parameter encoder.weight is also held"),
                        HasSubstr("Compute views in forward()")));
      EXPECT_THAT(refusal(TiedByView(true)),
                  HasSubstr("buffer decoder lies in the memory of parameter encoder.weight"));

      torch::jit::Module script = counting();
      script.register_attribute("rows", c10::ListType::ofTensors(),
                                c10::List<at::Tensor>({at::ones({1}), script.attr("weight").toTensor()[1]}));
      EXPECT_THAT(refusal(script), HasSubstr("attribute rows[1] lies in the memory of parameter weight"));

      const torch::jit::Module plain = counting();
      const at::Tensor outside = plain.attr("weight").toTensor().detach();
      EXPECT_EQ(refusal(plain), "") << "what is not the model's is a warning";
    });
}

}  // namespace
}  // namespace tessera::testing
