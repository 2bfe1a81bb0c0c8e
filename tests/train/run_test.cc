// run(), and how a process is set up for it.
#include "train/run.h"

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <sstream>
#include <thread>

#include "tests/support/errors.h"
#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(JoinGroup, CollectivesHaveTheTimeLimitOfTheConfiguration) {
  TrainerConfig trainer;
  trainer.device = "cpu";
  trainer.timeout_s = 2.5;
  EXPECT_EQ(join_group(trainer, comm::Environment{}, Logger())->timeout(), std::chrono::milliseconds(2500));
}

TEST_F(TrainerTest, RunJoinsLoadsAndTrains) {
  Registry registry;
  register_blobs(registry);
  std::ostringstream out;
  const TrainerOutput output{{.out = &out, .now_s = {}}, Logger()};
  const json config = base_config();
  const Summary summary =
      run(parse_run_config(config.dump(), "blobs.json", 1), registry, comm::Environment{}, output);
  EXPECT_EQ(summary.evaluation->num_samples, 101);
  EXPECT_THAT(out.str(), HasSubstr("on 101 test samples"));
  EXPECT_EQ(json::parse(read_text(folder_ / "config.json")).at("model").at("hidden"), 16)
      << "defaults are filled in";

  std::vector<std::string> folders;  // given to the task
  registry.add("blobs", "mlp", [&](const config::Section&, const config::Section&, const fs::path& folder) {
    folders.push_back(folder.string());
    return std::make_unique<BlobsTask>(BlobsOptions{});
  });
  for (const bool resume : {false, true})
    run(parse_run_config(config.dump(), "blobs.json", 1), registry, comm::Environment{}, output,
        {.resume = resume, .init = {}, .stop = {}});
  EXPECT_THAT(folders, ElementsAre("", folder_.string())) << "a run that goes on keeps the files of its task";

  json unknown = config;
  unknown["data"]["type"] = "blob";
  EXPECT_THROW(run(parse_run_config(unknown.dump(), "blobs.json", 1), registry, comm::Environment{}, output),
               ConfigError);
}

// As torch.use_deterministic_algorithms(True): put_ without accumulation has no deterministic form.
TEST(MakeDeterministic, NondeterministicOperatorIsAnError) {
  at::Tensor values = at::zeros({4});
  const auto put = [&] { values.put_(at::tensor({1, 1}, at::kLong), at::tensor({1.0f, 2.0f})); };
  EXPECT_NO_THROW(put());
  make_deterministic();
  EXPECT_THROW(put(), c10::Error);
  at::globalContext().setDeterministicAlgorithms(false, false);
}

// As torch.backends.cuda.matmul.allow_tf32: a property of the process, which CUDA's products ask for.
TEST(SetUpProcess, Tf32IsAllowedWhenAskedFor) {
  at::Context& context = at::globalContext();
  const bool before = context.allowTF32CuBLAS();
  TrainerConfig trainer;
  trainer.device = "cpu";
  set_up_process(trainer, {});
  EXPECT_EQ(context.allowTF32CuBLAS(), before) << "libtorch's default is left alone";
  context.setAllowTF32CuDNN(false);
  trainer.tf32 = true;
  set_up_process(trainer, {});
  EXPECT_TRUE(context.allowTF32CuBLAS());
  EXPECT_TRUE(context.allowTF32CuDNN(at::Float32Op::CONV));
  context.setAllowTF32CuBLAS(before);
}

/// The kernels that attention on the CPU runs, by the names of their operators.
std::set<std::string> attention_operators() {
  static std::set<std::string>* names;
  std::set<std::string> found;
  names = &found;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (const std::string name = function.name();
            name.starts_with("aten::_scaled_dot_product") && name != "aten::_scaled_dot_product_attention")
          names->insert(name);
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  const at::Tensor query = at::ones({1, 2, 8, 16});
  at::scaled_dot_product_attention(query, query, query);
  at::removeCallback(handle);
  return found;
}

