// Gradients on their way: through hooks into slots, over the ranks, into accumulators.
#include "zero/gradient_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <thread>

#include "comm/torch_dtype.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

constexpr int64_t kNumel = 48;

struct StageOptions : ReducerOptions {
  int stage = 0;
};

/// Vectors, each a unit of its own, and their reducer.
struct Vectors {
  Vectors(int num, const comm::CommunicatorPtr& comm, const StageOptions& options)
      : Vectors(std::vector<int64_t>(num, kNumel), comm, options) {}
  Vectors(const std::vector<int64_t>& numels, const comm::CommunicatorPtr& comm,
          const StageOptions& options) {
    at::set_num_threads(1);
    std::vector<ParameterSpec> specs;
    for (size_t i = 0; i < numels.size(); ++i) {
      specs.push_back({.name = str("m", i, ".p"),
                       .shape = {numels[i]},
                       .dtype = DType::kFloat32,
                       .trainable = true,
                       .group = 0,
                       .aliases = {}});
      parameters.push_back(at::ones({numels[i]}).requires_grad_());
    }
    layout = std::make_unique<Layout>(specs, LayoutOptions{comm->size(), kNumel});
    for (int unit = 0; unit < layout->num_units(); ++unit)
      units.emplace_back(*layout, unit, sharding_of(options.stage), at::kCPU, *comm);
    reducer = std::make_unique<GradientReducer>(*layout, units, parameters, comm, options);
  }
  /// Gradient of vector i is factors[i] everywhere; 0: the vector is not used.
  /// Finished in the order of `order`.
  void backward(const std::vector<double>& factors, std::vector<int> order = {}, bool first = true,
                bool boundary = true) {
    if (order.empty())
      for (int i = static_cast<int>(factors.size()) - 1; i >= 0; --i) order.push_back(i);
    reducer->begin_backward(first, boundary);
    at::Tensor sum = at::zeros({});
    // Autograd runs what came last first.
    for (auto i = order.rbegin(); i != order.rend(); ++i)
      if (factors[*i] != 0) sum = sum + (parameters[*i] * factors[*i]).sum();
    if (sum.requires_grad()) sum.backward();
    reducer->finish_backward();
  }
  /// The value this rank's shard of each unit has throughout.
  std::vector<double> results() const {
    std::vector<double> values;
    for (int unit = 0; unit < layout->num_units(); ++unit) {
      const at::Tensor shard = reducer->shard(units[unit]).to(at::kFloat);
      // Units are padded, so that a shard may be padding altogether.
      const int64_t numel = layout->owned(unit, 0).numel();
      EXPECT_TRUE(shard.narrow(0, 0, std::min(numel, layout->owned(unit, 0).numel()))
                      .eq(shard[0])
                      .all()
                      .item<bool>());
      values.push_back(shard[0].item<double>());
    }
    return values;
  }
  std::vector<at::Tensor> parameters;
  std::unique_ptr<Layout> layout;
  std::vector<ParamUnit> units;  // for their gradients: the parameters stay where they are
  std::unique_ptr<GradientReducer> reducer;
};

/// kNumel is 3 x 64 bytes: at worlds 1 and 3 there is no padding.
constexpr int kWorlds[] = {1, 3};

StageOptions at_stage(int stage) { return {{}, stage}; }

TEST(Reducer, TheMeanOverRanks) {
  for (int world : kWorlds) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (bool overlap : {true, false}) {
        run_ranks(world, [&](comm::CommunicatorPtr comm) {
          StageOptions options = at_stage(stage);
          options.overlap = overlap;
          Vectors vectors(4, comm, options);
          const double rank = comm->rank();
          for (int step = 0; step < 2; ++step) {  // the second in the agreed order
            vectors.backward({1 + rank, 2, 3 * rank + 1, 4});
            const double mean_rank = (world - 1) / 2.0;
            EXPECT_EQ(vectors.results(), (std::vector<double>{1 + mean_rank, 2, 3 * mean_rank + 1, 4}))
                << "stage " << stage;
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
          EXPECT_EQ(vectors.results(), (std::vector<double>{3, 0, 28}))
              << "stage " << stage << " each " << each;
          EXPECT_EQ(vectors.reducer->used(), (std::vector<bool>{true, false, true}));
        }
      });
    }
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
          const std::vector<double> found = vectors.results();
          EXPECT_NEAR(found[0], 9, 1e-5)
              << "stage " << stage << " predivide " << predivide << " prescale " << prescale;
          EXPECT_NEAR(found[1], 9, 1e-5);
        }
      });
    }
  }
}

