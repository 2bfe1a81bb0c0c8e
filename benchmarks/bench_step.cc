// The time of a training step at every stage, on ranks that are processes of one thread each, against the
// same number of plain libtorch loops that train side by side and never communicate. All ways take turns in
// random order. Ends with a table: times, ratios, and the memory of a rank.
//
//   bench_step --gpt 33m --turns 10
//   bench_step --set zero_optimization.overlap_comm=false --benchmark_filter=stage_3
#include <benchmark/benchmark.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>

#include "benchmarks/rank.h"
#include "benchmarks/team.h"
#include "core/error.h"

namespace tessera::benchmarks {
namespace {

struct Options {
  std::string gpt = "small";
  std::map<std::string, int64_t> shape;  ///< what differs from the named one
  std::vector<std::string> overrides;
  int64_t micro_batch = 2;
  int num_ranks = 2;
  int num_turns = 10;
  int num_steps = 5;
  std::string rank_of;  ///< this process is a rank
};

void add_options(CLI::App& app, Options& options) {
  app.add_option("--gpt", options.gpt, "The model: small (5.3 million parameters) or 33m")
      ->check(CLI::IsMember({"small", "33m"}));
  for (const char* size : {"dim", "layers", "heads", "vocabulary", "sequence"})
    app.add_option("--" + std::string(size), options.shape[size], "In place of the model's own")
        ->check(CLI::PositiveNumber);
  app.add_option("--micro-batch", options.micro_batch, "Sequences a rank and step")
      ->check(CLI::PositiveNumber);
  app.add_option("--set", options.overrides, "PATH=VALUE, overrides a key of the engine's configuration");
  app.add_option("--ranks", options.num_ranks, "Processes")->check(CLI::Range(2, 64));
  app.add_option("--turns", options.num_turns, "Turns of each way of training")->check(CLI::Range(2, 10'000));
  app.add_option("--steps", options.num_steps, "Steps a turn, after one that doesn't count")
      ->check(CLI::PositiveNumber);
  app.add_option("--rank-of", options.rank_of, "")->group("");  // hidden
}

Task task_of(const Options& options) {
  Task task;
  task.shape = options.gpt == "33m" ? gpt_33m() : small_gpt();
  const auto take = [&](const char* name, int64_t& size) {
    if (const int64_t given = options.shape.at(name); given > 0) size = given;
  };
  take("dim", task.shape.dim);
  take("layers", task.shape.layers);
  take("heads", task.shape.heads);
  take("vocabulary", task.shape.vocabulary);
  take("sequence", task.shape.sequence);
  if (task.shape.dim % task.shape.heads != 0) throw Error("--dim must be a multiple of --heads");
  task.micro_batch = options.micro_batch;
  // With the engine's default unit size the small model would be one or two units, and nothing would overlap.
  if (options.gpt == "small") task.overrides.push_back("zero_optimization.unit_numel=500000");
  task.overrides.insert(task.overrides.end(), options.overrides.begin(), options.overrides.end());
  return task;
}

/// One way of training: its team, started when first needed, and all its times.
class Contestant {
 public:
  Contestant(Mode mode, const Options& options, std::vector<std::string> rank_args)
      : mode_(mode), options_(options), rank_args_(std::move(rank_args)) {}

  void measure(benchmark::State& state) {
    if (!team_) team_ = std::make_unique<Team>(mode_, options_.num_ranks, rank_args_);
    const std::vector<StepTimes> turn = team_->turn(options_.num_steps);
    size_t step = 0;
    for (auto _ : state) state.SetIterationTime(turn[step++].step_s);
    steps_.insert(steps_.end(), turn.begin(), turn.end());
  }

  Mode mode() const { return mode_; }
  bool measured() const { return !steps_.empty(); }
  Footprint footprint() { return team_->footprint(); }

  /// Over all steps, in milliseconds.
  double median_ms(double StepTimes::* phase) const {
    const std::vector<double> sorted = sorted_ms(phase);
    const size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  double min_ms() const { return sorted_ms(&StepTimes::step_s).front(); }

 private:
  std::vector<double> sorted_ms(double StepTimes::* phase) const {
    std::vector<double> values;
    for (const StepTimes& step : steps_) values.push_back(1e3 * (step.*phase));
    std::sort(values.begin(), values.end());
    return values;
  }

  Mode mode_;
  Options options_;
  std::vector<std::string> rank_args_;
  std::unique_ptr<Team> team_;
  std::vector<StepTimes> steps_;
};

double minimum(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

void register_benchmark(Contestant& contestant, const Options& options) {
  benchmark::RegisterBenchmark(name_of(contestant.mode()).c_str(),
                               [&](benchmark::State& state) { contestant.measure(state); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(options.num_steps)
      ->Repetitions(options.num_turns)
      ->ComputeStatistics("min", minimum)
      ->ReportAggregatesOnly(true);
}

void print_table(std::vector<Contestant>& contestants) {
  const Contestant& plain = contestants.front();
  std::printf(
      "\nmilliseconds, medians over all steps of the slowest rank; CPU: used by all its threads; MB (1e6 "
      "bytes) of the largest rank\n");
  std::printf("%-13s %8s %8s %8s %9s %8s %8s %9s %8s %9s %9s\n", "", "step", "min", "x plain", "forward",
              "backward", "update", "CPU", "x plain", "state MB", "peak MB");
  for (Contestant& contestant : contestants) {
    if (!contestant.measured()) continue;
    const auto ratio = [&](double StepTimes::* phase) {
      return plain.measured() ? contestant.median_ms(phase) / plain.median_ms(phase) : std::nan("");
    };
    const Footprint footprint = contestant.footprint();
    std::printf("%-13s %8.1f %8.1f %8.3f %9.1f %8.1f %8.1f %9.1f %8.3f %9.1f %9.1f\n",
                name_of(contestant.mode()).c_str(), contestant.median_ms(&StepTimes::step_s),
                contestant.min_ms(), ratio(&StepTimes::step_s), contestant.median_ms(&StepTimes::forward_s),
                contestant.median_ms(&StepTimes::backward_s), contestant.median_ms(&StepTimes::update_s),
                contestant.median_ms(&StepTimes::cpu_s), ratio(&StepTimes::cpu_s), footprint.state_mb,
                footprint.peak_mb);
  }
}

int run_ranks(const Options& options) {
  for (const Mode mode : kAllModes) {
    if (name_of(mode) != options.rank_of) continue;
    Task task = task_of(options);
    task.mode = mode;
    serve(task);
    return 0;
  }
  throw Error("--rank-of: no such way of training: " + options.rank_of);
}

int run(int argc, char** argv) {
  // Google Benchmark's random interleaving mixes the repetitions of all benchmarks. It is given first, so
  // that the user can turn it off.
  std::vector<std::string> words(argv, argv + argc);
  words.insert(words.begin() + 1, "--benchmark_enable_random_interleaving=true");
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  int num_words = static_cast<int>(pointers.size());
  benchmark::Initialize(&num_words, pointers.data());

  CLI::App app(
      "Step time at every stage against plain libtorch; --benchmark_* options are Google Benchmark's");
  Options options;
  add_options(app, options);
  try {
    app.parse(num_words, pointers.data());
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  if (!options.rank_of.empty()) return run_ranks(options);
  task_of(options);  // errors in the options are reported here, and not by every rank

  ::signal(SIGPIPE, SIG_IGN);  // so that a rank that has died is an error
  const std::vector<std::string> rank_args(pointers.begin() + 1, pointers.begin() + num_words);
  std::vector<Contestant> contestants;
  for (const Mode mode : kAllModes) contestants.emplace_back(mode, options, rank_args);
  for (Contestant& contestant : contestants) register_benchmark(contestant, options);
  benchmark::RunSpecifiedBenchmarks();
  print_table(contestants);
  return 0;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  try {
    return tessera::benchmarks::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "bench_step: " << error.what() << '\n';
    return 1;
  }
}
