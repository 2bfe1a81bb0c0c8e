// What the reducer leaves in the accumulators: sums over ranks and micro-steps, scaled and in the dtypes
// asked for.
#include "zero/reduce/gradient_reducer.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <torch/nn/modules/linear.h>

#include <thread>

#include "tests/support/failing_allocations.h"
#include "tests/zero/kernels/vectors.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

constexpr int kWorlds[] = {1, 3};

TEST(Reducer, TheMeanOverRanks) {
  for (int world : kWorlds) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (bool overlap : {true, false}) {
        run_ranks(world, [&](comm::CommunicatorPtr comm) {
          StageOptions options = at_stage(stage);
          options.overlap = overlap;
          Vectors vectors(4, comm, options);
          const auto factors_of = [](int rank) { return Factors{1.0 + rank, 2, 3.0 * rank + 1, 4}; };
          for (int step = 0; step < 2; ++step) {  // the second in the agreed order
            vectors.backward(factors_of(comm->rank()));
            EXPECT_TRUE(vectors.hold(mean_over_ranks(world, factors_of))) << "stage " << stage;
          }
        });
      }
    }
  }
}

TEST(Reducer, MicroStepsAdd) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (bool each : {true, false}) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.reduce_each_micro_step = each;
        Vectors vectors(3, comm, options);
        for (int window = 0; window < 2; ++window) {
          vectors.backward({1, 0, 4}, {}, /*first=*/true, /*boundary=*/false);
          vectors.backward({0, 0, 8}, {}, false, false);
          vectors.backward({2, 0, 16}, {}, false, true);
          EXPECT_TRUE(vectors.hold({3, 0, 28})) << "stage " << stage << " each " << each;
          EXPECT_EQ(vectors.reducer->used(), (std::vector<bool>{true, false, true}));
        }
      });
    }
  }
}

// Wherever memory runs out while it is made.
TEST(Reducer, WithoutMemoryItLeavesNoHooks) {
  for (const int stage : {0, 2}) {
    std::string error = "?";
    for (int64_t first = 0; !error.empty(); ++first) {
      const torch::nn::Linear model(8, 8);
      const comm::CommunicatorPtr comm = alone();
      {
        const tessera::testing::FailingAllocations failing(first);
        error = error_of([&] { Rig rig(*model, comm, stage); });
      }
      for (const at::Tensor& parameter : model->parameters())
        EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(parameter), nullptr)
            << "stage " << stage << ", memory ran out at allocation " << first;
    }
  }
}

// They stay in p.grad until the unit has all of them: also where one of them never comes, until the end.
TEST(Reducer, AUnitsGradientsAreTakenTogether) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const bool boundary : {true, false})
      for (const bool with_bias : {true, false}) {
        SCOPED_TRACE(str("stage ", stage, " boundary ", boundary, " with bias ", with_bias));
        Chain model(3);
        const std::vector<at::Tensor> parameters = model->parameters();
        Rig* made = nullptr;
        std::vector<int> came;
        int num_checked = 0;
        const AtHooks hooks(parameters, [&](size_t i) {
          const Layout& layout = made->sharded->layout();
          const int unit = layout.slice(static_cast<int>(i)).unit;
          came.push_back(static_cast<int>(i));
          for (const int j : came) {
            const bool complete = layout.slice(j).unit != unit && (with_bias || layout.slice(j).unit != 2);
            EXPECT_EQ(parameters[static_cast<size_t>(j)].grad().defined(), !complete)
                << j << " at the hook of " << i;
            ++num_checked;
          }
        });
        Rig rig(*model, alone(), stage);
        made = &rig;
        ASSERT_EQ(rig.sharded->layout().units()[2].parameters.size(), 2u);
        for (int step = 0; step < 2; ++step) {
          at::Tensor x = batch(0, step);
          for (size_t i = 0; i < model->layers.size(); ++i) {
            torch::nn::Linear& layer = model->layers[i];
            x = at::tanh(at::linear(x, layer->weight, with_bias || i != 2 ? layer->bias : at::Tensor()));
          }
          came.clear();
          rig.backward(x.square().sum(), /*first=*/true, boundary);
        }
        EXPECT_GT(num_checked, 20);
      }
}

TEST(Reducer, PredivideAndPrescaleGiveTheMean) {
  for (const auto& [predivide, prescale] :
       {std::pair{1.0, false}, std::pair{2.0, false}, std::pair{1.0, true}, std::pair{4.0, true}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(3, [&, predivide = predivide, prescale = prescale](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.predivide_factor = predivide;
        options.prescale = prescale;
        Vectors vectors(2, comm, options);
        for (int step = 0; step < 2; ++step) {
          vectors.backward({3.0 * (comm->rank() + 1), 9}, {}, true, false);
          vectors.backward({3, 0}, {}, false, true);
          const Factors expected =
              mean_over_ranks(3, [](int rank) { return Factors{3.0 * (rank + 1) + 3, 9}; });
          EXPECT_TRUE(vectors.hold(expected, 1e-6))
              << "stage " << stage << " predivide " << predivide << " prescale " << prescale;
        }
      });
    }
  }
}

