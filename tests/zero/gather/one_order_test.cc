// Gathers and reductions where a wait only orders streams, as on CUDA: one group, and one order on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "tests/zero/zero_testing.h"
#include "zero/reduce/gradient_hook.h"

namespace tessera::zero::testing {
namespace {

using ::testing::HasSubstr;

using Log = std::vector<std::string>;

/// Like NCCL with the device far behind: test() is always false, and a wait blocks until the collective is
/// done, as an in-order stream would. So a step ends only if all ranks issue all collectives in one order.
class StreamOrdered final : public tessera::testing::ForwardingCommunicator {
 public:
  /// `log`: gathers and reductions in the order of their issue, of this group and those duplicated from it.
  StreamOrdered(comm::CommunicatorPtr inner, Log* log)
      : ForwardingCommunicator(std::move(inner)), log_(log) {}
  bool wait_blocks() const override { return false; }
  comm::CommunicatorPtr duplicate(std::string_view name) override {
    names_.emplace_back(name);
    return std::make_shared<StreamOrdered>(ForwardingCommunicator::duplicate(name), log_);
  }
  const std::vector<std::string>& duplicates() const { return names_; }

 protected:
  struct StreamWork final : comm::Work {
    explicit StreamWork(comm::WorkPtr inner) : inner(std::move(inner)) {}
    bool test() override { return false; }
    void wait() override { inner->wait(); }
    comm::WorkPtr inner;
  };
  comm::WorkPtr do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                              std::string_view label) override {
    log_->push_back(str("gather ", label));
    return std::make_shared<StreamWork>(ForwardingCommunicator::do_all_gather(full, shard, label));
  }
  comm::WorkPtr do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                  std::string_view label) override {
    log_->push_back(str("reduce ", label));
    return std::make_shared<StreamWork>(ForwardingCommunicator::do_reduce_scatter(full, into, label));
  }

 private:
  Log* log_;
  std::vector<std::string> names_;
};

constexpr int kNumLayers = 8;
const std::vector<int> kAll{0, 1, 2, 3, 4, 5, 6, 7};

using Loss = std::function<at::Tensor(ChainImpl& model, int rank, int step)>;

/// Five steps on two ranks at stage 3: each step's gradients are plain autograd's, and all ranks issue the
/// same collectives in the same order. Returns how many units' gradients came late, by step, on either rank.
std::vector<size_t> expect_one_order(const Loss& loss_of, const Change& change = {}) {
  std::array<std::array<size_t, 5>, 2> late_on_rank{};
  std::array<Log, 2> logs;
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto network = std::make_shared<StreamOrdered>(comm, &logs[comm->rank()]);
    Chain model(kNumLayers), plain(kNumLayers);
    Rig rig(*model, network, 3, change);
    EXPECT_EQ(network->duplicates(), std::vector<std::string>{"gather"}) << "no second group beside it";
    for (int step = 0; step < 5; ++step) {
      rig.backward(loss_of(*model, comm->rank(), step));
      rig.update(/*scale=*/0);
      late_on_rank[comm->rank()][step] = rig.num_late;
      const std::vector<at::Tensor> expected =
          plain_gradients(*plain, (loss_of(*plain, 0, step) + loss_of(*plain, 1, step)) / 2);
      EXPECT_LT(largest_difference(rig.gradients(), expected), 1e-5) << "step " << step;
      EXPECT_TRUE(rig.sharded->gradients().waits_in_hooks());
    }
  });
  EXPECT_EQ(logs[0], logs[1]);
  std::vector<size_t> num_late;
  for (int step = 0; step < 5; ++step)
    num_late.push_back(std::max(late_on_rank[0][step], late_on_rank[1][step]));
  return num_late;
}

TEST(OneOrder, OfGathersAndReductions) {
  expect_one_order([](ChainImpl& model, int rank, int step) {
    return model.through(kAll, batch(rank, step)).square().sum();
  });
}

TEST(OneOrder, WhenRanksSkipUnits) {
  for (const std::vector<int>& used : {std::vector<int>{0, 2, 3, 5}, {0, 1, 2}, {5, 6, 7}, {2}}) {
    for (bool overlap : {true, false}) {
      SCOPED_TRACE(str(join(used, " "), " overlap ", overlap));
      expect_one_order(
          [&](ChainImpl& model, int rank, int step) {
            return model.through(step > 0 && rank == 1 ? used : kAll, batch(rank, step)).square().sum();
          },
          [&](ShardedModelOptions& options) {
            options.residency.overlap = options.reducer.overlap = overlap;
          });
    }
  }
}

