// Memory of released units: shapes stay readable, values do not, and writes are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <unistd.h>

#include <csignal>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using ::testing::HasSubstr;

TEST(ReleasedMemory, ShapesStayReadable) {
  Chain model(2);
  Rig rig(*model, alone(), 3);
  EXPECT_EQ(rig.residency().num_unsharded(), 0);
  const at::Tensor& weight = model->layers[1]->weight;
  EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{kWidth, kWidth}));
  EXPECT_EQ(weight.strides(), (std::vector<int64_t>{kWidth, 1}));
  EXPECT_EQ(weight.storage_offset(), 0);
  EXPECT_EQ(model->layers[1]->bias.storage_offset(), kWidth * kWidth);
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_EQ(rig.residency().num_unsharded(), 0) << "looking at shapes gathers nothing";
}

/// What a read by way of data_ptr() throws.
std::string access_error(const at::Tensor& tensor) {
  try {
    tensor.data_ptr();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(ReleasedMemory, AskingForItsAddressNamesTheUnitAndWhatToDo) {
  Chain model(2);
  Rig rig(*model, alone(), 3);
  const at::Tensor& weight = model->layers[1]->weight;
  for (const at::Tensor& tensor : {weight, weight.variable_data(), model->layers[1]->bias}) {
    EXPECT_THAT(access_error(tensor), HasSubstr("unit 1 (fc1.weight, fc1.bias) is not in memory"));
    for (const char* way : {"engine.state_dict()", "save_model()", "GatheredParameters"})
      EXPECT_THAT(access_error(tensor), HasSubstr(way));
  }
  {
    const GatheredParameters gathered(*rig.sharded, {"fc1.weight"});
    EXPECT_EQ(access_error(weight), "");
    EXPECT_THAT(access_error(model->layers[0]->weight), HasSubstr("unit 0"));
  }
  EXPECT_THAT(access_error(weight), HasSubstr("unit 1")) << "released again";
}

/// Past the check, as code does that has taken the storage apart.
volatile const float* unchecked(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  return static_cast<const float*>(storage._mutable_data_ptr_no_checks().get()) + tensor.storage_offset();
}

volatile float sink;

TEST(ReleasedMemoryDeathTest, ReadingARawPointerNamesTheUnit) {
  TESSERA_ON_ONE_BACKEND();
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Chain model(2);
  Rig rig(*model, alone(), 3);
  const volatile float* values = unchecked(model->layers[1]->bias);
  EXPECT_DEATH(sink = values[1], "unit 1 \\(fc1.weight, fc1.bias\\) is not in memory.*GatheredParameters");
  EXPECT_DEATH(const_cast<volatile float*>(values)[0] = 1, "unit 1 .* is not in memory");
}

TEST(ReleasedMemoryDeathTest, ASignalThatIsSentEndsTheProcess) {
  TESSERA_ON_ONE_BACKEND();
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  for (const int signal : {SIGSEGV, SIGBUS}) std::signal(signal, SIG_DFL);  // sanitizers have their own
  Chain model(2);
  Rig rig(*model, alone(), 3);
  const auto send = [](int signal, bool to_thread) {
    to_thread ? raise(signal) : kill(getpid(), signal);
    usleep(1'000'000);  // another thread may get what is sent to the process
    _exit(0);
  };
  for (const int signal : {SIGSEGV, SIGBUS})
    for (const bool to_thread : {true, false})
      EXPECT_EXIT(send(signal, to_thread), ::testing::KilledBySignal(signal), "");
}

TEST(ReleasedMemoryDeathTest, AfterTheEngineToo) {
  TESSERA_ON_ONE_BACKEND();
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Chain model(2);
  {
    const Rig rig(*model, alone(), 3);
  }
  EXPECT_EQ(model->layers[0]->weight.numel(), kWidth * kWidth);
  EXPECT_THAT(access_error(model->layers[0]->weight), HasSubstr("unit 0"));
  EXPECT_DEATH(sink = unchecked(model->layers[0]->weight)[0], "unit 0 .* is not in memory");
}

TEST(ReleasedMemory, ModelAndEngineMayGoInEitherOrder) {
  for (int stage = 0; stage <= 3; ++stage) {
    auto model = std::make_unique<Chain>(3);
    const at::Tensor x = randn({2, kWidth}, 3);
    {
      Rig rig(**model, alone(), stage);
      rig.step((*model)->forward(x).sum());
      const at::Tensor alive = (*model)->layers[0]->weight;  // outlives model and engine
      model.reset();
      rig.sharded.reset();
      EXPECT_EQ(alive.numel(), kWidth * kWidth);
    }
    Chain second(3);
    {
      Rig(*second, alone(), stage).step(second->forward(x).sum());
    }
    if (stage < 3) {
      EXPECT_TRUE(second->forward(x).isfinite().all().item<bool>()) << "a plain model again";
    }
  }
}

/// The error of a write, in a new model at each stage that shards parameters.
void expect_refused(const std::string& operator_name, const std::function<void(ChainImpl&)>& write) {
  for (int stage : {1, 2, 3}) {
    Chain model(2), plain(2);
    Rig rig(*model, alone(), stage);
    const std::string error = message_of([&] {
      const at::NoGradGuard no_grad;
      write(*model);
    });
    EXPECT_THAT(error, HasSubstr(operator_name + " writes into unit 1 (fc1.weight, fc1.bias)"))
        << "stage " << stage;
    EXPECT_THAT(error, HasSubstr("GatheredParameters"));
    EXPECT_EQ(error_of([&] { rig.residency().rethrow(); }), error) << "and every later call says so";
    rig.sharded->drop_gradients();
    EXPECT_TRUE(at::equal(model->layers[1]->weight.detach().clone(), plain->layers[1]->weight))
        << "nothing was written";
    EXPECT_TRUE(at::equal(model->layers[1]->bias.detach().clone(), plain->layers[1]->bias));
  }
}

TEST(ReleasedMemory, WritesAreRefusedByName) {
  expect_refused("aten::zero_", [](ChainImpl& model) { model.layers[1]->weight.zero_(); });
  expect_refused("aten::add_", [](ChainImpl& model) { model.layers[1]->bias += 1; });
  expect_refused("aten::copy_",
                 [](ChainImpl& model) { model.layers[1]->weight.copy_(at::ones({kWidth, kWidth})); });
  expect_refused("aten::fill_", [](ChainImpl& model) { model.layers[1]->weight.detach()[3].fill_(2); });
}

TEST(ReleasedMemory, OutArgumentsAreWrites) {
  expect_refused("aten::mul", [](ChainImpl& model) {
    at::mul_out(model.layers[1]->bias, at::ones({kWidth}), at::ones({kWidth}));
  });
}

TEST(ReleasedMemory, InitFunctionsAreWrites) {
  expect_refused("aten::normal_",
                 [](ChainImpl& model) { torch::nn::init::normal_(model.layers[1]->weight); });
  expect_refused("aten::uniform_",
                 [](ChainImpl& model) { torch::nn::init::xavier_uniform_(model.layers[1]->weight); });
}

TEST(ReleasedMemory, ListsOfTensorsAreWrites) {
  expect_refused("aten::_foreach_mul_",
                 [](ChainImpl& model) { at::_foreach_mul_({model.layers[1]->weight}, 2.0); });
}

TEST(ReleasedMemory, ReadsAreNot) {
  Chain model(2);
  Rig rig(*model, alone(), 3);
  EXPECT_GT(model->layers[1]->weight.square().sum().item<double>(), 0);
  EXPECT_EQ(error_of([&] { rig.residency().rethrow(); }), "");
}

}  // namespace
}  // namespace tessera::zero::testing
