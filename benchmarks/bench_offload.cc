// Memory and time of training with state on disk, beside the same training in memory: one rank, the settings
// take turns, each as a process of its own, because memory that was given back may stay with a process. Peak:
// the process's largest resident set, without what it had before the model was made (libtorch's code). Losses
// are compared to the bit.
//
//   bench_offload --gpt 110m --accumulation 4 --turns 2 --directory /mnt/nvme
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <ranges>
#include <sstream>
#include <string>
#include <vector>

#include "activations/chunked_loss.h"
#include "benchmarks/gpt.h"
#include "benchmarks/median.h"
#include "comm/init/self.h"
#include "core/async_io/spill_file.h"
#include "core/error.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/engine.h"

namespace tessera::benchmarks {
namespace {

const std::map<std::string, std::string> kSettings = {
    {"1 in memory", ""},
    {"2 optimizer on disk", "optimizer"},
    {"3 all on disk", "optimizer param"},
    {"4 in memory, cheap recomputed", "cheap"},
    {"5 all on disk, cheap recomputed", "optimizer param cheap"},
    {"6 in memory, blocks recomputed", "block"},
    {"7 all on disk, blocks recomputed", "optimizer param block"},
    {"8 in memory, libtorch allocator", "libtorch"},  // without comm/memory/cpu_allocator.h
    {"9 the same, cheap recomputed", "libtorch cheap"},
    {"B all on disk, recomputed by budget", "optimizer param budget"},
    {"C all on disk, activations too", "optimizer param offload"},
    {"D all on disk, budget with the disk", "optimizer param budget activations"},
};

/// Steps that learn what the next ones do: the order of units, and that of reads.
constexpr int kWarmUp = 2;

struct Options {
  std::string gpt = "33m", directory = ".", settings = "123456789BCD", only;
  int64_t micro_batch = 2, sequence = 256, accumulation = 4, unit_numel = 1'000'000, chunk_rows = 0;
  int turns = 2, steps = 3, threads = 2, buffers = 4, budget_mb = 100;
};

GptOptions shape_of(const Options& options) {
  GptOptions shape = options.gpt == "small" ? small_gpt() : gpt_33m();
  if (options.gpt == "110m") shape = gpt_110m();
  if (options.gpt == "1.5b")
    shape.dim = 1'600, shape.layers = 48, shape.heads = 25, shape.vocabulary = 32'000;
  if (options.chunk_rows > 0)
    shape.loss = [rows = options.chunk_rows](const at::Tensor& hidden, const at::Tensor& weight,
                                             const at::Tensor& target) {
      return chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = rows});
    };
  shape.sequence = options.sequence;
  return shape;
}

std::string config_of(const Options& options) {
  const std::string& tiers = kSettings.at(options.only);
  const auto has = [&](const char* word) { return tiers.find(word) != std::string::npos; };
  const auto section = [&](const char* name) {
    return !has(name) ? std::string()
                      : str(R"(, "offload_)", name, R"(": {"device": "nvme", "buffer_count": )",
                            options.buffers, R"(, "nvme_path": ")", options.directory, "\"}");
  };
  return str(R"({"train_micro_batch_size_per_gpu": )", options.micro_batch,
             R"(, "gradient_accumulation_steps": )", options.accumulation,
             R"(, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},)",
             R"("activation_checkpointing": {"policy": ")",
             has("block")     ? "block"
             : has("cheap")   ? "cheap"
             : has("budget")  ? "budget"
             : has("offload") ? "offload"
                              : "none",
             R"(", "budget_bytes": )", int64_t{1'000'000} * options.budget_mb,
             has("offload") || has("activations") ? str(R"(, "nvme_path": ")", options.directory, "\"") : "",
             "},", R"("zero_optimization": {"stage": 3, "unit_numel": )", options.unit_numel,
             section("optimizer"), section("param"), "}}");
}

/// Seconds that the disk alone takes for what a step reads and writes, both at once in transfers of 16 MB.
double disk_alone(const std::string& directory, int64_t read, int64_t written) {
  constexpr int64_t kTransfer = 16 << 20;
  const auto num = [](int64_t bytes) { return (bytes + kTransfer - 1) / kTransfer; };
  const int64_t total = num(read) + num(written);
  constexpr int64_t kUnderWay = 8;
  SpillFile file({.directory = directory, .bytes = 2 * kUnderWay * kTransfer, .purpose = "the benchmark"});
  std::vector<std::byte> memory(kUnderWay * kTransfer + SpillFile::kAlignment);
  std::byte* const start = memory.data() + SpillFile::kAlignment -
                           reinterpret_cast<uintptr_t>(memory.data()) % SpillFile::kAlignment;
  std::vector<SpillFile::Transfer> slots(kUnderWay, 0);
  const auto clock = std::chrono::steady_clock::now;
  auto began = clock();
  for (int64_t i = -2 * kUnderWay; i < total; ++i) {  // the first ones write what is read later
    if (i == 0) began = clock();
    const int64_t slot = (i + 2 * kUnderWay) % kUnderWay;
    file.wait(slots[slot]);
    const std::span<std::byte> bytes(start + slot * kTransfer, kTransfer);
    const int64_t place = (i + 2 * kUnderWay) % (2 * kUnderWay) * kTransfer;
    // Spread evenly: as many reads among the first i as among all.
    const bool reads = i >= 0 && (i + 1) * num(read) / total > i * num(read) / total;
    slots[slot] = reads ? file.read(place, bytes) : file.write(place, bytes);
  }
  for (const SpillFile::Transfer slot : slots) file.wait(slot);
  return std::chrono::duration<double>(clock() - began).count();
}

