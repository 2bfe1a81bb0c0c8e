// Networks slower than backward: what hooks wait for, how long, and how much memory gradients take meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/zero/kernels/vectors.h"

namespace tessera::zero::testing {
namespace {

/// Counts the gradients whose memory is in use, in p.grad or elsewhere, at each hook, and keeps the most.
class AliveGradients {
 public:
  explicit AliveGradients(Vectors& vectors) : vectors_(vectors) {
    vectors_.at_hook = [this] { look(); };
  }
  ~AliveGradients() { vectors_.at_hook = nullptr; }
  AliveGradients(const AliveGradients&) = delete;
  long most() const { return most_; }

 private:
  void look() {
    for (const at::Tensor& parameter : vectors_.parameters)
      if (parameter.grad().defined())
        seen_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                               parameter.grad().storage().getWeakStorageImpl());
    most_ = std::max(most_, static_cast<long>(std::ranges::count_if(
                                seen_, [](const auto& gradient) { return !gradient.second.expired(); })));
  }

  Vectors& vectors_;
  std::map<const void*, c10::weak_intrusive_ptr<c10::StorageImpl>> seen_;  // by parameter
  long most_ = 0;
};

TEST(Reducer, GradientsAreFreedAsTheyAreReduced) {
  for (int stage : {0, 2}) {
    Vectors vectors(12, alone(), at_stage(stage));
    const AliveGradients alive(vectors);
    for (int step = 0; step < 2; ++step) vectors.backward(Factors(12, 1));
    EXPECT_EQ(alive.most(), 1) << "stage " << stage;
  }
}

/// A network slower than backward: a reduction has arrived only after `delay`, or when it is waited for.
class Slow final : public tessera::testing::ForwardingCommunicator {
 public:
  /// `wait_blocks`: false as on CUDA, where a reduction that has not arrived shows only that the device is
  /// behind.
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

/// The most gradients alive at any hook of a few backward passes.
long most_waiting(Vectors& vectors) {
  const AliveGradients alive(vectors);
  for (int step = 0; step < 2; ++step) {
    vectors.backward(Factors(12, step + 1));
    EXPECT_TRUE(vectors.hold(Factors(12, step + 1)));
  }
  return alive.most();
}

TEST(Reducer, ASlowNetworkSlowsBackwardInsteadOfFillingMemory) {
  for (int stage : {2, 3}) {
    for (bool overlap : {true, false}) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.overlap = overlap;
        Vectors vectors(12, std::make_shared<Slow>(comm, std::chrono::milliseconds(5)), options);
        EXPECT_EQ(most_waiting(vectors), 1) << "stage " << stage;
        EXPECT_LE(vectors.most_slots_in_use(), overlap ? options.num_slots : 1);
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
    EXPECT_EQ(most_waiting(vectors), 12 - options.num_slots) << "they wait outside of slots";
    network->set_delay(std::chrono::milliseconds(0));
    for (int pass = 2; pass <= 9; ++pass) {  // the same number of passes on every rank
      if (pass <= 8) {
        EXPECT_FALSE(vectors.reducer->waits_in_hooks()) << pass;
      }
      vectors.backward(Factors(12, 1));
    }
    EXPECT_TRUE(vectors.reducer->waits_in_hooks()) << "it tries again";
  });
}

TEST(Reducer, AWaitThatOnlyOrdersStreamsHasNoLimit) {
  run_ranks(3, [&](comm::CommunicatorPtr comm) {
    StageOptions options = at_stage(3);
    options.hook_wait_limit = std::chrono::hours(1);
    Vectors vectors(12, std::make_shared<Slow>(comm, std::chrono::hours(1), /*wait_blocks=*/false), options);
    EXPECT_EQ(most_waiting(vectors), 1) << "gradients go into slots";
    EXPECT_TRUE(vectors.reducer->waits_in_hooks()) << "no limit was reached";
  });
}

/// Reductions end only when they are waited for. Counts how many are under way.
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
      vectors.backward(Factors(12, 1));
      EXPECT_TRUE(vectors.hold(Factors(12, 1)));
      EXPECT_EQ(network->most_under_way, buffers ? options.num_slots : 12);
    });
  }
}

// Rank 1 never completes the unit that rank 0 waits for, and needs gathers on the way to the end of its
// backward that rank 0 has not reached: without a limit neither would go on.
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
    const bool no_limit = in_shared_memory();  // nothing is gathered there
    EXPECT_EQ(rig.sharded->gradients().waits_in_hooks(), comm->rank() == 1 || no_limit)
        << "rank " << comm->rank();
    found[comm->rank()] = rig.weights();
  });
  EXPECT_TRUE(same_bits(found[0], found[1]));
}

}  // namespace
}  // namespace tessera::zero::testing
