// A record that is made up, as a timeline, as what a page needs of it, and as a trace.
#include "train/memory/memory_timeline.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "train/memory_page.h"

namespace tessera::train {
namespace {

using nlohmann::ordered_json;

/// 100 bytes of parameters all the time; 30 of a gather, 40 of an activation that has begun when 7 of a
/// workspace are freed; the peak is 170.
MemoryRecord record() {
  MemoryRecord record;
  record.seconds = 10e-6;
  record.names = {"unit 0 (a.weight … b.bias)", "a", "aten::linear", "<b>"};
  record.blocks = {
      {.bytes = 100, .use = MemoryUse::kParameters, .unit = 0},
      {.bytes = 7,
       .use = MemoryUse::kActivations,
       .begin_s = 1e-6,
       .end_s = 2e-6,
       .module = 1,
       .op = 2,
       .in_call = true},
      {.bytes = 30, .use = MemoryUse::kCommunication, .begin_s = 2e-6, .unit = 0},
      {.bytes = 40, .use = MemoryUse::kActivations, .begin_s = 3e-6, .end_s = 9e-6, .module = 3, .op = 2},
  };
  record.changes = {{1e-6, 1, true}, {2e-6, 1, false}, {2e-6, 2, true}, {3e-6, 3, true}, {9e-6, 3, false}};
  return record;
}

const Phases kPhases = {{"forward", 1e-6}, {"backward", 4e-6}};

TEST(MemoryTimeline, SaysWhatIsAliveAtThePeak) {
  const ordered_json json = timeline_json(record(), kPhases);
  EXPECT_EQ(json.at("nanoseconds"), 10'000);
  EXPECT_EQ(json.at("phases"), ordered_json::parse(R"([["forward", 1000], ["backward", 4000]])"));
  const ordered_json& peak = json.at("peak");
  EXPECT_EQ(peak.at("total"), 170);
  EXPECT_EQ(peak.at("nanoseconds"), 3000);
  EXPECT_EQ(peak.at("alive"), ordered_json::parse("[0, 2, 3]"));
  EXPECT_EQ(peak.at("by_category").at("gathered"), 30) << "a communication buffer of a unit";
  EXPECT_EQ(peak.at("by_category").at("activations"), 40);
  EXPECT_EQ(peak.at("by_category").at("workspace"), 0);
  EXPECT_EQ(json.at("blocks")[1], ordered_json::parse("[1000, 2000, 7, 9, -1, 1, 2]"));
  const MemoryBytes by_use = peak_by_use(json);
  EXPECT_EQ(by_use.total(), 170);
  EXPECT_EQ(by_use[MemoryUse::kCommunication], 30);
}

TEST(MemoryTimeline, HasTheSamplesOfTheMeter) {
  const std::vector<MemorySample> samples = record().samples();
  ASSERT_EQ(samples.size(), 6u);
  std::vector<int64_t> totals;
  for (const MemorySample& sample : samples) totals.push_back(sample.bytes.total());
  EXPECT_EQ(totals, (std::vector<int64_t>{100, 107, 100, 130, 170, 130}));
}

TEST(MemoryTimeline, OfAPageHasThePeakAmongItsColumnsAndTheLargestBlocks) {
  MemoryRecord many = record();
  for (int i = 0; i < 5000; ++i)  // small ones, one after the other
    many.blocks.push_back(
        {.bytes = 1, .use = MemoryUse::kOther, .begin_s = 4e-6 + i * 1e-10, .end_s = 4e-6 + (i + 1) * 1e-10});
  const ordered_json page = timeline_for_page(timeline_json(many, kPhases));
  EXPECT_LE(page.at("columns").size(), static_cast<size_t>(kMaxColumns));
  EXPECT_EQ(page.at("blocks").size(), kMaxBlocks);
  EXPECT_EQ(page.at("num_blocks"), 5004);
  int64_t most = 0;
  for (const ordered_json& column : page.at("columns")) {
    int64_t sum = 0;
    for (size_t i = 1; i < column.size(); ++i) sum += column[i].get<int64_t>();
    most = std::max(most, sum);
  }
  EXPECT_EQ(most, page.at("peak").at("total"));
  EXPECT_EQ(page.at("peak").at("units")[0][0], "unit 0 (a.weight … b.bias)");
  EXPECT_EQ(page.at("peak").at("modules")[0][0], "<b>");
}

TEST(MemoryTrace, HasACounterPhasesAndBlocks) {
  const ordered_json trace =
      ordered_json::parse(memory_trace({{"stage 2", timeline_json(record(), kPhases)}}));
  int64_t most = 0, blocks = 0;
  for (const ordered_json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "b") ++blocks;
    if (event.at("ph") == "X" && event.at("name") == "backward") {
      EXPECT_EQ(event.at("dur"), 6.0);
    }
    if (event.at("ph") != "C") continue;
    int64_t sum = 0;
    for (const auto& [category, bytes] : event.at("args").items()) sum += bytes.get<int64_t>();
    most = std::max(most, sum);
  }
  EXPECT_EQ(most, 170);
  EXPECT_EQ(blocks, 4);
}

TEST(MemoryPage, HasNoTagOfItsDataInIt) {
  MeasuredRun run{.label = "stage </script>", .trial = {}, .timeline = timeline_json(record(), kPhases)};
  run.trial.peak = peak_by_use(run.timeline);
  const std::string html = memory_page_html({.runs = {run}, .model = {.num_trainable = 10}});
  EXPECT_EQ(html.find("stage </script>"), std::string::npos);
  EXPECT_NE(html.find("stage \\u003c/script>"), std::string::npos);
  EXPECT_EQ(html.find("@DATA@"), std::string::npos);
}

}  // namespace
}  // namespace tessera::train
