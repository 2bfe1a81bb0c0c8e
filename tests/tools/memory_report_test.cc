// The table and the lines of `tessera memory` for ranks on CUDA, with made-up trials: no GPU is needed.
#include "tools/memory/memory_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

namespace tessera::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Parameters of 16.0 MB in a block of 16.8 MB, and the gradient and two moments the same; 30.0 MB of
/// activations; 128 MiB reserved.
train::MemoryTrial trial(int stage, const char* device) {
  train::MemoryTrial trial;
  trial.stage = stage;
  trial.device = device;
  trial.backend = "self";
  trial.precision = "fp32";
  trial.optimizer = "AdamW";
  trial.activations = "none";
  trial.formula = {.parameters = 16'000'000, .gradients = 16'000'000, .optimizer = 32'000'000};
  const int64_t block = trial.device == "cuda" ? 16 << 20 : 16'000'000;
  trial.held[MemoryUse::kParameters] = trial.held[MemoryUse::kGradients] = block;
  trial.held[MemoryUse::kOptimizer] = 2 * block;
  trial.rounding = 4 * (block - 16'000'000);
  trial.peak = trial.held;
  trial.peak[MemoryUse::kActivations] = 30'000'000;
  trial.peak_reserved = trial.device == "cuda" ? 128 << 20 : 0;
  trial.process_peak = 200'000'000;
  trial.step_ms = 12;
  trial.phases = {{"forward", 0}, {"backward", 0.1}, {"step", 0.2}};
  trial.timeline = {{0, trial.peak}};
  return trial;
}

MemoryTrials all_stages(const char* device) {
  MemoryTrials trials;
  for (int stage = 0; stage <= 3; ++stage) trials[stage] = {trial(stage, device)};
  return trials;
}

std::string line_of(const std::string& text, const std::string& label) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(label)) return line.substr(0, 41);  // of the first stage
  return "no line " + label;
}

TEST(MemoryReport, OnCudaTheRoundingHasALineOfItsOwn) {
  const std::string table = memory_table(all_stages("cuda"), 80);
  EXPECT_EQ(line_of(table, "parameters"), "parameters                           16.8");
  EXPECT_EQ(line_of(table, "= allocator's peak"), "= allocator's peak                   97.1");
  EXPECT_EQ(line_of(table, "reserved by the allocator"), "reserved by the allocator           134.2");
  EXPECT_EQ(line_of(table, "  above its peak"), "  above its peak                     37.1");
  EXPECT_EQ(line_of(table, "model state, in blocks"), "model state, in blocks               67.1");
  EXPECT_EQ(line_of(table, "  rounded up by"), "  rounded up by                       3.1");
  EXPECT_EQ(line_of(table, "model state, measured"), "model state, measured                64.0");
  EXPECT_EQ(line_of(table, "  by formula"), "  by formula                         64.0");
  EXPECT_EQ(line_of(table, "  difference"), "  difference                       0.00 %");
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);)
    EXPECT_LE(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; }), 80) << line;
}

TEST(MemoryReport, OnTheCpuNothingIsRounded) {
  const std::string table = memory_table(all_stages("cpu"), 80);
  EXPECT_EQ(line_of(table, "model state, measured"), "model state, measured                64.0");
  EXPECT_EQ(line_of(table, "  difference"), "  difference                       0.00 %");
  for (const char* label : {"reserved", "above", "in blocks", "rounded"})
    EXPECT_THAT(table, Not(HasSubstr(label)));
}

TEST(MemoryReport, ATrialReadBackIsTheSame) {
  const nlohmann::ordered_json written = to_json(trial(2, "cuda"));
  EXPECT_EQ(to_json(train::memory_trial_of(written)), written);
  EXPECT_EQ(written.at("rounding"), 3'108'864);
}

}  // namespace
}  // namespace tessera::tools
