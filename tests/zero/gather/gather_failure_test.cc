// A gather that fails inside an operator. libtorch swallows what a callback throws and runs the operator
// anyway: then the operator itself must throw, in forward and backward, and nothing may be computed on other
// values than the model's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <torch/nn/modules/rnn.h>

#include <limits>
#include <thread>

#include "tests/support/failing_allocations.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    table = register_module("table", torch::nn::Embedding(11, kWidth));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, kWidth)));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
    fill_parameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return head->forward(std::get<0>(lstm->forward(table->forward(tokens)))).square().mean();
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Mixed);

struct Variant {
  bool in_wait = false;
  bool overlap = true;
  bool autocast = false;
};

/// Two steps, one recorded and one replayed. Returns the error; `plan.count`: all-gathers reached. `losses`:
/// filled by a run without failures; in one with a failure all those that forward returns have to be the
/// same.
std::string train(const std::shared_ptr<FailurePlan>& plan, const comm::CommunicatorPtr& comm,
                  const Variant& variant, std::vector<at::Tensor>* losses = nullptr) {
  Mixed model;
  std::string error;
  Rig rig(*model, std::make_shared<FailingCommunicator>(comm, plan), 3, [&](ShardedModelOptions& options) {
    options.unit_numel = 64;
    options.residency.track_casts = variant.autocast;
    options.residency.overlap = variant.overlap;
  });
  error = error_of([&] {
    for (int step = 0; step < 2; ++step) {
      at::autocast::set_autocast_enabled(at::kCPU, variant.autocast);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::Tensor loss;
      const std::string inside = message_of([&] { loss = model->forward(randint(11, {4, 2}, step)); });
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      if (!inside.empty()) throw CommError(inside);
      if (losses && plan->at < 0) losses->push_back(loss.detach());
      if (losses && plan->at >= 0) {
        EXPECT_TRUE(at::equal(loss.detach(), losses->at(static_cast<size_t>(step))))
            << "computed on other values";
      }
      rig.step(loss);
    }
    rig.residency().wait_all();  // for the first gathers of a third step
  });
  if (error.empty()) return error;
  if (!in_shared_memory()) {  // there most all-gathers are not Residency's
    EXPECT_EQ(error_of([&] { rig.residency().rethrow(); }), error) << "every later call says so again";
  }
  if (comm->size() == 1) {
    EXPECT_EQ(message_of([&] { model->forward(randint(11, {4, 2}, 9)); }), error)
        << "so do operators, which never compute on something else";
  }
  return error;
}

void fail_everywhere(const Variant& variant) {
  auto plan = std::make_shared<FailurePlan>();
  std::vector<at::Tensor> losses;
  ASSERT_EQ(train(plan, alone(), variant, &losses), "");
  const int num_gathers = plan->count;
  ASSERT_GT(num_gathers, 10);
  for (int at = 0; at < num_gathers; ++at) {
    SCOPED_TRACE(at);
    plan = std::make_shared<FailurePlan>();
    plan->at = at;
    plan->in_wait = variant.in_wait;
    EXPECT_EQ(train(plan, alone(), variant, &losses), "the cable was pulled");
  }
}

TEST(GatherFailure, AtEveryGatherAndWait) {
  for (const Variant& variant : {Variant{},
                                 {.in_wait = true},
                                 {.overlap = false},
                                 {.autocast = true},
                                 {.in_wait = true, .autocast = true}}) {
    SCOPED_TRACE(
        str("in wait ", variant.in_wait, " overlap ", variant.overlap, " autocast ", variant.autocast));
    fail_everywhere(variant);
  }
}

/// Two steps, of which the second has no memory from allocation `first` on. Returns the error, and how many
/// allocations there were.
std::pair<std::string, int64_t> train_without_memory(int64_t first, bool autocast) {
  Mixed model;
  Rig rig(*model, alone(), 3, [&](ShardedModelOptions& options) {
    options.unit_numel = 64;
    options.residency.track_casts = autocast;
  });
  int64_t count = 0;
  const auto step = [&](int number) {
    const at::Tensor tokens = randint(11, {4, 2}, number);
    const tessera::testing::FailingAllocations failing(number == 0 ? std::numeric_limits<int64_t>::max()
                                                                   : first);
    const std::string error = error_of([&] {
      at::autocast::set_autocast_enabled(at::kCPU, autocast);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      rig.step(model->forward(tokens));
    });
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    count = failing.count();
    return error;
  };
  EXPECT_EQ(step(0), "");
  const std::string error = step(1);
  return {error, count};
}