/// Sees what goes over the network.
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

// DeepSpeed: with prescale_gradients each rank divides by the world before the sum; otherwise by
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
      EXPECT_NEAR(vectors.results()[0], 0.5, 0.5 / 64);
      EXPECT_NEAR(vectors.results()[1], 3.4, 3.4 / 64);

      options.communicate_dtype = options.accumulate_dtype = at::kBFloat16;
      Vectors low(2, comm, options);
      low.backward({1, 2});
      EXPECT_EQ(low.units[0].gradient.accumulator.scalar_type(), at::kBFloat16);
      EXPECT_EQ(low.results(), (std::vector<double>{1, 2}));
      for (const ParamUnit& unit : low.units)
        EXPECT_EQ(unit.gradient.accumulator.nbytes(), 2 * kNumel / (stage >= 2 ? 3 : 1));
    });
  }
}

TEST(Reducer, TheOrderIsRankZeros) {
  run_ranks(3, [](comm::CommunicatorPtr comm) {
    Vectors vectors(4, comm, at_stage(2));
    EXPECT_EQ(vectors.reducer->order(), (std::vector<int>{3, 2, 1, 0}))
        << "at first the reverse of registration";
    const std::vector<int> order =
        comm->rank() == 0 ? std::vector<int>{1, 3, 0, 2} : std::vector<int>{2, 0, 1, 3};
    for (int step = 0; step < 3; ++step) {
      vectors.backward({1, 2, 3, 4}, order);
      EXPECT_EQ(vectors.reducer->order(), (std::vector<int>{1, 3, 0, 2})) << "rank " << comm->rank();
      EXPECT_EQ(vectors.results(), (std::vector<double>{1, 2, 3, 4}));
    }
  });
}

TEST(Reducer, AnUnusedFirstUnitBlocksNothing) {
  for (int num_slots : {1, 2, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.num_slots = num_slots;
        Vectors vectors(6, comm, options);
        for (int step = 0; step < 3; ++step) {
          vectors.backward({1, 2, 3, 4, 5, 0});  // the last is the first in the order
          EXPECT_EQ(vectors.results(), (std::vector<double>{1, 2, 3, 4, 5, 0}))
              << "slots " << num_slots << " stage " << stage;
          EXPECT_LE(vectors.reducer->max_slots_in_use(), num_slots);
          EXPECT_LE(vectors.reducer->slot_bytes(), num_slots * kNumel * 4);
          EXPECT_EQ(vectors.reducer->slot_bytes() > 0, stage >= 2) << "stages 0 and 1 reduce in place";
          for (const at::Tensor& parameter : vectors.parameters) EXPECT_FALSE(parameter.grad().defined());
        }
      });
    }
  }
}

TEST(Reducer, UnitsOfManySizesShareOneBuffer) {
  const std::vector<int64_t> numels{96, 480, 64, 160, 64, 960, 96, 64, 256, 64};
  const std::vector<std::vector<int>> orders{
      {9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, {3, 7, 1, 9, 5, 0, 2, 4, 8, 6}, {5, 6, 0, 1, 2, 9, 8, 7, 3, 4}};
  for (const char* backend : {"gloo", "shm"}) {
    for (int num_slots : {1, 3, 6}) {
      comm::run_threads(
          2, {.backend = backend, .timeout = std::chrono::seconds(20)}, [&](comm::CommunicatorPtr comm) {
            StageOptions options = at_stage(2);
            options.num_slots = num_slots;
            Vectors vectors(numels, comm, options);
            for (int step = 0; step < 9; ++step) {
              std::vector<double> factors, expected;
              for (int i = 0; i < 10; ++i) {
                factors.push_back((i + 3 * step) % 10 == 0 ? 0 : 1 + i + 2 * step + 2 * comm->rank());
                expected.push_back(factors.back() == 0 ? 0 : 2 + i + 2 * step);
              }
              vectors.backward(factors, orders[(step + comm->rank()) % 3]);
              EXPECT_EQ(vectors.results(), expected) << backend << " step " << step << " slots " << num_slots;
            }
            int64_t largest = 0, sum = 0;
            for (const UnitSpec& unit : vectors.layout->units()) {
              largest = std::max(largest, unit.numel);
              sum += unit.numel;
            }
            EXPECT_EQ(vectors.reducer->slot_bytes(), 4 * std::max(largest, num_slots * sum / 10));
          });
    }
  }
}

TEST(Reducer, DifferentUnusedParametersOnDifferentRanks) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (int num_slots : {1, 3}) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.num_slots = num_slots;
        Vectors vectors(4, comm, options);
        for (int step = 0; step < 4; ++step) {
          std::vector<double> factors{3, 3, 3, 3};
          factors[(comm->rank() + step) % 4] = 0;
          vectors.backward(factors);
          std::vector<double> expected(4, 2);
          expected[(step + 3) % 4] = 3;  // the one that every rank has used
          EXPECT_EQ(vectors.results(), expected) << "stage " << stage << " step " << step;
          EXPECT_EQ(vectors.reducer->used()[(comm->rank() + step) % 4], false);
        }
      });
    }
  }
}

