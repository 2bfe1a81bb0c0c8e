// What the tests with other programs do not reach: several monitors at once, and dropped ones.
#include "monitor/monitors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "core/str.h"
#include "tests/support/log_file.h"

namespace tessera {
namespace {

using testing::ElementsAre;

/// Records its calls; throws in the `throws_at`-th.
class Recorder final : public Monitor {
 public:
  Recorder(std::string name, std::vector<std::string>& calls, int throws_at = 1000)
      : name_(std::move(name)), calls_(calls), throws_at_(throws_at) {}
  std::string_view name() const override { return name_; }
  void scalars(int64_t step, const Scalars& scalars) override {
    note(str("scalars ", step, " ", scalars.at(0).first));
  }
  void close(RunStatus status) override { note(std::string(name_of(status))); }

 private:
  void note(const std::string& call) {
    if (++num_calls_ >= throws_at_) throw Error("the disk is full");
    calls_.push_back(name_ + ": " + call);
  }
  std::string name_;
  std::vector<std::string>& calls_;
  int throws_at_;
  int num_calls_ = 0;
};

Monitors two(std::vector<std::string>& calls, int first_throws_at, const Logger& log = {}) {
  Monitors monitors(log);
  monitors.open("a", [&] { return std::make_unique<Recorder>("a", calls, first_throws_at); });
  monitors.open("b", [&] { return std::make_unique<Recorder>("b", calls); });
  return monitors;
}

TEST(Monitors, AFailingOneIsDroppedWithOneWarning) {
  std::vector<std::string> calls;
  const LogFile log;
  Monitors monitors = two(calls, 2, log.logger());
  for (int64_t step : {1, 2, 3}) monitors.scalars(step, {{"x", 1.0}});
  monitors.close(RunStatus::kFinished);
  EXPECT_TRUE(monitors.empty());
  EXPECT_THAT(calls, ElementsAre("a: scalars 1 x", "b: scalars 1 x", "b: scalars 2 x", "b: scalars 3 x",
                                 "b: FINISHED"));
  const std::string text = log.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_THAT(text, testing::HasSubstr("a: the disk is full; the run goes on without it"));
}

TEST(Monitors, WhatIsNotClosedHasFailed) {
  std::vector<std::string> calls;
  {
    Monitors monitors = two(calls, 1000);
    Monitors moved = std::move(monitors);
    EXPECT_TRUE(calls.empty());
    moved = Monitors();
    EXPECT_THAT(calls, ElementsAre("a: FAILED", "b: FAILED"));
  }
  EXPECT_EQ(calls.size(), 2u);
}

TEST(Monitors, OneThatCannotBeOpenedIsLeftOut) {
  const LogFile log;
  Monitors monitors(log.logger());
  monitors.open("a", []() -> std::unique_ptr<Monitor> { throw Error("there is no folder"); });
  EXPECT_TRUE(monitors.empty());
  EXPECT_THAT(log.text(), testing::HasSubstr("a: there is no folder; the run goes on without it"));
}

}  // namespace
}  // namespace tessera