TEST(GatherFailure, NoMemoryFromAnyPointOnIsAnError) {
  TESSERA_ON_ONE_BACKEND();
  for (const bool autocast : {false, true}) {
    const int64_t all = train_without_memory(std::numeric_limits<int64_t>::max(), autocast).second;
    ASSERT_GT(all, 50);
    for (int64_t first = 0; first < all; first += autocast ? 3 : 1)
      EXPECT_THAT(train_without_memory(first, autocast).first, ::testing::HasSubstr("can't allocate memory"))
          << "from allocation " << first << " of " << all << ", autocast " << autocast;
  }
}

/// What reads a weight whose gather fails. One that reads nothing is last.
const std::vector<std::pair<const char*, std::function<void(const at::Tensor&)>>>& reads() {
  static const std::vector<std::pair<const char*, std::function<void(const at::Tensor&)>>> all = {
      {"norm", [](const at::Tensor& weight) { weight.norm(); }},
      {"item", [](const at::Tensor& weight) { weight[0][0].item<float>(); }},
      {"clone", [](const at::Tensor& weight) { weight.clone(); }},
      {"copy_", [](const at::Tensor& weight) { at::empty_like(weight).copy_(weight); }},
      {"to", [](const at::Tensor& weight) { weight.to(at::kDouble); }},
      {"matmul", [](const at::Tensor& weight) { weight.matmul(weight); }},
      {"list", [](const at::Tensor& weight) { at::_foreach_norm({weight}); }},
      {"cat", [](const at::Tensor& weight) { at::cat({weight, weight}); }},
      {"view, then read", [](const at::Tensor& weight) { weight.t().sum(); }},
      {"out",
       [](const at::Tensor& weight) {
         at::Tensor sum = at::empty({0});
         at::sum_out(sum, weight, at::IntArrayRef{0});
       }},
  };
  return all;
}

TEST(GatherFailure, EveryReadThrowsAtItsOperator) {
  for (const auto& [name, read] : reads()) {
    SCOPED_TRACE(name);
    for (const bool on_another_thread : {false, true}) {
      auto plan = std::make_shared<FailurePlan>();
      Mixed model;
      Rig rig(*model, std::make_shared<FailingCommunicator>(alone(), plan), 3,
              [](ShardedModelOptions& options) { options.unit_numel = 64; });
      plan->at = plan->count;
      const at::Tensor weight = model->head->weight.detach();
      std::string error;
      const auto run = [&, &read = read] { error = message_of([&] { read(weight); }); };
      on_another_thread ? std::thread(run).join() : run();
      EXPECT_EQ(error, "the cable was pulled");
    }
  }
}

TEST(GatherFailure, BackwardThrowsWhatItsOperatorCannotRead) {
  auto plan = std::make_shared<FailurePlan>();
  Chain model(3);
  Rig rig(*model, std::make_shared<FailingCommunicator>(alone(), plan), 3, [](ShardedModelOptions& options) {
    options.residency.capacity_units = 1;
    options.residency.persistence_numel = 0;
  });
  const at::Tensor x = batch(0, 0).set_requires_grad(true);
  const at::Tensor loss = model->forward(x).square().sum();
  plan->at = plan->count;
  // Autograd's own call, in which no hook of a parameter runs.
  EXPECT_EQ(message_of([&] { torch::autograd::grad({loss}, {x}); }), "the cable was pulled");
}

TEST(GatherFailure, OnOneRankEndsTheOthers) {
  for (int at : {0, 3, 12}) {
    SCOPED_TRACE(at);
    const std::string error = error_of([&] {
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        auto plan = std::make_shared<FailurePlan>();
        plan->at = comm->rank() == 1 ? at : -1;
        const std::string mine = train(plan, comm, {});
        EXPECT_NE(mine, "") << "rank " << comm->rank();
        if (!mine.empty()) throw CommError(mine);
      });
    });
    EXPECT_EQ(error, "the cable was pulled") << "the first to fail";
  }
}

}  // namespace
}  // namespace tessera::zero::testing
