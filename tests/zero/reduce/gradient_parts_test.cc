// Gradients that come in parts, as re-entrant recomputation gives them.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "comm/torch_dtype.h"
#include "tests/support/backend.h"
#include "tests/zero/kernels/vectors.h"

namespace tessera::zero::testing {
namespace {

/// A checkpointed Linear: its backward runs a backward of its own, so a layer in two segments gets its
/// gradient in two parts.
struct Segment : torch::autograd::Function<Segment> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return layer->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({layer->forward(x)}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

/// Its `extra` is used twice, in segments of their own.
at::Tensor checkpointed(ChainImpl& model, const at::Tensor& input) {
  const at::Tensor x = Segment::apply(input, model.extra.get());
  return Segment::apply(model.forward(x), model.extra.get()).square().sum();
}

TEST(Reducer, HooksThatFireTwiceInOneBackward) {
  const auto plainly = [](ChainImpl& model, const at::Tensor& input) {
    return model.extra->forward(model.forward(model.extra->forward(input))).square().sum();
  };
  const auto input = [](int rank) { return randn({3, kWidth}, 4'000 + rank).requires_grad_(); };
  // The last: two rows of two ranks.
  for (const auto& [world, row] : {std::pair{1, 0}, {2, 0}, {4, 2}}) {
    Chain plain(2);
    at::Tensor mean = at::zeros({});
    for (int rank = 0; rank < world; ++rank) mean = mean + plainly(*plain, input(rank)) / world;
    const std::vector<at::Tensor> expected = plain_gradients(*plain, mean);
    for (int stage = row > 0 ? 3 : 0; stage <= 3; ++stage) {
      for (int micro_steps : {1, 2}) {
        SCOPED_TRACE(str("world ", world, " row ", row, " stage ", stage, " micro-steps ", micro_steps));
        run_ranks(world, [&, row = row](comm::CommunicatorPtr comm) {
          Chain model(2);
          Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
            options.optimizer.groups[0].lr = 0;
            options.groups.shard = row;
          });
          for (int step = 0; step < 3; ++step) {
            for (int micro = 0; micro < micro_steps; ++micro)
              rig.backward(checkpointed(*model, input(comm->rank())) / micro_steps, micro == 0,
                           micro == micro_steps - 1);
            rig.update();
            EXPECT_LT(largest_difference(rig.gradients(), expected), 1e-4) << "step " << step;
            if (step == 0 && micro_steps == 1) {
              EXPECT_EQ(rig.num_late, 1u) << "the first step cannot know";
            }
            if (step > 0) {
              EXPECT_EQ(rig.num_late, 0u) << "the others do";
            }
          }
        });
      }
    }
  }
}

// What is stored in a slot of a narrower dtype, or scaled, is rounded. Stages 0 and 1 round the sum of the
// parts.
TEST(Reducer, GradientsInPartsRoundAlikeAtEveryStage) {
  TESSERA_ON_ONE_BACKEND();
  struct Rounding {
    const char* name;
    at::ScalarType communicate = at::kFloat;
    bool prescale = false;
    double predivide = 1;
    DType parameters = DType::kFloat32;
    bool each = false;  // micro-step of two is reduced
  };
  const Rounding bf16{"bf16", at::kBFloat16};
  const std::tuple<Rounding, int, const char*> cases[] = {
      {bf16, 3, "gloo"},
      {bf16, 3, "hybrid"},
      {bf16, 1, "auto"},
      {bf16, 3, "shm"},
      {{"bf16, each micro-step", at::kBFloat16, false, 1, DType::kFloat32, true}, 3, "shm"},
      {{"bf16, each micro-step", at::kBFloat16, false, 1, DType::kFloat32, true}, 1, "auto"},
      {{"fp16", at::kHalf}, 3, "shm"},
      {{"prescale", at::kFloat, true}, 3, "shm"},
      {{"predivide", at::kFloat, false, 3}, 3, "shm"},
      {{"bf16 model", at::kBFloat16, true, 1, DType::kBFloat16}, 3, "shm"}};
  for (const auto& [rounding, world, backend] : cases) {
    std::vector<at::Tensor> expected;
    const auto train = [&, rounding = rounding](const comm::CommunicatorPtr& comm, int stage) {
      Chain model(2);
      Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
        options.compute_dtype = rounding.parameters;
        options.reducer.communicate_dtype = rounding.communicate;
        options.reducer.prescale = rounding.prescale;
        options.reducer.predivide_factor = rounding.predivide;
        options.reducer.reduce_each_micro_step = rounding.each;
        options.optimizer.groups[0].lr = 1e-3;
      });
      // In the first step it is not known which hooks will fire twice.
      for (int step = 0; step < 3; ++step) {
        const int num_micro_steps = rounding.each ? 2 : 1;
        for (int micro = 0; micro < num_micro_steps; ++micro) {
          const at::Tensor x = randn({3, kWidth}, 4'000 + 100 * step + 10 * micro + comm->rank())
                                   .to(to_torch(rounding.parameters));
          rig.backward(checkpointed(*model, x.requires_grad_()), micro == 0, micro == num_micro_steps - 1);
        }
        rig.update();
      }
      std::vector<at::Tensor> found = rig.gradients();
      for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
      if (comm->rank() != 0) return;
      if (expected.empty()) expected = found;
      EXPECT_TRUE(same_bits(found, expected)) << rounding.name << " stage " << stage;
    };
    for (int stage = 0; stage <= 3; ++stage)
      comm::run_threads(world, {.backend = backend, .timeout = std::chrono::seconds(20)},
                        [&](comm::CommunicatorPtr comm) { train(comm, stage); });
  }
}

}  // namespace
}  // namespace tessera::zero::testing
