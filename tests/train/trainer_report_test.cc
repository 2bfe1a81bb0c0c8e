// What a Trainer prints and logs, its breakdowns, and the samples it writes.
#include "train/trainer.h"

#include <c10/core/CPUAllocator.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>

#include "comm/memory/cpu_allocator.h"
#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(TrainerTest, PlainOutputIsLines) {
  const std::string output = train(base_config(), 2).output;
  EXPECT_EQ(output.find('\r'), std::string::npos);
  EXPECT_THAT(output, AllOf(HasSubstr("blobs: 512 training and 101 test samples, 30 steps\nbatch 48 = 12 x 2 "
                                      "accumulated x 2 ranks, "),
                            HasSubstr("\nstep 4/30 | epoch 0.40 | loss "),
                            HasSubstr("\nepoch 1.00 | eval accuracy "), HasSubstr(" on 101 test samples\n"),
                            HasSubstr("30 steps (3 epochs) in "), HasSubstr("\nranks    2, ZeRO stage 2\n"),
                            HasSubstr("\nfiles    " + folder_.string() +
                                      "/{config.json, metrics.jsonl, trainer_state.json, all_results.json, "
                                      "checkpoints/, samples/}\n")));
}

TEST_F(TrainerTest, WarnsOfWhatHasNoEffectAndReportsTheRateOfAGroupWithParameters) {
  json config = base_config();
  config["profiler"] = {{"steps", 1}, {"first_step", 31}};
  config["flops_profiler"] = {{"enabled", true}, {"profile_step", 31}};
  config["trainer"]["histograms_every_steps"] = 1;
  config["optimizer"]["param_groups"] = json::parse(R"([{"match": "*", "lr": 0.25}])");
  EXPECT_THAT(train(config, 1).log,
              AllOf(HasSubstr("profiler.first_step: found 31, and the run ends after step 30: no effect"),
                    HasSubstr("flops_profiler.profile_step: found 31, and the run ends after step 30"),
                    HasSubstr("trainer.histograms_every_steps: no effect without tensorboard")));
  EXPECT_EQ(json_lines(folder_ / "metrics.jsonl")[0].at("learning_rate"), 0.25);
  config["profiler"]["first_step"] = config["flops_profiler"]["profile_step"] = 30;
  config["jsonl_monitor"] = {{"enabled", true}};
  config["profiler"]["path"] = (temporary_.path() / "trace").string();
  EXPECT_THAT(train(config, 1).log, Not(HasSubstr("no effect")));
}

TEST_F(TrainerTest, TerminalShowsABar) {
  const std::string output = train(base_config(), 2, {}, /*is_terminal=*/true).output;
  EXPECT_THAT(output,
              AllOf(HasSubstr("\rtrain: 100%|"), HasSubstr("| 30/30 ["), HasSubstr("samples/s, loss="),
                    HasSubstr("\repoch 1.00 | eval accuracy "), Not(HasSubstr("step 4/30 |"))));
}

TEST_F(TrainerTest, Fp16ShowsTheLossScaleAndBreakdownsTimeAndMemory) {
  json config = base_config();
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 10}};
  config["wall_clock_breakdown"] = config["memory_breakdown"] = true;
  const Result result = train(config, 2);
  EXPECT_THAT(result.output, AllOf(HasSubstr("| loss scale 1024 |"), HasSubstr("\n  time (ms) | data "),
                                   HasSubstr("\n  memory at the peak (MB) | parameters ")));
  EXPECT_GT(result.summary.evaluation->metrics[0].second, 0.9);
  const json record = json_lines(folder_ / "metrics.jsonl")[0];
  EXPECT_EQ(record.at("loss_scale"), 1024);
  for (const char* phase : {"data_ms", "forward_ms", "backward_ms", "step_ms"})
    EXPECT_GT(record.at(phase), 0) << phase;
  const json& bytes = record.at("memory_peak_bytes");
  // AdamW: two states a parameter, and the gradient's shard in fp32 is as large as one of them.
  EXPECT_GT(bytes.at("gradients"), 0);
  EXPECT_EQ(bytes.at("optimizer"), 2 * bytes.at("gradients").get<int64_t>());
  EXPECT_GT(bytes.at("activations"), 0);
  int64_t sum = 0;
  for (const auto& [use, value] : bytes.items())
    if (use != "total") sum += value.get<int64_t>();
  EXPECT_EQ(bytes.at("total"), sum);
}

/// Whether failed allocations are noted: libtorch's own allocator, which a build with a sanitizer has, does
/// not.
bool failures_are_noted() {
  comm::install_cpu_allocator();
  return c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator();
}

