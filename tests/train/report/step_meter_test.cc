#include "train/report/step_meter.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "comm/init/init.h"

namespace tessera::train {
namespace {

at::Tensor loss(double value) { return at::scalar_tensor(value, at::kFloat); }

TEST(StepMeter, MeansAreOverTheSamplesOfAllRanks) {
  comm::run_threads(2, {}, [](comm::CommunicatorPtr comm) {
    StepMeter meter(at::kCPU, false);
    // Rank 1's second micro-step has half the samples; one further micro-step has share 0.
    meter.add_loss(loss(1 + comm->rank()));
    meter.add_loss(loss(10), comm->rank() == 0 ? 1 : 0.5);
    meter.add_loss(loss(1e9), 0);
    meter.count_step(14);
    const StepWindow window = meter.finish_window(*comm);
    EXPECT_DOUBLE_EQ(window.loss, (1 + 2 + 10 + 5) / 3.5);
    EXPECT_EQ(window.num_steps, 1);
    EXPECT_EQ(window.num_samples, 14);
    EXPECT_EQ(meter.finish_window(*comm).num_samples, 0) << "a new window has begun";
  });
}

TEST(StepMeter, TotalsHoldTheWindowUnderWayAndWhatCameBefore) {
  comm::run_threads(2, {}, [](comm::CommunicatorPtr comm) {
    StepMeter meter(at::kCPU, false, {.loss_sum = 30, .loss_count = 10, .seconds = 100, .num_samples = 50});
    meter.add_loss(loss(4));
    meter.count_step(10);
    TrainTotals totals = meter.totals(*comm);
    EXPECT_EQ(totals.num_samples, 60);
    EXPECT_DOUBLE_EQ(totals.mean_loss(), 38.0 / 12);
    EXPECT_GE(totals.seconds, 100);
    EXPECT_LT(totals.seconds, 200);
    const StepWindow window = meter.finish_window(*comm);
    EXPECT_EQ(window.loss, 4) << "totals() does not end the window";
    EXPECT_EQ(window.num_samples, 10);
    totals = meter.totals(*comm);
    EXPECT_EQ(totals.num_samples, 60) << "nothing is counted twice";
    EXPECT_DOUBLE_EQ(totals.mean_loss(), 38.0 / 12);
  });
}

TEST(StepMeter, ALossThatIsNoNumberSpoilsItsOwnWindowOnly) {
  comm::run_threads(1, {}, [](comm::CommunicatorPtr comm) {
    StepMeter meter(at::kCPU, false);
    meter.add_loss(loss(std::numeric_limits<double>::quiet_NaN()));
    EXPECT_TRUE(std::isnan(meter.finish_window(*comm).loss));
    meter.add_loss(loss(3));
    EXPECT_EQ(meter.finish_window(*comm).loss, 3);
    EXPECT_TRUE(std::isnan(meter.totals(*comm).mean_loss()));
  });
}

TEST(StepMeter, PausesDoNotCount) {
  comm::run_threads(1, {}, [](comm::CommunicatorPtr comm) {
    using namespace std::chrono_literals;
    const auto start = std::chrono::steady_clock::now();
    const auto since_start = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    StepMeter meter(at::kCPU, false);
    meter.pause();
    std::this_thread::sleep_for(50ms);
    double counted = meter.totals(*comm).seconds;
    EXPECT_LE(counted, since_start() - 0.05) << "nor does the current pause";
    const double paused = meter.resume();
    EXPECT_GE(paused, 0.05);
    counted = meter.finish_window(*comm).seconds;
    EXPECT_LE(counted, since_start() - paused);
  });
}

}  // namespace
}  // namespace tessera::train