TEST(Reducer, GradientsAreFreedAsTheyAreReduced) {
  for (int stage : {0, 2}) {
    Vectors vectors(12, alone(), at_stage(stage));
    long most = 0;
    vectors.reducer->check = [&] {
      const long alive = std::count_if(vectors.parameters.begin(), vectors.parameters.end(),
                                       [](const at::Tensor& p) { return p.grad().defined(); });
      most = std::max(most, alive);
    };
    for (int step = 0; step < 2; ++step) vectors.backward(std::vector<double>(12, 1));
    EXPECT_EQ(most, 1) << "stage " << stage;
  }
}

/// A network slower than backward: a reduction is there only once somebody waits for it, or after a while.
class Slow final : public tessera::testing::ForwardingCommunicator {
 public:
  /// `wait_blocks`: false as on CUDA, where a reduction that has not come says
  /// only that the device is behind.
  Slow(comm::CommunicatorPtr inner, std::chrono::milliseconds delay, bool wait_blocks = true)
      : ForwardingCommunicator(std::move(inner)), delay_(delay), wait_blocks_(wait_blocks) {}
  bool wait_blocks() const override { return wait_blocks_; }
  at::Tensor allocate_shared(int64_t, std::string_view) override { return {}; }  // hosts of their own
  void set_delay(std::chrono::milliseconds delay) { delay_ = delay; }

 protected:
  struct SlowWork final : comm::Work {
    SlowWork(comm::WorkPtr inner, std::chrono::milliseconds delay)
        : inner(std::move(inner)), ready(std::chrono::steady_clock::now() + delay) {}
    bool test() override { return std::chrono::steady_clock::now() >= ready && inner->test(); }
    void wait() override { inner->wait(); }
    comm::WorkPtr inner;
    std::chrono::steady_clock::time_point ready;
  };
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    return std::make_shared<SlowWork>(ForwardingCommunicator::do_reduce_scatter(full, into, label), delay_);
  }

 private:
  std::chrono::milliseconds delay_;
  bool wait_blocks_;
};

/// The most gradients alive in p.grad at any hook of a few backward passes.
long most_waiting(Vectors& vectors) {
  long most = 0;
  vectors.reducer->check = [&] {
    const long alive = std::count_if(vectors.parameters.begin(), vectors.parameters.end(),
                                     [](const at::Tensor& p) { return p.grad().defined(); });
    most = std::max(most, alive);
  };
  for (int step = 0; step < 2; ++step) {
    vectors.backward(std::vector<double>(12, step + 1));
    EXPECT_EQ(vectors.results(), std::vector<double>(12, step + 1));
  }
  vectors.reducer->check = nullptr;
  return most;
}

TEST(Reducer, ASlowNetworkSlowsBackwardInsteadOfFillingMemory) {
  for (int stage : {2, 3}) {
    for (bool overlap : {true, false}) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.overlap = overlap;
        Vectors vectors(12, std::make_shared<Slow>(comm, std::chrono::milliseconds(5)), options);
        EXPECT_EQ(most_waiting(vectors), 1) << "stage " << stage;
        EXPECT_LE(vectors.reducer->max_slots_in_use(), overlap ? options.num_slots : 1);
        EXPECT_TRUE(vectors.reducer->waits_in_hooks());
      });
    }
  }
}