/// A process of one setting: prints peak MB; MB read, MB written and seconds waited a step; the seconds that
/// the disk alone takes for that; then seconds and loss of each step.
void train(const Options& options) {
  if (kSettings.at(options.only).starts_with("libtorch"))
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/100);
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
  double waited = 0;
  std::ostringstream steps;
  for (int step = 0; step < options.steps + kWarmUp; ++step) {
    if (step == kWarmUp && store != nullptr) {
      read = store->bytes_read(), written = store->bytes_written();
      waited = store->seconds_waited();
    }
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
  const double peak = peak_resident_bytes() - before;
  double alone = 0;
  if (store != nullptr) {
    read = (store->bytes_read() - read) / options.steps;
    written = (store->bytes_written() - written) / options.steps;
    waited = (store->seconds_waited() - waited) / options.steps;
    alone = disk_alone(options.directory, read, written);
  }
  std::printf("%.1f %.1f %.1f %.3f %.3f\n%s", peak / 1e6, static_cast<double>(read) / 1e6,
              static_cast<double>(written) / 1e6, waited, alone, steps.str().c_str());
}

struct Row {
  double peak_mb = 0, read_mb = 0, written_mb = 0, waited = 0, disk_alone = 0;
  std::vector<double> seconds, losses;
};

void run_process(const std::string& command, Row& row) {
  std::FILE* const output = ::popen(command.c_str(), "r");
  if (output == nullptr) throw Error("cannot run ", command);
  double peak = 0;
  std::vector<double> losses;
  bool ok = std::fscanf(output, "%lf %lf %lf %lf %lf", &peak, &row.read_mb, &row.written_mb, &row.waited,
                        &row.disk_alone) == 5;
  double seconds = 0, loss = 0;
  for (int step = 0; std::fscanf(output, "%lf %lf", &seconds, &loss) == 2; ++step) {
    if (step >= kWarmUp) row.seconds.push_back(seconds);
    losses.push_back(loss);
  }
  ok &= ::pclose(output) == 0;
  if (!ok) throw Error("failed: ", command);
  row.peak_mb = std::max(row.peak_mb, peak);
  if (!row.losses.empty() && row.losses != losses) throw Error("losses differ between turns of: ", command);
  row.losses = losses;
}

void run_all(const Options& options, const std::string& command) {
  std::map<std::string, Row> rows;
  for (int turn = 0; turn < options.turns; ++turn)
    for (const auto& name : std::views::keys(kSettings))
      if (options.settings.find(name.front()) != std::string::npos)
        run_process(str(command, " --only '", name, "'"), rows[name]);
  const Row& first = rows.begin()->second;
  std::printf("%-36s %7s %6s %8s %6s %8s %8s %7s %7s  %s\n", "", "step s", "x", "peak MB", "x", "read MB",
              "write MB", "waits s", "disk s", "losses");
  for (const auto& [name, row] : rows) {
    const double step = *std::min_element(row.seconds.begin(), row.seconds.end());
    const double base = *std::min_element(first.seconds.begin(), first.seconds.end());
    std::printf("%-36s %7.3f %6.3f %8.1f %6.3f %8.1f %8.1f %7.3f %7.3f  %s\n", name.c_str(), step,
                step / base, row.peak_mb, row.peak_mb / first.peak_mb, row.read_mb, row.written_mb,
                row.waited, row.disk_alone, row.losses == first.losses ? "equal" : "DIFFER");
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
  app.add_option("--budget", options.budget_mb, "activation_checkpointing.budget_bytes, in MB")
      ->check(CLI::PositiveNumber);
  app.add_option("--chunk-rows", options.chunk_rows, "The loss in chunks of this many tokens; 0: at once");
  app.add_option("--turns", options.turns, "Processes of each setting")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "Steps a process, after two that don't count")
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "Threads of libtorch")->check(CLI::PositiveNumber);
  app.add_option("--settings", options.settings, "Which, by their numbers: 35 for the third and the fifth");
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
