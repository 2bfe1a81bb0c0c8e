// Models used by other threads than the engine's, and by two threads at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void on_a_thread(const std::function<void()>& body) { std::thread(body).join(); }

TEST(Threads, EachStepMayHaveAThreadOfItsOwn) {
  std::vector<at::Tensor> expected;
  for (bool threads : {false, true}) {
    for (int stage : {0, 1, 2, 3}) {
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        Chain model(5);
        Rig rig(*model, comm, stage);
        std::vector<at::Tensor> found;
        const auto step = [&](int number) {
          const at::Tensor loss = model->forward(batch(comm->rank(), number)).square().sum();
          found.push_back(loss.detach());
          rig.step(loss);
        };
        for (int number = 0; number < 4; ++number)
          threads ? on_a_thread([&] { step(number); }) : step(number);
        for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
        if (comm->rank() != 0) return;
        if (expected.empty()) expected = found;
        EXPECT_TRUE(same_bits(found, expected)) << "threads " << threads << " stage " << stage;
      });
    }
  }
}

/// Reads weights repeatedly on a thread of its own, from construction to destruction, or until that fails.
class Reader {
 public:
  explicit Reader(ChainImpl& model)
      : thread_([this, &model] {
          const at::NoGradGuard no_grad;
          while (!stop_ && message_of([&] { model.forward(batch(0, 0)); }).empty()) {
          }
        }) {}
  ~Reader() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// Stages 1 and 2 keep their units, so two threads may wait for one gather and both read.
TEST(Threads, ASecondThreadMayReadWhereUnitsStay) {
  for (int stage : {1, 2}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(4), plain(4);
      Rig rig(*model, comm, stage);
      for (int step = 0; step < 5; ++step) {
        rig.step(model->forward(batch(comm->rank(), step)).square().sum());
        std::vector<at::Tensor> found[2];
        const auto read = [&](int thread) {
          for (const auto& layer : model->layers) found[thread].push_back(layer->weight.detach().clone());
        };
        std::thread second(read, 1);
        read(0);
        second.join();
        EXPECT_TRUE(same_bits(found[0], found[1]));
        EXPECT_TRUE(at::equal(found[1][3], rig.sharded->full_parameter("fc3.weight"))) << "stage " << stage;
      }
      rig.residency().rethrow();
    });
  }
}

TEST(Threads, ASecondThreadInsideAtOnceIsAnErrorAtStage3) {
  Chain model(4);
  Rig rig(*model, alone(), 3);
  rig.residency().on_use(0, "aten::linear");  // as if an operator of this thread were running
  std::string error;
  on_a_thread([&] { error = message_of([&] { model->layers[2]->forward(batch(0, 0)); }); });
  EXPECT_THAT(error, AllOf(HasSubstr("reads unit 2 (fc2.weight, fc2.bias) on a second thread"),
                           HasSubstr("one thread at a time")));
  rig.residency().operator_ended();
  EXPECT_EQ(message_of([&] { rig.backward(model->forward(batch(0, 0)).sum()); }), error);
}

TEST(Threads, HelpersOfAnOperatorMayReadWhatItHolds) {
  Chain model(4), plain(4);
  Rig rig(*model, alone(), 3);
  rig.residency().on_use(2, "aten::linear");
  on_a_thread(
      [&] { EXPECT_TRUE(at::equal(model->layers[2]->weight.t().clone(), plain->layers[2]->weight.t())); });
  EXPECT_TRUE(at::equal(model->layers[2]->weight.clone(), plain->layers[2]->weight))
      << "the helper's end is not the operator's";
  rig.residency().operator_ended();
  rig.step(model->forward(batch(0, 0)).sum());
}

TEST(Threads, AnEngineCallWhileAnotherThreadsOperatorRunsIsRefused) {
  Chain model(3);
  Rig rig(*model, alone(), 3);
  std::string error;
  rig.residency().on_use(0, "aten::linear");
  on_a_thread([&] { error = error_of([&] { rig.sharded->skip_step(); }); });
  EXPECT_THAT(error, HasSubstr("one thread at a time"));
  rig.residency().operator_ended();
  rig.step(model->forward(batch(0, 0)).sum());
}

TEST(Threads, ReadingDuringAnUpdateIsAnError) {
  Chain model(3);
  Rig rig(*model, alone(), 2);
  rig.backward(model->forward(batch(0, 0)).sum());
  rig.residency().begin_update();
  std::string error;
  on_a_thread([&] { error = message_of([&] { model->layers[1]->forward(batch(0, 0)); }); });
  EXPECT_EQ(error_of([&] { rig.residency().rethrow(); }), error);
  EXPECT_THAT(error, AllOf(HasSubstr("unit 1"), HasSubstr("another one is in step()")));
}

// Any interleaving gives an error or right values, and no crash.
TEST(Threads, TwoThreadsThatTrainAndReadAtOnce) {
  Chain model(4);
  Rig rig(*model, alone(), 3);
  std::string error;
  {
    const Reader reader(*model);
    const auto start = std::chrono::steady_clock::now();
    while (error.empty() && seconds_since(start) < 10)
      error = message_of([&] { rig.step(model->forward(batch(0, 0)).square().sum()); });
  }
  EXPECT_THAT(error,
              ::testing::AnyOf(HasSubstr("one thread at a time"), HasSubstr("another one is in step()")));
}

}  // namespace
}  // namespace tessera::zero::testing