TEST(Reducer, HooksWaitNoLongerThanTheLimit) {
  run_ranks(3, [&](comm::CommunicatorPtr comm) {
    StageOptions options = at_stage(3);
    options.hook_wait_limit = std::chrono::milliseconds(500);
    const auto network = std::make_shared<Slow>(comm, std::chrono::hours(1));
    Vectors vectors(12, network, options);
    EXPECT_EQ(most_waiting(vectors), 12 - options.num_slots) << "they stay where autograd put them";
    network->set_delay(std::chrono::milliseconds(0));
    for (int pass = 2; pass <= 9; ++pass) {  // as many on every rank, however long they wait
      if (pass <= 8) {
        EXPECT_FALSE(vectors.reducer->waits_in_hooks()) << pass;
      }
      vectors.backward(std::vector<double>(12, 1));
    }
    EXPECT_TRUE(vectors.reducer->waits_in_hooks()) << "it tries again";
  });
}

TEST(Reducer, AWaitThatOnlyOrdersStreamsHasNoLimit) {
  run_ranks(3, [&](comm::CommunicatorPtr comm) {
    StageOptions options = at_stage(3);
    options.hook_wait_limit = std::chrono::seconds(5);
    Vectors vectors(12, std::make_shared<Slow>(comm, std::chrono::hours(1), /*wait_blocks=*/false), options);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(most_waiting(vectors), 1) << "gradients leave p.grad";
    EXPECT_TRUE(vectors.reducer->waits_in_hooks()) << "no limit was reached";
    EXPECT_LT(seconds_since(start), 4);
  });
}

/// Reductions end when they are waited for, and not before; counts how many are under way.
class Buffering final : public tessera::testing::ForwardingCommunicator {
 public:
  Buffering(comm::CommunicatorPtr inner, bool buffers)
      : ForwardingCommunicator(std::move(inner)), buffers_(buffers) {}
  bool buffers_reductions() const override { return buffers_; }
  int most_under_way = 0;

 protected:
  struct Counted final : comm::Work {
    Counted(comm::WorkPtr work, int* count) : inner(std::move(work)), under_way(count) {}
    bool test() override { return false; }
    void wait() override {
      inner->wait();
      --*under_way;
    }
    comm::WorkPtr inner;
    int* under_way;
  };
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    most_under_way = std::max(most_under_way, ++under_way_);
    return std::make_shared<Counted>(ForwardingCommunicator::do_reduce_scatter(full, into, label),
                                     &under_way_);
  }

 private:
  bool buffers_;
  int under_way_ = 0;
};

TEST(Reducer, WithoutSlotsFewReductionsAreUnderWayWhereTheyAreBuffered) {
  for (const bool buffers : {true, false}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      const StageOptions options = at_stage(1);
      const auto network = std::make_shared<Buffering>(comm, buffers);
      Vectors vectors(12, network, options);
      vectors.backward(std::vector<double>(12, 1));
      if (comm->rank() == 0) {  // rank 1's shards end in padding
        EXPECT_EQ(vectors.results(), std::vector<double>(12, 1));
      }
      EXPECT_EQ(network->most_under_way, buffers ? options.num_slots : 12);
    });
  }
}

// Rank 1 never completes the unit that rank 0 waits for, and on its way to the end of backward needs gathers
// that rank 0 has not come to: without a limit both would stand still.
TEST(Reducer, RanksThatUseDifferentParametersOfAUnitDoNotDeadlock) {
  std::vector<at::Tensor> found[2];
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    Chain model(8);
    Rig rig(*model, comm, 3, [](ShardedModelOptions& options) {
      options.reducer.hook_wait_limit = std::chrono::milliseconds(50);
      options.residency.prefetch_numel = 0;
    });
    for (int step = 0; step < 3; ++step) {
      at::Tensor x = randn({2, kWidth}, step);
      for (size_t i = 0; i < model->layers.size(); ++i) {
        torch::nn::Linear& layer = model->layers[i];
        const bool with_bias = comm->rank() == 0 || i != 7;  // the first unit that backward completes
        x = at::tanh(at::linear(x, layer->weight, with_bias ? layer->bias : at::Tensor()));
      }
      rig.step(x.square().sum());
    }
    // (In shared memory no rank can stand in a gather, so nothing has a limit.)
    EXPECT_EQ(rig.sharded->gradients().waits_in_hooks(), comm->rank() == 1 || in_shared_memory())
        << "rank " << comm->rank();
    found[comm->rank()] = rig.weights();
  });
  EXPECT_TRUE(same_bits(found[0], found[1]));
}