TEST_F(TrainerTest, OutOfMemoryErrorSaysWhatWasInUseAndWhatToChange) {
  for (const bool breakdown : {false, true}) {
    json config = base_config();
    config["memory_breakdown"] = breakdown;
    std::string error;
    try {
      train(config, 2, {.greedy_from_step = 5});
    } catch (const Error& caught) {
      error = caught.what();
    }
    EXPECT_THAT(error, AllOf(HasSubstr("out of memory in step "), Not(HasSubstr("\n"))));
    EXPECT_THAT(error, HasSubstr(breakdown ? "; in use then (MB): parameters 0.0 | "
                                           : "; memory_breakdown: true shows what memory was used for; "));
    if (breakdown) {
      EXPECT_THAT(error, HasSubstr("activations and temporaries 3.0 | "))
          << "at the time of the error, not afterwards";
    }
    if (failures_are_noted()) {
      EXPECT_THAT(error,
                  AllOf(ContainsRegex(": 1125899906.8 MB were asked for, for activations and temporaries, "
                                      "with [0-9.]+ MB free; "),
                        ContainsRegex("; neither a stage, more ranks, offloading nor a smaller batch alone "
                                      "frees the [0-9.]+ MB that were missing$")));
    } else {
      EXPECT_THAT(error, HasSubstr("; what may help: a higher zero_optimization.stage (now 2), or a smaller "
                                   "train_micro_batch_size_per_gpu (now 12)"));
    }
  }
}

/// Leaves this process `bytes` of address space, and no freed blocks.
void limit_memory(int64_t bytes) {
  comm::cpu_allocator_step();
  comm::cpu_allocator_step();  // what was used before no longer counts
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto limit = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + bytes);
  const rlimit both{limit, limit};
  ::setrlimit(RLIMIT_AS, &both);
}

// At stage 3 the first unit that is gathered has 8 MB, and 6 MiB are left.
TEST_F(TrainerTest, OutOfMemoryErrorNamesTheUnitAndWhatWouldFit) {
  if (!failures_are_noted()) GTEST_SKIP() << "not with a sanitizer";
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto train_with_little = [&] {
    json config = base_config(/*stage=*/3);
    config["train_batch_size"] = 2;
    config["gradient_accumulation_steps"] = 1;
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0;
    config["zero_optimization"]["unit_numel"] = 1'000'000;
    TrainerStart start;
    start.stop = [] { return limit_memory(6 << 20), false; };
    try {
      train(config, 1, {.hidden = 1'000'000}, false, start);
    } catch (const Error& error) {
      std::cerr << error.what() << "\n";
      std::_Exit(0);
    }
    std::_Exit(1);
  };
  EXPECT_EXIT(train_with_little(), ::testing::ExitedWithCode(0),
              "out of memory in step 1 on rank 0: 8.0 MB were asked for, for communication buffers of unit 0 "
              "\\(first.weight\\), with [0-7]\\.[0-9] MB free; .*"
              "; to free the [0-9.]+ MB that were missing: 2 ranks \\(model state of a rank [0-9.]+ MB, "
              "now [0-9.]+ MB\\)");
}

TEST_F(TrainerTest, FailuresToWriteTheStateAndSamplesAreWarnings) {
  const fs::path state = folder_ / "trainer_state.json";
  TrainerStart start;
  start.stop = [&] { return fs::create_directories(state / "in the way"), false; };
  const Result result =
      train(base_config(), 2, {.samples_error = "samples/10.png: the disk is full"}, false, start);
  EXPECT_THAT(result.log, AllOf(HasSubstr(state.string()), HasSubstr("samples/10.png: the disk is full")));
  EXPECT_EQ(result.summary.num_steps, 30);
  EXPECT_TRUE(fs::exists(folder_ / "all_results.json"));
}

TEST_F(TrainerTest, SamplesAreWrittenAtEachEvaluation) {
  train(base_config(), 2);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_ / "samples"))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"step_00000010.txt", "step_00000020.txt", "step_00000030.txt"}));
  std::ofstream(folder_ / "samples" / "step_by_step.txt") << "a file of the user's";
  json shorter = base_config();
  shorter["trainer"]["epochs"] = 1;
  train(shorter, 2);
  EXPECT_TRUE(fs::exists(folder_ / "samples" / "step_by_step.txt"));
  EXPECT_FALSE(fs::exists(folder_ / "samples" / "step_00000030.txt")) << "written by the earlier run";
  EXPECT_TRUE(fs::exists(folder_ / "samples" / "step_00000010.txt"));
}

}  // namespace
}  // namespace tessera::train
