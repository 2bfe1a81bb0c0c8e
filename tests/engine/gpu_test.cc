// The engine on its ranks' device against plain libtorch there. Skipped where there is no GPU. Each case runs
// on every rank of a group:
//   engine_gpu_test                              one rank
//   tessera launch -n 2 -- engine_gpu_test       two
// TESSERA_TEST_DEVICE names the device (cuda; cpu tries the cases themselves), TESSERA_TEST_BACKEND the
// backend (auto).
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <cstdlib>
#include <optional>

#include "core/environment/environment.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "engine/profile/memory_meter.h"
#include "tests/support/losses.h"
#include "train/memory/out_of_memory.h"

namespace tessera::testing {
namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

/// Owns the communicator of all cases. Joined once a process, because all ranks run all cases in one order.
class Group : public ::testing::Environment {
 public:
  void SetUp() override {
    const comm::JoinOptions options{.backend = variable("TESSERA_TEST_BACKEND", "auto"),
                                    .device = variable("TESSERA_TEST_DEVICE", "cuda"),
                                    .timeout = std::chrono::seconds(60)};
    try {
      comm::choose_device(options, environment());
    } catch (const Error& error) {
      why_not_ = error.what();
      return;
    }
    comm_ = comm::join(options);
  }
  void TearDown() override { comm_.reset(); }

  const comm::CommunicatorPtr& comm() const { return comm_; }
  const std::string& why_not() const { return why_not_; }

 private:
  comm::CommunicatorPtr comm_;
  std::string why_not_;
};

/// Rank 0's, used by all ranks. Collective.
class CommonFolder {
 public:
  explicit CommonFolder(comm::Communicator& comm) {
    if (comm.rank() == 0) mine_.emplace("tessera_gpu");
    path_ = comm.exchange(mine_ ? mine_->path().string() : "", "folder").front();
  }
  const std::string& path() const { return path_; }

 private:
  std::optional<TemporaryFolder> mine_;
  std::string path_;
};

Group& group() {
  static Group* const owned = new Group;  // by GoogleTest
  return *owned;
}
[[maybe_unused]] ::testing::Environment* const registered = ::testing::AddGlobalTestEnvironment(&group());

enum class Precision { kFp32, kBf16, kFp16, kAutocast };
constexpr Precision kPrecisions[] = {Precision::kFp32, Precision::kBf16, Precision::kFp16,
                                     Precision::kAutocast};

std::string name_of(Precision precision) {
  switch (precision) {
    case Precision::kBf16: return "Bf16";
    case Precision::kFp16: return "Fp16";
    case Precision::kAutocast: return "Autocast";
    default: return "Fp32";
  }
}

Tensors on_host(const Tensors& all) {
  Tensors copies;
  for (const auto& [name, tensor] : all) copies[name] = tensor.cpu();
  return copies;
}

constexpr int kScalePower = 10;  // fp16's loss scale, so that no step is skipped

class OnDevice {
 protected:
  comm::Communicator& comm() const { return *group().comm(); }
  at::Device device() const { return comm().device(); }

  Case make_case(int stage, Precision precision) const {
    Case c = small_units(comm().size(), stage);
    c.steps = 5;
    c.config.bf16 = precision == Precision::kBf16;
    c.config.fp16.enabled = precision == Precision::kFp16;
    c.config.fp16.initial_scale_power = kScalePower;
    c.config.autocast.enabled = precision == Precision::kAutocast;
    return c;
  }

  std::unique_ptr<TypedEngine<MlpImpl>> make_engine(const Case& c) const {
    Mlp model;
    fill_parameters(*model, 1 + 1000 * comm().rank());  // all ranks must get rank 0's
    return initialize(model, engine_config(c), group().comm(), {.device = device()});
  }

  /// Samples [first, first + num) of a step. The engine moves and casts them.
  static BatchLoss loss_with(TypedEngine<MlpImpl>& engine) {
    return [&](int step, int64_t first, int64_t num) {
      return engine.forward(randn({64, 7}, 100 + step).narrow(0, first, num),
                            randn({64, 3}, 200 + step).narrow(0, first, num));
    };
  }

  TrainingRun run(const Case& c) const {
    const auto engine = make_engine(c);
    return rank_run(c, *engine, loss_with(*engine), {});
  }