struct CountingHook : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int* count) : count_(count) {}
  void operator()(const torch::autograd::Variable& variable) override {
    ++*count_;
    variable.mutable_grad().mul_(2);  // ours must see what it leaves
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
    auto two = std::make_unique<GradientReducer>(*one.layout, others, one.parameters, alone(), at_stage(0));
    if (first_goes_first) {
      one.reducer.reset();
      two->begin_backward(true, true);
      (one.parameters[0] * 5).sum().backward();
      two->finish_backward();
      EXPECT_EQ(others[0].gradient.accumulator[0].item<double>(), 5);
    } else {
      two.reset();
      one.backward({5});
      EXPECT_EQ(one.results(), (std::vector<double>{5}));
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

/// A checkpointed Linear: backward runs a backward inside, so a layer in two
/// segments gets its gradient in two parts.
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
  for (int world : {1, 2}) {
    Chain plain(2);
    at::Tensor mean = at::zeros({});
    for (int rank = 0; rank < world; ++rank) mean = mean + plainly(*plain, input(rank)) / world;
    const std::vector<at::Tensor> expected = plain_gradients(*plain, mean);
    for (int stage = 0; stage <= 3; ++stage) {
      for (int micro_steps : {1, 2}) {
        SCOPED_TRACE(str("world ", world, " stage ", stage, " micro-steps ", micro_steps));
        run_ranks(world, [&](comm::CommunicatorPtr comm) {
          Chain model(2);
          Rig rig(*model, comm, stage,
                  [](ShardedModelOptions& options) { options.optimizer.groups[0].lr = 0; });
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

// What goes into a slot of a narrower dtype, or times a factor, is rounded: stages
// 0 and 1 do it to the sum of the parts.
TEST(Reducer, GradientsInPartsRoundAlikeAtEveryStage) {
  struct Rounding {
    const char* name;
    at::ScalarType communicate = at::kFloat;
    bool prescale = false;
    double predivide = 1;
    DType parameters = DType::kFloat32;
  };
  for (const Rounding& rounding :
       {Rounding{"bf16", at::kBFloat16}, Rounding{"fp16", at::kHalf}, Rounding{"prescale", at::kFloat, true},
        Rounding{"predivide", at::kFloat, false, 3},
        Rounding{"bf16 model", at::kBFloat16, true, 1, DType::kBFloat16}})
    for (const char* backend : {"gloo", "shm"})
      for (const bool each : {false, true}) {
        if (each && (rounding.communicate != at::kBFloat16 || backend == std::string("gloo"))) continue;
        std::vector<at::Tensor> expected;
        for (int stage = 0; stage <= 3; ++stage) {
          SCOPED_TRACE(str(rounding.name, " ", backend, " stage ", stage, each ? " each micro-step" : ""));
          comm::run_threads(
              3, {.backend = backend, .timeout = std::chrono::seconds(20)}, [&](comm::CommunicatorPtr comm) {
                Chain model(2);
                Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) {
                  options.compute_dtype = rounding.parameters;
                  options.reducer.communicate_dtype = rounding.communicate;
                  options.reducer.prescale = rounding.prescale;
                  options.reducer.predivide_factor = rounding.predivide;
                  options.reducer.reduce_each_micro_step = each;
                  options.optimizer.groups[0].lr = 1e-3;
                });
                for (int step = 0; step < 3;
                     ++step) {  // in the first one it is not known which hooks will fire twice
                  const int num_micro_steps = each ? 2 : 1;
                  for (int micro = 0; micro < num_micro_steps; ++micro) {
                    const at::Tensor x = randn({3, kWidth}, 4'000 + 100 * step + 10 * micro + comm->rank())
                                             .to(to_torch(rounding.parameters));
                    rig.backward(checkpointed(*model, x.requires_grad_()), micro == 0,
                                 micro == num_micro_steps - 1);
                  }
                  rig.update();
                }
                std::vector<at::Tensor> found = rig.gradients();
                for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
                if (comm->rank() != 0) return;
                if (expected.empty()) expected = found;
                EXPECT_TRUE(same_bits(found, expected));
              });
          // Gloo's all-reduce, which stage 0 uses without slots, adds in an order of its own.
          const bool own_order =
              stage == 0 && backend == std::string("gloo") && rounding.communicate == at::kFloat && !each;
          if (own_order) expected.clear();
        }
      }
}

// At stage 0 ranks read the sums in each other's memory: a rank that is ahead
// must not begin the next ones there.
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