/// Keeps what is given to reductions.
class Spy final : public tessera::testing::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  std::vector<double> sent;  // first element of each buffer
  at::ScalarType dtype = at::kByte;

 protected:
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    note(full);
    return ForwardingCommunicator::do_reduce_scatter(full, into, label);
  }
  comm::WorkPtr do_all_reduce(const at::Tensor& full, double scale, std::string_view label) override {
    note(full);
    return ForwardingCommunicator::do_all_reduce(full, scale, label);
  }

 private:
  void note(const at::Tensor& full) {
    sent.push_back(full[0].item<double>());
    dtype = full.scalar_type();
  }
};

// As DeepSpeed: with prescale_gradients each rank divides by the world before the sum; otherwise by
// gradient_predivide_factor before it, and by world / factor after it.
TEST(Reducer, ScalesBeforeTheSumAsDeepSpeedDoes) {
  run_ranks(3, [](comm::CommunicatorPtr comm) {
    for (int stage = 0; stage <= 3; ++stage) {
      const auto sent = [&](double predivide, bool prescale) {
        auto spy = std::make_shared<Spy>(comm);
        StageOptions options = at_stage(stage);
        options.predivide_factor = predivide;
        options.prescale = prescale;
        Vectors(1, spy, options).backward({6});
        return spy->sent.at(0);
      };
      EXPECT_EQ(sent(1, false), 6) << "stage " << stage;
      EXPECT_EQ(sent(2, false), 3) << "stage " << stage;
      EXPECT_NEAR(sent(1, true), 2, 1e-6) << "stage " << stage;
    }
  });
}

TEST(Reducer, TypesOfCommunicationAndAccumulation) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(3, [&](comm::CommunicatorPtr comm) {
      auto spy = std::make_shared<Spy>(comm);
      StageOptions options = at_stage(stage);
      options.communicate_dtype = at::kBFloat16;
      Vectors vectors(2, spy, options);
      vectors.backward({0.1 * (comm->rank() + 1), 1.7}, {}, true, false);
      vectors.backward({0.3, 1.7}, {}, false, true);
      EXPECT_EQ(spy->dtype, at::kBFloat16);
      EXPECT_EQ(vectors.units[0].gradient.accumulator.scalar_type(), at::kFloat);
      const Factors expected =
          mean_over_ranks(3, [](int rank) { return Factors{0.1 * (rank + 1) + 0.3, 3.4}; });
      EXPECT_TRUE(vectors.hold(expected, 1.0 / 64)) << "stage " << stage;

      options.communicate_dtype = options.accumulate_dtype = at::kBFloat16;
      Vectors low(2, comm, options);
      low.backward({1, 2});
      EXPECT_EQ(low.units[0].gradient.accumulator.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(low.hold({1, 2})) << "stage " << stage;
      for (const ParamUnit& unit : low.units)
        EXPECT_EQ(unit.gradient.accumulator.nbytes(), 2 * kNumel / (stage >= 2 ? 3 : 1));
    });
  }
}

/// (kNumel) of the vector's gradients in micro-step `step`: no dtype of 16 bits holds them.
at::Tensor odd_gradient(int vector, int step) {
  return randn({kNumel}, static_cast<uint64_t>(100 * step + vector));
}

// [Note: nothing to sum]
TEST(Reducer, OneRankNeedsNoSlotsAndRoundsAsTheyDo) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const bool each : {false, true})
      for (const at::ScalarType communicate : {at::kFloat, at::kBFloat16, at::kHalf})
        for (const at::ScalarType accumulate : {at::kFloat, at::kBFloat16}) {
          if (stage < 2 && !each) continue;  // these add up first
          SCOPED_TRACE(str("stage ", stage, " ", c10::toString(communicate), " ", c10::toString(accumulate)));
          StageOptions options = at_stage(stage);
          options.reduce_each_micro_step = each;
          options.communicate_dtype = communicate;
          options.accumulate_dtype = accumulate;
          Vectors vectors(3, alone(), options);
          EXPECT_EQ(vectors.reducer->slot_bytes(), 0);
          for (int window = 0; window < 2; ++window) {
            std::vector<at::Tensor> expected(3, at::zeros({kNumel}, accumulate));
            for (int step = 0; step < 3; ++step) {
              at::Tensor sum = at::zeros({}).requires_grad_();
              for (int i = 0; i < 3; ++i) {
                if (i == step || (i == 2 && window == 1)) continue;  // it has no gradient
                const at::Tensor gradient = odd_gradient(i, 10 * window + step);
                sum = sum + (vectors.parameters[i] * gradient).sum();
                // A slot of the type they travel in; the sum of one rank is added to what is there.
                const at::Tensor slot = gradient.to(communicate);
                expected[i] = expected[i].add(slot).to(accumulate);
              }
              vectors.reducer->begin_backward(step == 0, step == 2);
              sum.backward();
              vectors.reducer->finish_backward();
            }
            for (int i = 0; i < 3; ++i)
              EXPECT_TRUE(at::equal(vectors.reducer->shard(vectors.units[i]), expected[i])) << "vector " << i;
          }
        }
}

