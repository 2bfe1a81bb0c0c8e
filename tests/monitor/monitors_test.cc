// Parts of monitors that the tests with other programs do not reach: several monitors at once, dropped
// monitors, and encodings.
#include "monitor/monitors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/str.h"
#include "monitor/event_file.h"
#include "monitor/mlflow/http_client.h"
#include "monitor/mlflow/mlflow_client.h"
#include "tests/support/log_file.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::Pair;
using namespace std::string_view_literals;

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

// RFC 3720, B.4; the mask is TFRecord's.
TEST(EventFile, Crc32cOfKnownData) {
  const auto unmasked = [](const std::string& data) {
    const uint32_t rotated = masked_crc32c(data) - 0xa282ead8u;
    return (rotated >> 17) | (rotated << 15);
  };
  EXPECT_EQ(unmasked("123456789"), 0xe3069283u);
  EXPECT_EQ(unmasked(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(unmasked(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(unmasked(""), 0u);
}

TEST(EventFile, ProtocolBuffers) {
  const std::string data =
      ProtoMessage().integer(1, 150).bytes(2, "testing").real32(3, 1.0f).integer(16, -1).data();
  constexpr std::string_view kExpected =
      "\x08\x96\x01\x12\x07testing\x1d\x00\x00\x80\x3f\x80\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"sv;
  EXPECT_EQ(data, kExpected);
}

TEST(Mlflow, ParametersAreFlattened) {
  const auto params = nlohmann::ordered_json::parse(
      R"({"a": {"b": {"c": 1e-3}, "d": null}, "e": [1, "x"], "f": [{"g": true}, {"g": "text"}], "h*[0]": "", "empty": {}})");
  EXPECT_THAT(flattened(params),
              ElementsAre(Pair("a.b.c", "0.001"), Pair("a.d", "null"), Pair("e", "[1,\"x\"]"),
                          Pair("f.0.g", "true"), Pair("f.1.g", "text"), Pair("h__0_", "")));
}

TEST(Mlflow, LongParametersAreCut) {
  std::string text;
  for (int i = 0; i < 7000; ++i) text += "ü";
  const MlflowParams params = flattened({{std::string(300, 'k'), text}});
  EXPECT_EQ(params.at(0).first.size(), kMlflowNameLength);
  EXPECT_EQ(params.at(0).second, text.substr(0, 2 * kMlflowParamLength));
}

TEST(Mlflow, UrlsAreEncoded) {
  EXPECT_EQ(url_encoded(std::string("a b/ü&?\0~", 10)), "a%20b%2F%C3%BC%26%3F%00~");
}

}  // namespace
}  // namespace tessera