  /// The plain loop over the global batch on this rank's device.
  TrainingRun plain(const Case& c, Precision precision) const {
    Mlp model;
    fill_parameters(*model, 1);
    model->to(device());
    const auto loss_of = [&](int step, int64_t first, int64_t num) {
      const AutocastScope scope({.enabled = precision == Precision::kAutocast}, device());
      return mlp_loss(*model, step, first, num);
    };
    if (precision == Precision::kFp32 || precision == Precision::kAutocast)
      return plain_run(c, *model, loss_of);
    const std::vector<at::Tensor> masters = fp32_masters(*model);
    const bool fp16 = precision == Precision::kFp16;
    model->to(fp16 ? at::kHalf : at::kBFloat16);
    return plain_master_run(c, *model, masters, loss_of, fp16 ? 1 << kScalePower : 1);
  }
};

class EngineOnDevice : public ::testing::Test, protected OnDevice {
 protected:
  void SetUp() override {
    if (!group().why_not().empty()) GTEST_SKIP() << group().why_not();
  }
};

class EveryStage : public ::testing::TestWithParam<std::tuple<int, Precision>>, protected OnDevice {
 protected:
  void SetUp() override {
    if (!group().why_not().empty()) GTEST_SKIP() << group().why_not();
  }
  int stage() const { return std::get<0>(GetParam()); }
  Precision precision() const { return std::get<1>(GetParam()); }
};

TEST_P(EveryStage, EqualsAPlainLoop) {
  // The batch is divided otherwise, so sums differ by rounding: fp32's, or that of 16-bit gradients.
  const double tolerance = precision() == Precision::kFp32 ? 1e-4 : 1e-2;
  Case c = make_case(stage(), precision());
  c.accumulation = 2;
  const TrainingRun expected = plain(c, precision()), found = run(c);
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t step = 0; step < expected.losses.size(); ++step)
    EXPECT_NEAR(found.losses[step], expected.losses[step], tolerance * (1 + expected.losses[step]))
        << "step " << step;
  EXPECT_LT(found.losses.back(), found.losses.front());
  EXPECT_LT(largest_difference(on_host(found.weights), on_host(expected.weights)), tolerance);
}

TEST_P(EveryStage, EqualsStageZeroToTheBit) {
  if (comm().backend() == "nccl" && comm().size() > 2)
    GTEST_SKIP() << "NCCL's order of a sum is its own beyond two ranks";
  Case c = make_case(stage(), precision()), zero = make_case(0, precision());
  c.optimizer = zero.optimizer = "AdamW";
  c.clipping = zero.clipping = 0.05;
  const TrainingRun expected = run(zero), found = run(c);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  EXPECT_TRUE(bit_equal(found.weights, expected.weights));
}

