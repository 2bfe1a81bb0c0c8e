// Whatever is recomputed, gradients and weights are those of a run that keeps everything, to the bit.
#include <gtest/gtest.h>

#include <map>

#include "activations/checkpointing.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "engine/autocast.h"
#include "tests/activations/models.h"
#include "tests/support/same_runs.h"

namespace tessera::testing {
namespace {

struct Outcome {
  TrainingRun run;
  activations::Counts counts;  // of rank 0, after the last step
  Tensors buffers;
};

template <class Holder>
Outcome train(Case c, const std::string& policy, const LossOf<typename Holder::Impl>& loss) {
  const TemporaryFolder folder{"activations"};
  c.config.activations.policy = policy == "first_block" ? "block" : policy;
  if (policy == "first_block") c.config.activations.number_checkpoints = 1;
  if (policy == "offload") c.config.activations.nvme_path = folder.path().string();
  Outcome outcome;
  outcome.run = engine_run<Holder>(c, loss, [&](Engine& engine, int) {
    if (engine.rank() != 0) return;
    EXPECT_EQ(engine.activations() == nullptr, policy == "none");
    if (engine.activations() != nullptr) outcome.counts = engine.activations()->counts();
    for (const auto& [name, tensor] : engine.sharded_model().buffers())
      outcome.buffers[name] = tensor.clone();
  });
  return outcome;
}

Case make_case(int world, int stage, const std::string& backend) {
  Case c;
  c.world = world;
  c.micro_batch = 4;
  c.steps = 4;
  c.backend = backend;
  c.config.zero.stage = stage;
  c.config.zero.unit_numel = 10'000;
  c.config.zero.param_persistence_threshold = 0;
  return c;
}

struct Setting {
  int world, stage;
  const char* backend;
};
std::ostream& operator<<(std::ostream& out, const Setting& s) {
  return out << s.world << "_" << s.stage << "_" << s.backend;
}

class SameBits : public ::testing::TestWithParam<std::tuple<const char*, Setting>> {
 protected:
  template <class Holder>
  void expect_same(const LossOf<typename Holder::Impl>& loss, int accumulation = 1) {
    const auto& [policy, setting] = GetParam();
    Case c = make_case(setting.world, setting.stage, setting.backend);
    c.accumulation = accumulation;
    // What keeps everything is trained once for each test and setting.
    static std::map<std::string, Outcome> plains;
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    const std::string key = str(name.substr(0, name.find('/')), " ", setting);
    if (!plains.contains(key)) plains[key] = train<Holder>(c, "none", loss);
    const Outcome& plain = plains.at(key);
    const Outcome outcome = train<Holder>(c, policy, loss);
    expect_same_bits(outcome.run, plain.run);
    EXPECT_TRUE(bit_equal(outcome.buffers, plain.buffers));
    if (std::string(policy) == "offload") {
      EXPECT_GT(outcome.counts.num_offloaded, 0);
      EXPECT_EQ(outcome.counts.work.num_calls, 0);
    } else {
      EXPECT_GT(outcome.counts.num_dropped, 0);
      EXPECT_GT(outcome.counts.work.num_calls, 0);
    }
  }
};

TEST_P(SameBits, MlpWithDropout) {
  if (std::get<1>(GetParam()).world > 1) GTEST_SKIP() << "ranks that are threads share the default generator";
  expect_same<DropoutMlp>(dropout_mlp_loss);
}
TEST_P(SameBits, AttentionTiedAndFrozen) { expect_same<AttentionNet>(attention_loss); }
TEST_P(SameBits, Accumulation) { expect_same<AttentionNet>(attention_loss, /*accumulation=*/2); }
TEST_P(SameBits, Recurrent) { expect_same<Recurrent>(recurrent_loss); }
TEST_P(SameBits, ModelThatBranches) { expect_same<Branches>(branches_loss); }
TEST_P(SameBits, WritesInPlace) { expect_same<InPlace>(in_place_loss); }
TEST_P(SameBits, Autocast) {
  const LossOf<AttentionNetImpl> loss = [](AttentionNetImpl& model, int step, int64_t first, int64_t num) {
    const AutocastScope scope({.enabled = true}, at::kCPU);
    return attention_loss(model, step, first, num);
  };
  expect_same<AttentionNet>(loss);
}

INSTANTIATE_TEST_SUITE_P(Policies, SameBits,
                         ::testing::Combine(::testing::Values("cheap", "block", "first_block", "offload"),
                                            ::testing::Values(Setting{1, 0, "gloo"}, Setting{2, 0, "shm"},
                                                              Setting{2, 3, "shm"}, Setting{2, 3, "gloo"})),
                         [](const auto& info) {
                           const Setting& s = std::get<1>(info.param);
                           return str(std::get<0>(info.param), "_", s.world, "ranks_stage", s.stage, "_",
                                      s.backend);
                         });

}  // namespace
}  // namespace tessera::testing