TEST(Reducer, OneRankThatScalesBeforeTheSumKeepsItsSlots) {
  StageOptions options = at_stage(2);
  options.predivide_factor = 3;
  Vectors vectors(2, alone(), options);
  EXPECT_GT(vectors.reducer->slot_bytes(), 0) << "what is scaled twice is rounded twice";
  vectors.backward({3, 5});
  EXPECT_TRUE(vectors.hold({3, 5}, 1e-6));
}

TEST(Reducer, DifferentUnusedParametersOnDifferentRanks) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (int num_slots : {1, 3}) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.num_slots = num_slots;
        Vectors vectors(4, comm, options);
        for (int step = 0; step < 4; ++step) {
          const auto factors_of = [&](int rank) {  // every rank uses the one at (step + 3) % 4
            Factors factors(4, 3);
            factors[(rank + step) % 4] = 0;
            return factors;
          };
          vectors.backward(factors_of(comm->rank()));
          EXPECT_TRUE(vectors.hold(mean_over_ranks(3, factors_of))) << "stage " << stage << " step " << step;
          EXPECT_EQ(vectors.reducer->used()[(comm->rank() + step) % 4], false);
        }
      });
    }
  }
}

struct CountingHook : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int* count) : count_(count) {}
  void operator()(const torch::autograd::Variable& variable) override {
    ++*count_;
    variable.mutable_grad().mul_(2);  // the reducer must get the doubled gradient
  }
  int* count_;
};

TEST(Reducer, ChainsToAHookThatWasThereAndPutsItBack) {
  int count = 0;
  Chain model(1);
  const at::Tensor bias = model->layers[0]->bias;
  torch::autograd::impl::set_post_acc_grad_hooks(bias, std::make_unique<CountingHook>(&count));
  {
    Rig rig(*model, alone(), 2);
    rig.backward((bias * 3).sum());
    EXPECT_EQ(count, 1);
    EXPECT_TRUE(at::equal(rig.sharded->full_gradient("fc0.bias"), at::full({kWidth}, 6)));
  }
  (bias * 3).sum().backward();
  EXPECT_EQ(count, 2);
  EXPECT_TRUE(at::equal(bias.grad(), at::full({kWidth}, 6))) << "a plain parameter again";
}

TEST(Reducer, TwoOnTheSameParametersGoInAnyOrder) {
  for (bool first_goes_first : {true, false}) {
    Vectors one(1, alone(), at_stage(0)), other(1, alone(), at_stage(0));
    std::vector<ParamUnit>& others = other.units;
    other.reducer.reset();
    ReductionOrder order(first_order_of_reductions(others));
    auto two = std::make_unique<GradientReducer>(*one.layout, others, one.parameters, order,
                                                 /*residency=*/nullptr, alone(), at_stage(0));
    if (first_goes_first) {
      one.reducer.reset();
      two->begin_backward(true, true);
      (one.parameters[0] * 5).sum().backward();
      two->finish_backward();
      EXPECT_EQ(others[0].gradient.accumulator[0].item<double>(), 5);
    } else {
      two.reset();
      one.backward({5});
      EXPECT_TRUE(one.hold({5}));
    }
  }
}

struct SparseImpl : torch::nn::Module {
  SparseImpl() {
    table =
        register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, kWidth).sparse(true)));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
    fill_parameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return head->forward(table->forward(tokens)).square().sum();
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Sparse);

TEST(Reducer, SparseGradientsAreDensified) {
  const at::Tensor tokens = at::tensor({1, 3, 3, 6}, at::kLong);
  Sparse plain;
  const std::vector<at::Tensor> expected = plain_gradients(*plain, plain->forward(tokens));
  for (int stage = 0; stage <= 3; ++stage) {
    Sparse model;
    Rig rig(*model, alone(), stage);
    rig.backward(model->forward(tokens));
    EXPECT_LT(largest_difference(rig.gradients(), expected), 1e-6) << "stage " << stage;
  }
}

// At stage 0 ranks read the sums in each other's memory: a rank that is ahead must not overwrite them with
// the next gradients.
TEST(Reducer, NextGradientsWaitUntilAllRanksHaveReadTheLast) {
  for (const int slow : {0, 1}) {
    std::vector<at::Tensor> found[2];
    comm::run_threads(
        2, {.backend = "shm", .timeout = std::chrono::seconds(20)}, [&](comm::CommunicatorPtr comm) {
          Chain model(3);
          Rig rig(*model, comm, 0);
          ASSERT_TRUE(rig.sharded->gradients().reads_peers());
          for (int step = 0; step < 3; ++step) {
            rig.backward(model->forward(randn({3, kWidth}, 10 * step + comm->rank())).square().sum());
            rig.sharded->summarize_gradients();
            if (comm->rank() == slow) std::this_thread::sleep_for(std::chrono::milliseconds(100));
            rig.sharded->step(0.1);
          }
          found[comm->rank()] = rig.weights();
        });
    EXPECT_TRUE(same_bits(found[0], found[1]))
        << "rank " << slow << " behind: weights differ by " << largest_difference(found[0], found[1]);
  }
}

}  // namespace
}  // namespace tessera::zero::testing
