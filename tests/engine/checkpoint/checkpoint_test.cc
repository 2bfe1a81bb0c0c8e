// Checkpoints through the engine: loading on another world or stage, and resuming.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/str.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"

namespace tessera::testing {
namespace {

using ::testing::IsEmpty;

// -------------------------------------------------------------------------------------------- resharding

/// Checkpoints of every world and stage.
struct SavedByAll {
  SavedByAll() : folder("resharding") {
    for (int world : {1, 2, 3, 4, 8})
      for (int stage = 0; stage <= 3; ++stage) {
        const std::string tag = str("world", world, "stage", stage);
        on_ranks(world, [&](comm::CommunicatorPtr comm) {
          Trained trained({.world = world, .stage = stage}, comm);
          for (int i = 0; i < 3; ++i) trained.step();
          trained.engine->save_checkpoint(folder.string(), tag, {{"who", tag}});
          Tensors state = whole_state(*trained.engine);
          if (comm->rank() == 0) states[tag] = std::move(state), buffers[tag] = buffers_of(*trained.engine);
        });
      }
  }
  TestFolder folder;
  std::map<std::string, Tensors> states, buffers;  // by tag
};

class Resharding : public ::testing::TestWithParam<int> {  // world that loads
 protected:
  static void SetUpTestSuite() { saved_ = std::make_unique<SavedByAll>(); }
  static void TearDownTestSuite() { saved_.reset(); }
  static std::unique_ptr<SavedByAll> saved_;
};
std::unique_ptr<SavedByAll> Resharding::saved_;

// The world of the parameter loads each at every stage, with units of another size.
TEST_P(Resharding, AnyWorldAndStageLoadsAnyOther) {
  const TestFolder& folder = saved_->folder;
  auto &states = saved_->states, &buffers = saved_->buffers;
  EXPECT_FALSE(bit_equal(states["world1stage0"], states["world2stage0"])) << "or the test shows nothing";
  on_ranks(GetParam(), [&](comm::CommunicatorPtr comm) {
    for (int stage = 0; stage <= 3; ++stage) {
      Trained trained({.stage = stage, .unit_numel = 400, .seed = 9}, comm);
      trained.step();  // something to be overwritten
      for (const auto& [tag, expected] : states) {
        const LoadedCheckpoint loaded = trained.engine->load_checkpoint(folder.string(), tag);
        EXPECT_EQ(loaded.client_state.at("who"), tag);
        EXPECT_THAT(loaded.not_loaded, IsEmpty());
        EXPECT_TRUE(bit_equal(whole_state(*trained.engine), expected)) << tag << " at stage " << stage;
        EXPECT_TRUE(bit_equal(buffers_of(*trained.engine), buffers.at(tag))) << tag << " at stage " << stage;
        EXPECT_EQ(trained.engine->global_steps(), 3);
        EXPECT_TRUE(std::isfinite(trained.step())) << "training goes on";
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Resharding, ::testing::Values(1, 2, 3, 4, 8),
                         [](const auto& info) { return str("World", info.param); });

// ---------------------------------------------------------------------------------------------- resuming

struct Outcome {
  std::vector<double> losses;
  Tensors state;
};

/// Six steps, seen from rank 0; saved after three, or resumed there. fp16 overflows on the way.
Outcome run(const Job& setup, const std::string& folder, bool resume) {
  Outcome outcome;
  on_ranks(setup.world, [&](comm::CommunicatorPtr comm) {
    if (comm->rank() == 0) at::manual_seed(resume ? 77 : 3);
    comm->barrier("seed");
    Trained trained(setup, comm);
    if (resume) trained.engine->load_checkpoint(folder);
    while (trained.engine->global_steps() < 6) {
      const double loss = trained.step();
      if (comm->rank() == 0 && trained.engine->global_steps() > 3) outcome.losses.push_back(loss);
      if (!resume && trained.engine->global_steps() == 3) trained.engine->save_checkpoint(folder);
    }
    Tensors state = whole_state(*trained.engine);
    if (comm->rank() == 0) outcome.state = std::move(state);
  });
  return outcome;
}

TEST(Resume, IsBitIdenticalAtEveryStageAndPrecision) {
  for (int world : {1, 2})
    for (int stage = 0; stage <= 3; ++stage)
      for (const std::string precision : {"fp32", "bf16", "fp16"}) {
        SCOPED_TRACE(str("world ", world, " stage ", stage, " ", precision));
        const TestFolder folder("resume");
        // Ranks as threads share a generator, so that dropout can be compared on one rank
        // only (on several: the trainer's test).
        const Job setup{
            .world = world, .stage = stage, .precision = precision, .dropout = world == 1 ? 0.3 : 0};
        const Outcome whole = run(setup, folder.string(), false), resumed = run(setup, folder.string(), true);
        EXPECT_EQ(whole.losses, resumed.losses);
        EXPECT_EQ(whole.losses.size(), 3u);
        EXPECT_TRUE(bit_equal(whole.state, resumed.state));
      }
}

TEST(Resume, WithEveryOptimizer) {
  for (const std::string optimizer :
       {"Adam", "SGD", "Adagrad", "AMSGrad", "centered RMSprop", "Lion", "LAMB", "Muon"}) {
    const TestFolder folder("optimizers");
    Job setup{.world = 2, .stage = 2};
    setup.optimizer = optimizer;
    const Outcome whole = run(setup, folder.string(), false), resumed = run(setup, folder.string(), true);
    EXPECT_EQ(whole.losses, resumed.losses) << optimizer;
    EXPECT_TRUE(bit_equal(whole.state, resumed.state)) << optimizer;
  }
}

TEST(Resume, TheLossScaleGoesOn) {
  const TestFolder folder("scale");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 3, .precision = "fp16"}, comm);
    for (int i = 0; i < 5; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string());
    Trained resumed({.world = 2, .stage = 1, .precision = "fp16"}, comm);
    resumed.engine->load_checkpoint(folder.string(), "global_step5");
    EXPECT_EQ(resumed.engine->loss_scale(), trained.engine->loss_scale());
    EXPECT_EQ(resumed.engine->skipped_steps(), trained.engine->skipped_steps());
    EXPECT_EQ(resumed.engine->micro_steps(), 5);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(resumed.step(), trained.step());
      EXPECT_EQ(resumed.engine->loss_scale(), trained.engine->loss_scale());
    }
  });
}

TEST(Resume, PrecisionMayChange) {
  const TestFolder folder("precision");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Trained trained({.world = 2, .stage = 2, .precision = "bf16"}, comm);
    for (int i = 0; i < 3; ++i) trained.step();
    trained.engine->save_checkpoint(folder.string());
    for (const std::string precision : {"fp32", "bf16", "fp16"}) {
      Trained other({.world = 2, .stage = 3, .precision = precision, .seed = 5}, comm);
      other.engine->load_checkpoint(folder.string());
      Tensors state = whole_state(*other.engine), expected = whole_state(*trained.engine);
      EXPECT_TRUE(bit_equal(state, expected)) << precision << ": masters and moments are fp32 everywhere";
      EXPECT_TRUE(std::isfinite(other.step()));
    }
  });
}

}  // namespace
}  // namespace tessera::testing