TEST_P(EveryStage, ResumedEqualsUninterruptedToTheBit) {
  const CommonFolder common(comm());
  const std::string& folder = common.path();
  Case c = make_case(stage(), precision());
  c.optimizer = "AdamW";
  const auto train = [&](TypedEngine<MlpImpl>& engine, int first_step) {
    std::vector<double> losses;
    for (int step = first_step; step < first_step + 3; ++step) {
      const at::Tensor loss = loss_with(engine)(step, first_sample(c, 0, comm().rank()), c.micro_batch);
      engine.backward(loss);
      engine.step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  const auto engine = make_engine(c);
  train(*engine, 0);
  engine->save_checkpoint(folder);
  const std::vector<double> uninterrupted = train(*engine, 3);
  const Tensors weights = full_parameters(*engine);
  const auto resumed = make_engine(c);
  resumed->load_checkpoint(folder);
  EXPECT_EQ(train(*resumed, 3), uninterrupted);
  EXPECT_TRUE(bit_equal(full_parameters(*resumed), weights));
  comm().barrier("resumed");  // before the folder goes
}

// CUDA's allocator rounds: blocks of up to 1 MiB to 512 bytes, of larger ones up to 1 MiB is not cut off.
TEST_P(EveryStage, HoldsTheFormulasBytesAndTheAllocatorsRounding) {
  constexpr int64_t kSmall = 1 << 20, kMinBlock = 512;
  Case c = make_case(stage(), precision());
  c.optimizer = "AdamW";
  c.config.zero.unit_numel = 4'000'000;
  MemoryMeter meter(device().type());
  const torch::nn::Linear model(2000, 1998);
  const auto engine = initialize(model, engine_config(c), group().comm(), {.device = device()});
  const at::Tensor loss = engine->forward(at::ones({2, 2000})).to(at::kFloat).square().mean();
  engine->backward(loss);
  engine->step();
  const zero::StateBytes state = engine->measured_bytes();
  EXPECT_EQ(engine->device(), device());
  EXPECT_GT(state.total(), 0);
  EXPECT_EQ(state, engine->formula_bytes());
  const MemoryBytes held = meter.now();
  const auto check = [&](MemoryUse use, int64_t bytes) {
    const int64_t most = device().is_cpu() ? 0 : kSmall + kMinBlock;  // a block of one unit
    EXPECT_GE(held[use], bytes) << name_of(use);
    EXPECT_LE(held[use], bytes + (use == MemoryUse::kOptimizer ? 2 : 1) * most) << name_of(use);
  };
  ASSERT_EQ(engine->sharded_model().layout().num_units(), 1);
  check(MemoryUse::kParameters, state.parameters);
  check(MemoryUse::kGradients, state.gradients);
  check(MemoryUse::kMaster, state.master);
  check(MemoryUse::kOptimizer, state.optimizer);
}

// Host kernels have the device's bits, and what is reduced is reduced on the device.
TEST_P(EveryStage, StateBelowTheDeviceGivesItsBits) {
  if (stage() == 0) GTEST_SKIP() << "stage 0 has all of its state on the device";
  const CommonFolder common(comm());
  const OffloadConfig none, host{.device = "cpu", .nvme_path = {}},
      pinned{.device = "cpu", .nvme_path = {}, .pin_memory = true},
      disk{.device = "nvme", .nvme_path = common.path()};
  std::vector<std::pair<OffloadConfig, OffloadConfig>> settings{{host, none}, {pinned, none}, {disk, none}};
  if (stage() == 3)
    settings.insert(settings.end(),
                    {{host, host}, {pinned, pinned}, {disk, disk}, {pinned, disk}, {disk, pinned}});
  for (const char* optimizer : {"AdamW", "SGD", "AMSGrad"}) {
    Case c = make_case(stage(), precision());
    c.optimizer = optimizer;
    c.accumulation = 2;
    c.clipping = 0.05;
    const TrainingRun expected = run(c);
    for (const auto& [states, parameters] : settings) {
      c.config.zero.offload_optimizer = states;
      c.config.zero.offload_param = parameters;
      const TrainingRun found = run(c);
      const std::string where = str(optimizer, ", states ", states.device, ", parameters ", parameters.device,
                                    states.pin_memory ? ", pinned" : "");
      EXPECT_EQ(found.losses, expected.losses) << where;
      EXPECT_EQ(found.norms, expected.norms) << where;
      EXPECT_TRUE(bit_equal(on_host(found.weights), on_host(expected.weights))) << where;
    }
  }
  comm().barrier("offloaded");  // before the folder goes
}

INSTANTIATE_TEST_SUITE_P(StagesAndPrecisions, EveryStage,
                         ::testing::Combine(::testing::Range(0, 4), ::testing::ValuesIn(kPrecisions)),
                         [](const auto& info) {
                           return str("Stage", std::get<0>(info.param), name_of(std::get<1>(info.param)));
                         });

// Copied by the device beside training, from page-locked memory.
TEST_P(EveryStage, AnAsynchronousCheckpointHoldsTheMomentItWasCalledIn) {
  const CommonFolder common(comm());
  const std::string& folder = common.path();
  Case c = make_case(stage(), precision());
  c.optimizer = "AdamW";
  c.config.checkpoint.async = true;
  const auto engine = make_engine(c);
  const auto step = [&](int i) {
    engine->backward(loss_with(*engine)(i, first_sample(c, 0, comm().rank()), c.micro_batch));
    engine->step();
  };
  std::vector<Tensors> moments;
  for (int i = 0; i < 3; ++i) {
    step(i);
    moments.push_back(on_host(full_parameters(*engine)));
    engine->save_checkpoint(folder);
  }
  step(3);  // while the last is copied
  engine->finish_checkpoint();
  if (!device().is_cpu()) {
    EXPECT_GE(engine->pinned_bytes(), engine->measured_bytes().snapshot);  // whole pages
    EXPECT_GT(engine->pinned_bytes(), 0);
  }
  for (int i = 0; i < 3; ++i) {
    engine->load_checkpoint(folder, str("global_step", i + 1));
    EXPECT_TRUE(bit_equal(on_host(full_parameters(*engine)), moments[static_cast<size_t>(i)]))
        << "step " << i;
  }
  comm().barrier("loaded");  // before the folder goes
}

struct NormedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return norm->forward(layer->forward(x)).square().mean(); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(6, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
};
TORCH_MODULE(Normed);

// libtorch itself refuses 16-bit weights beside statistics in fp32 (engine/batch_norm.h).
TEST_P(EveryStage, RunningStatisticsStayInFp32) {
  Normed model;
  fill_parameters(*model, 1);
  const auto engine =
      initialize(model, engine_config(make_case(stage(), precision())), group().comm(), {.device = device()});
  double first = 0;
  for (int step = 0; step < 5; ++step) {
    const at::Tensor loss = engine->forward(randn({64, 6}, 900));
    engine->backward(loss);
    engine->step();
    if (step == 0) first = loss.item<double>();
  }
  const at::Tensor& mean = engine->module().norm->running_mean;
  EXPECT_EQ(mean.scalar_type(), at::kFloat);
  EXPECT_GT(mean.abs().max().item<double>(), 0);
  EXPECT_LT(engine->forward(randn({64, 6}, 900)).item<double>(), first);
  engine->eval();
  EXPECT_TRUE(std::isfinite(engine->forward(randn({64, 6}, 900)).item<double>()));
}

// -------------------------------------------------------------------------------------- streams of the model

/// A stream of the device beside the current one; on the CPU there is one.
c10::Stream side_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device);
}