// As torch.nn.attention.sdpa_kernel(…, set_priority=True), for the process.
TEST(SetUpProcess, AttentionTakesTheBackendsThatAreAskedFor) {
  using Order = std::array<at::SDPBackend, at::num_sdp_backends>;
  at::Context& context = at::globalContext();
  const Order before = context.sDPPriorityOrder();
  TrainerConfig trainer;
  trainer.device = "cpu";
  set_up_process(trainer, {});
  EXPECT_EQ(context.sDPPriorityOrder(), before) << "libtorch's default is left alone";
  EXPECT_THAT(attention_operators(), Contains("aten::_scaled_dot_product_flash_attention_for_cpu"));

  trainer.attention_backends = {"cudnn", "math"};
  set_up_process(trainer, {});
  EXPECT_EQ(context.sDPPriorityOrder()[0], at::SDPBackend::cudnn_attention);
  EXPECT_EQ(context.sDPPriorityOrder()[1], at::SDPBackend::math);
  EXPECT_TRUE(context.userEnabledCuDNNSDP() && context.userEnabledMathSDP());
  EXPECT_FALSE(context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP());
  EXPECT_THAT(attention_operators(), ElementsAre("aten::_scaled_dot_product_attention_math"));

  trainer.attention_backends = {"efficient"};
  set_up_process(trainer, {});
  EXPECT_THROW(attention_operators(), c10::Error) << "the CPU has no such kernel";

  trainer.attention_backends = {"flash", "efficient", "math", "cudnn"};
  set_up_process(trainer, {});
  EXPECT_EQ(context.sDPPriorityOrder(),
            (Order{at::SDPBackend::flash_attention, at::SDPBackend::efficient_attention, at::SDPBackend::math,
                   at::SDPBackend::cudnn_attention, at::SDPBackend::overrideable}));
  EXPECT_THAT(attention_operators(), ElementsAre("aten::_scaled_dot_product_flash_attention_for_cpu"));
  std::vector<int64_t> order;
  for (const at::SDPBackend backend : before) order.push_back(static_cast<int64_t>(backend));
  context.setSDPPriorityOrder(order);
}

TEST(ChooseDevice, Cpu) {
  TrainerConfig trainer;
  trainer.device = "cpu";
  EXPECT_TRUE(choose_device(trainer, {}).is_cpu());
  trainer.device = "auto";
  comm::Environment crowded;
  crowded.local_world_size = 4096;  // more ranks than any host has devices
  EXPECT_TRUE(choose_device(trainer, crowded).is_cpu());
  trainer.device = "cuda";
  EXPECT_THAT(tessera::testing::error_of<ConfigError>([&] { choose_device(trainer, crowded); }),
              AllOf(HasSubstr("trainer.device"), Not(HasSubstr("\n"))));
}

TEST(ChooseNumThreads, SharesTheCores) {
  TrainerConfig trainer;
  trainer.num_threads = 3;
  EXPECT_EQ(choose_num_threads(trainer, {}), 3);
  trainer.num_threads = 0;
  comm::Environment crowded;
  crowded.local_world_size = 4096;
  EXPECT_EQ(choose_num_threads(trainer, crowded), 1);
  EXPECT_GE(choose_num_threads(trainer, {}), 1);
}

TEST(ChooseNumThreads, RefusesFarMoreThanThereAreCores) {
  TrainerConfig trainer;
  trainer.num_threads = std::max<int64_t>(16, 4 * static_cast<int64_t>(std::thread::hardware_concurrency()));
  EXPECT_EQ(choose_num_threads(trainer, {}), trainer.num_threads);
  ++trainer.num_threads;
  EXPECT_THAT(tessera::testing::error_of<ConfigError>([&] { choose_num_threads(trainer, {}); }),
              AllOf(HasSubstr("trainer.num_threads: found " + std::to_string(trainer.num_threads)),
                    HasSubstr("; expected at most ")));
}

}  // namespace
}  // namespace tessera::train
