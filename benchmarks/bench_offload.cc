// Memory and time of training with state on disk, beside the same training in memory: one rank, the settings
// take turns, each as a process of its own, because memory that was given back may stay with a process. Peak:
// the process's largest resident set, without what it had before the model was made (libtorch's code). Losses
// are compared to the bit.
//
//   bench_offload --gpt 110m --accumulation 4 --turns 2 --directory /mnt/nvme
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "benchmarks/gpt.h"
#include "benchmarks/median.h"
#include "comm/self.h"
#include "core/error.h"
#include "core/process_memory.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/engine.h"

namespace tessera::benchmarks {
namespace {

const std::map<std::string, std::string> kSettings = {
    {"1 in memory", ""},
    {"2 optimizer on disk", "optimizer"},
    {"3 all on disk", "optimizer param"},
    {"4 in memory, blocks recomputed", "block"},
    {"5 all on disk, blocks recomputed", "optimizer param block"},
};

struct Options {
  std::string gpt = "33m", directory = ".", only;
  int64_t micro_batch = 2, sequence = 256, accumulation = 4, unit_numel = 1'000'000;
  int turns = 2, steps = 3, threads = 2, buffers = 4;
  bool without_memory = false;  ///< leaves out the setting in memory, for models that don't fit
};

GptOptions shape_of(const Options& options) {
  GptOptions shape = options.gpt == "small" ? small_gpt() : gpt_33m();
  if (options.gpt == "110m") shape = gpt_110m();
  if (options.gpt == "1.5b")
    shape.dim = 1'600, shape.layers = 48, shape.heads = 25, shape.vocabulary = 32'000;
  shape.sequence = options.sequence;
  return shape;
}

std::string config_of(const Options& options) {
  const std::string& tiers = kSettings.at(options.only);
  const auto section = [&](const char* name) {
    return tiers.find(name) == std::string::npos
               ? std::string()
               : str(R"(, "offload_)", name, R"(": {"device": "nvme", "buffer_count": )", options.buffers,
                     R"(, "nvme_path": ")", options.directory, "\"}");
  };
  return str(R"({"train_micro_batch_size_per_gpu": )", options.micro_batch,
             R"(, "gradient_accumulation_steps": )", options.accumulation,
             R"(, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},)",
             R"("activation_checkpointing": {"policy": ")",
             tiers.find("block") == std::string::npos ? "none" : "block", "\"},",
             R"("zero_optimization": {"stage": 3, "unit_numel": )", options.unit_numel, section("optimizer"),
             section("param"), "}}");
}

/// A process of one setting: prints "peak MB", "read MB", "written MB" a step, then seconds and loss of each
/// step.
void train(const Options& options) {
  at::set_num_threads(options.threads);
  at::manual_seed(1);
  const double before = peak_resident_bytes();
  const GptOptions shape = shape_of(options);
  auto engine = initialize([&] { return Gpt(shape); },
                           parse_engine_config(config_of(options), {.world_size = 1}, "the benchmark"),
                           std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1});
  zero::OffloadStore* const store = engine->sharded_model().offload_store();
  int64_t read = 0, written = 0;
  std::ostringstream steps;
  for (int step = 0; step <= options.steps; ++step) {
    if (step == 1 && store != nullptr) read = store->bytes_read(), written = store->bytes_written();
    const auto start = std::chrono::steady_clock::now();
    double loss = 0;
    for (int64_t micro_step = 0; micro_step < options.accumulation; ++micro_step) {
      const at::Tensor tokens =
          at::randint(shape.vocabulary, {options.micro_batch, shape.sequence + 1}, generator, at::kLong);
      const at::Tensor output =
          engine->forward(tokens.narrow(1, 0, shape.sequence), tokens.narrow(1, 1, shape.sequence));
      engine->backward(output);
      engine->step();
      loss += output.item<double>();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    char line[80];
    std::snprintf(line, sizeof line, "%.6f %.17g\n", seconds, loss);
    steps << line;
  }
  const double mb = 1e6 * options.steps;
  std::printf("%.1f %.1f %.1f\n%s", (peak_resident_bytes() - before) / 1e6,
              store == nullptr ? 0 : static_cast<double>(store->bytes_read() - read) / mb,
              store == nullptr ? 0 : static_cast<double>(store->bytes_written() - written) / mb,
              steps.str().c_str());
}