/// What is given to `then` comes after what `first` has been given.
void follow(const c10::Stream& then, const c10::Stream& first) {
  if (then == first) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

/// Layers beside each other, each a unit: on streams in turn, or one after another.
struct BranchesImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 512;
  explicit BranchesImpl(int num_layers) {
    for (int i = 0; i < num_layers; ++i)
      layers.push_back(register_module(str("layer", i), torch::nn::Linear(kWidth, kWidth)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const c10::Stream main = current(x);
    if (streams.empty()) streams.push_back(main);
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < layers.size(); ++i) {
      const c10::Stream stream = streams[i % streams.size()];
      follow(stream, main);
      at::Tensor part;
      {
        const c10::StreamGuard on_stream(stream);
        part = x;
        for (int repeat = 0; repeat < 4; ++repeat) part = at::tanh(layers[i]->forward(part));
        part = part.square().mean();
      }
      if (stream != main) {
        x.record_stream(stream);
        part.record_stream(main);
      }
      parts.push_back(part);
    }
    for (const c10::Stream& stream : streams) follow(main, stream);
    return at::stack(parts).sum();
  }
  static c10::Stream current(const at::Tensor& x) {
    return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device());
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<c10::Stream> streams;
};
TORCH_MODULE(Branches);

// Units are evicted on one stream and read on another; gradients of the units come on several.
TEST_F(EngineOnDevice, BranchesOnSeveralStreamsGiveTheBitsOfOne) {
  for (int stage = 1; stage <= 3; ++stage) {
    std::vector<Tensors> weights;
    for (const int num_streams : {1, 3}) {
      Case c = make_case(stage, Precision::kFp32);
      c.config.zero.unit_numel = BranchesImpl::kWidth * (BranchesImpl::kWidth + 16);
      c.config.zero.max_live_parameters = 3 * c.config.zero.unit_numel;
      Branches model(12);
      fill_parameters(*model, 1);
      const auto engine = initialize(model, engine_config(c), group().comm(), {.device = device()});
      for (int i = 0; num_streams > 1 && i < num_streams; ++i)
        engine->module().streams.push_back(side_stream(device()));
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = randn({256, BranchesImpl::kWidth}, 900 + 10 * step + comm().rank());
        engine->backward(engine->forward(x));
        engine->step();
      }
      weights.push_back(on_host(full_parameters(*engine)));
    }
    EXPECT_TRUE(bit_equal(weights[0], weights[1])) << "stage " << stage;
  }
}

TEST_P(EveryStage, AForwardOnAStreamOfTheUsersGivesTheSameBits) {
  const Case c = make_case(stage(), precision());
  const TrainingRun expected = run(c);
  const auto engine = make_engine(c);
  const c10::Stream side = side_stream(device());
  const c10::Stream main = c10::impl::VirtualGuardImpl(device().type()).getStream(device());
  const BatchLoss on_main = loss_with(*engine);
  const TrainingRun found = rank_run(c, *engine,
                                     [&](int step, int64_t first, int64_t num) {
                                       follow(side, main);
                                       at::Tensor loss;
                                       {
                                         const c10::StreamGuard on_side(side);
                                         loss = on_main(step, first, num);
                                       }
                                       follow(main, side);
                                       return loss;
                                     },
                                     {});
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_TRUE(bit_equal(found.weights, expected.weights));
}

TEST_F(EngineOnDevice, OutOfMemoryIsOneLineAndTrainingGoesOn) {
  constexpr int64_t kTooMuch = int64_t{1} << 50;
  const Case c = make_case(3, Precision::kBf16);
  const TrainingRun expected = run(c);
  const auto engine = make_engine(c);
  train::note_failures_of(device());
  std::string line;
  try {
    at::empty({kTooMuch}, at::TensorOptions(device()).dtype(at::kByte));
  } catch (const std::exception& error) {
    EXPECT_TRUE(train::is_out_of_memory(error)) << error.what();
    const std::optional<MemoryMeter> no_meter;
    line = error_of([&] {
      train::fail_for_memory(error, {.when = "in step 0"},
                             {engine->config(), comm(), no_meter, engine.get()});
    });
  }
  EXPECT_EQ(line.find("out of memory in step 0 on rank "), 0u) << line;
  EXPECT_EQ(line.find('\n'), line.npos) << line;
  EXPECT_NE(line.find("for buffers and data"), line.npos) << "the allocator has told of it: " << line;
  EXPECT_NE(line.find("neither a stage"), line.npos) << line;
  const TrainingRun found = rank_run(c, *engine, loss_with(*engine), {});
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_TRUE(bit_equal(found.weights, expected.weights));
}

}  // namespace
}  // namespace tessera::testing
