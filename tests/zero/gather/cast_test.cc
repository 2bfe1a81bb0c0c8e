// Casts that autograd saves under autocast: released with their unit, and restored when it is gathered.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

constexpr int kDepth = 6;

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

at::Tensor forward(ChainImpl& model, int step) {
  const Autocast autocast;
  return model.forward(randn({3, kWidth}, 3'000 + step)).to(at::kFloat).square().sum();
}

void track(ShardedModelOptions& options) { options.residency.track_casts = true; }

TEST(Casts, MemoryAfterForwardIsBounded) {
  Chain model(kDepth);
  Rig rig(*model, alone(), 3, track);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = forward(*model, step);
    const int64_t one_layer = (kWidth * kWidth + kWidth) * 2;
    EXPECT_LE(rig.residency().casts().live_bytes(), 2 * one_layer) << "two units may be unsharded";
    EXPECT_GT(rig.residency().casts().live_bytes(), 0);
    rig.step(loss);
    EXPECT_EQ(rig.residency().casts().live_bytes(), 0);
  }
}

TEST(Casts, GradientsAreThoseWithoutRelease) {
  for (int world : {1, 2}) {
    run_ranks(world, [](comm::CommunicatorPtr comm) {
      Chain tracked(kDepth), kept(kDepth), plain(kDepth);
      Rig with(*tracked, comm, 3, track), without(*kept, comm, 3), stage_0(*plain, comm, 0);
      for (int step = 0; step < 4; ++step) {
        with.backward(forward(*tracked, step));
        without.backward(forward(*kept, step));
        stage_0.backward(forward(*plain, step));
        EXPECT_TRUE(same_bits(with.gradients(), without.gradients())) << "step " << step;
        EXPECT_TRUE(same_bits(with.gradients(), stage_0.gradients())) << "step " << step;
        EXPECT_GT(stage_0.gradients()[0].abs().sum().item<double>(), 0);
        for (Rig* rig : {&with, &without, &stage_0}) rig->update(0.1);
      }
    });
  }
}

TEST(Casts, TheModelsOwnCastsAreItsOwn) {
  Chain model(kDepth), plain(kDepth);
  Rig rig(*model, alone(), 3, track);
  at::Tensor copy;
  {
    const Autocast autocast;
    const at::NoGradGuard no_grad;
    copy = model->layers[0]->weight.to(at::kBFloat16);
    copy.mul_(2);
  }
  rig.step(forward(*model, 0));
  const at::Tensor expected = plain->layers[0]->weight.detach().to(at::kBFloat16) * 2;
  EXPECT_TRUE(at::equal(copy, expected)) << "neither dropped nor cast anew";
}

TEST(Casts, OfValuesBeforeAnUpdateAreRefused) {
  Chain model(kDepth);
  Rig rig(*model, alone(), 3, track);
  const at::Tensor old = forward(*model, 0);
  rig.sharded->eval();
  rig.sharded->train();
  rig.step(forward(*model, 1));
  EXPECT_THAT(error_of([&] { rig.backward(old); }), ::testing::HasSubstr("before the last step()"));
}

TEST(Casts, OutliveTheEngine) {
  Chain model(kDepth);
  at::Tensor loss;
  {
    Rig rig(*model, alone(), 3, track);
    loss = forward(*model, 0);
  }
  loss.reset();  // its saved casts point to units that are gone
}

TEST(Casts, EvaluationAloneDoesNotPileThemUp) {
  Chain model(2);
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
  Rig rig(*model, alone(), 3, [](ShardedModelOptions& options) {
    options.residency.track_casts = true;
    options.residency.capacity_units = 9;  // nothing is ever released
  });
  rig.sharded->eval();
  for (int i = 0; i < 300; ++i) {
    rig.sharded->begin_forward();
    forward(*model, i);
    rig.sharded->end_forward();
  }
  EXPECT_LT(rig.residency().casts().num_tracked(), 150u);
}

}  // namespace
}  // namespace tessera::zero::testing