struct Row {
  double peak_mb = 0, read_mb = 0, written_mb = 0;
  std::vector<double> seconds, losses;
};

void run_process(const std::string& command, Row& row) {
  std::FILE* const output = ::popen(command.c_str(), "r");
  if (output == nullptr) throw Error(str("cannot run ", command));
  double peak = 0;
  std::vector<double> losses;
  bool ok = std::fscanf(output, "%lf %lf %lf", &peak, &row.read_mb, &row.written_mb) == 3;
  double seconds = 0, loss = 0;
  for (int step = 0; std::fscanf(output, "%lf %lf", &seconds, &loss) == 2; ++step) {
    if (step > 0) row.seconds.push_back(seconds);  // the first step records the order
    losses.push_back(loss);
  }
  ok &= ::pclose(output) == 0;
  if (!ok) throw Error(str("failed: ", command));
  row.peak_mb = std::max(row.peak_mb, peak);
  if (!row.losses.empty() && row.losses != losses)
    throw Error(str("losses differ between turns of: ", command));
  row.losses = losses;
}

void run_all(const Options& options, const std::string& command) {
  std::map<std::string, Row> rows;
  for (int turn = 0; turn < options.turns; ++turn)
    for (const auto& [name, tiers] : kSettings)
      if (!options.without_memory || tiers.starts_with("optimizer param"))
        run_process(str(command, " --only '", name, "'"), rows[name]);
  const Row& first = rows.begin()->second;
  std::printf("%-34s %9s %7s %8s %7s %9s %9s  %s\n", "", "step s", "x", "peak MB", "x", "read MB", "write MB",
              "losses");
  for (const auto& [name, row] : rows) {
    const double step = *std::min_element(row.seconds.begin(), row.seconds.end());
    const double base = *std::min_element(first.seconds.begin(), first.seconds.end());
    std::printf("%-34s %9.3f %7.3f %8.1f %7.3f %9.1f %9.1f  %s\n", name.c_str(), step, step / base,
                row.peak_mb, row.peak_mb / first.peak_mb, row.read_mb, row.written_mb,
                row.losses == first.losses ? "equal" : "DIFFER");
  }
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  tessera::benchmarks::Options options;
  CLI::App app("Training with state on disk beside the same training in memory");
  app.add_option("--gpt", options.gpt, "The model")->check(CLI::IsMember({"small", "33m", "110m", "1.5b"}));
  app.add_option("--directory", options.directory, "Where the file of state is");
  app.add_option("--micro-batch", options.micro_batch, "Sequences a forward")->check(CLI::PositiveNumber);
  app.add_option("--sequence", options.sequence, "Tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--accumulation", options.accumulation, "Micro-steps of a step")->check(CLI::PositiveNumber);
  app.add_option("--unit-numel", options.unit_numel, "zero_optimization.unit_numel")
      ->check(CLI::PositiveNumber);
  app.add_option("--buffers", options.buffers, "buffer_count of both sections")->check(CLI::PositiveNumber);
  app.add_option("--turns", options.turns, "Processes of each setting")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "Steps a process, after one that doesn't count")
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "Threads of libtorch")->check(CLI::PositiveNumber);
  app.add_flag("--without-memory", options.without_memory, "Leaves out the setting in memory");
  app.add_option("--only", options.only, "")->group("");  // hidden: this process trains
  CLI11_PARSE(app, argc, argv);
  std::string command;
  for (int i = 0; i < argc; ++i) command += tessera::str("'", argv[i], "' ");
  try {
    if (options.only.empty())
      tessera::benchmarks::run_all(options, command);
    else
      tessera::benchmarks::train(options);
  } catch (const std::exception& error) {
    std::cerr << "bench_offload: " << error.what() << '\n';
    return 1;
  }
}