// The first unit of the agreed order never completes on rank 1: its reduction is issued in its turn, with
// zeros.
TEST(OneOrder, WhenARankLacksAGradient) {
  const std::vector<size_t> num_late = expect_one_order([](ChainImpl& model, int rank, int step) {
    at::Tensor x = batch(rank, step);
    for (int i : kAll) {
      const bool with_bias = rank == 0 || i != 7;
      x = at::tanh(at::linear(x, model.layers[i]->weight, with_bias ? model.layers[i]->bias : at::Tensor()));
    }
    return x.square().sum();
  });
  EXPECT_EQ(num_late, std::vector<size_t>(5, 0));
}

// Rank 1 also uses a bias early (its unit has been fetched ahead), so its gradient is complete only after its
// unit's turn.
TEST(OneOrder, WhenAGradientComesAfterItsTurn) {
  if (in_shared_memory()) GTEST_SKIP() << "no gather has a turn before it";
  const std::vector<size_t> num_late = expect_one_order(
      [](ChainImpl& model, int rank, int step) {
        at::Tensor x = model.through({0}, batch(rank, step));
        if (step > 0 && rank == 1) x = x + at::tanh(model.layers[3]->bias);
        return model.through({1, 2, 3, 4, 5, 6, 7}, x).square().sum();
      },
      [](ShardedModelOptions& options) { options.residency.capacity_units = 4; });
  EXPECT_EQ(num_late, (std::vector<size_t>{0, 1, 1, 1, 1}));
}

TEST(OneOrder, WhenItChangesOnAllRanks) {
  expect_one_order([](ChainImpl& model, int rank, int step) {
    at::Tensor y = model.through(kAll, batch(rank, step));
    if (step >= 2) y = at::tanh(model.extra->forward(y));
    if (step >= 4) y = model.layers[0]->forward(y);  // in the plan, but at another place
    return y.square().sum();
  });
}

TEST(OneOrder, WhenRanksGatherInTheMiddle) {
  std::array<Log, 2> logs;
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    Chain model(kNumLayers);
    Rig rig(*model, std::make_shared<StreamOrdered>(comm, &logs[comm->rank()]), 3);
    for (int step = 0; step < 4; ++step) {
      at::Tensor x = batch(comm->rank(), step);
      const bool skips = step > 0 && comm->rank() == 1;
      x = model->through(skips ? std::vector<int>{0, 1} : std::vector<int>{0, 1, 2}, x);
      GatheredParameters(*rig.sharded, {"fc6.weight"}).close();
      rig.step(model->through({3, 4, 5, 6, 7}, x).square().sum());
    }
  });
  EXPECT_EQ(logs[0], logs[1]);
}

// Gradients leave p.grad during backward, so that their memory stays sharded.
TEST(OneOrder, GradientsAreReducedDuringBackward) {
  std::array<Log, 2> logs;
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    Chain model(kNumLayers);
    long most = 0;
    const auto parameters = model->parameters();
    for (const at::Tensor& parameter : parameters)  // before the reducer's hooks
      GradientHook::install(&most, parameter, [&] {
        most = std::max<long>(most, std::count_if(parameters.begin(), parameters.end(),
                                                  [](const at::Tensor& p) { return p.grad().defined(); }));
      });
    Rig rig(*model, std::make_shared<StreamOrdered>(comm, &logs[comm->rank()]), 3);
    for (int step = 0; step < 4; ++step) {
      most = 0;
      rig.step(model->through(kAll, batch(comm->rank(), step)).square().sum());
      // In the first step the order is still that of registration, in which the unused layer comes first.
      EXPECT_LE(most, step == 0 ? 2 * kNumLayers : 2) << "step " << step;
      const int64_t unit_bytes = 4 * rig.sharded->layout().units()[0].numel;  // all units are alike
      EXPECT_LE(rig.sharded->gradients().slot_bytes(), 4 * unit_bytes);
    }
  });
}

}  // namespace
}  // namespace tessera::zero::testing
