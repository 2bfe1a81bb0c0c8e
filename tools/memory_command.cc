#include "tools/memory_command.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "comm/self.h"
#include "core/disk.h"
#include "core/environment.h"
#include "core/error.h"
#include "core/log.h"
#include "core/str.h"
#include "core/temporary_folder.h"
#include "engine/optimizer_setup.h"
#include "launcher/environment.h"
#include "tools/columns.h"
#include "tools/command_line.h"
#include "tools/launch_command.h"
#include "tools/memory_report.h"
#include "tools/tasks.h"
#include "train/memory_trial.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

struct MemoryFlags {
  std::string config;
  std::vector<std::string> overrides;
  std::string stages = "0,1,2,3";
  int num_steps = 5;
  std::string out;
  int simulate_world = 0;
  int rank = 0;
  LaunchFlags launch;

  bool estimate = false;
  std::string params;
  int world = 0;
  std::string optimizer;  // empty: AdamW
  std::string precision;  // empty: bf16
  std::string fit;

  // From the command to its ranks.
  int trial_stage = -1;
  std::string trial_folder;
};

// ------------------------------------------------------------------------------------------ measuring

std::vector<int> parse_stages(const std::string& text) {
  std::vector<int> stages;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    if (word.size() != 1 || word[0] < '0' || word[0] > '3')
      throw ConfigError(
          str("--stages ", text.empty() ? "''" : text, ": expected stages from 0 to 3, such as 0,1,2,3"));
    stages.push_back(word[0] - '0');
  }
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  if (stages.empty()) throw ConfigError("--stages '': expected stages from 0 to 3, such as 0,1,2,3");
  return stages;
}

train::RunConfig run_config(const MemoryFlags& flags, int world_size, int stage) {
  std::vector<std::string> overrides = flags.overrides;
  overrides.push_back(str("zero_optimization.stage=", stage));
  return train::load_run_config(flags.config, world_size, overrides);
}

/// What a rank does: one stage.
int run_trial(const MemoryFlags& flags, const Logger& log) {
  const comm::Environment environment = comm::environment();
  const int world_size = flags.simulate_world > 0 ? flags.simulate_world : environment.world_size;
  const train::MemoryTrial trial = train::run_memory_trial(
      run_config(flags, world_size, flags.trial_stage), tasks(), environment,
      {.num_steps = flags.num_steps, .simulate_world = flags.simulate_world, .simulate_rank = flags.rank},
      log);
  replace_file(fs::path(flags.trial_folder) / str("stage", trial.stage, "_rank", trial.rank, ".json"),
               to_json(trial).dump());
  return 0;
}

train::MemoryTrial read_trial(const fs::path& path) {
  std::ifstream file(path);
  return train::memory_trial_of(nlohmann::json::parse(file));
}

int measure(const MemoryFlags& flags, const std::vector<std::string>& args, const Logger& log) {
  if (flags.config.empty())
    throw ConfigError("memory: expected CONFIG, the name of a JSON file, or --estimate");
  if (in_group())
    throw ConfigError("memory: starts ranks of its own; expected to be run without a launcher, with --nproc");
  if (!flags.params.empty() || !flags.fit.empty() || flags.world > 0)
    throw ConfigError("--params, --world and --fit are for --estimate; expected that too");
  if (flags.simulate_world == 0 && flags.rank > 0)
    throw ConfigError("--rank is for --simulate-world; expected that too");
  if (flags.simulate_world > 0 && flags.launch.nproc)
    throw ConfigError("--simulate-world is about one process alone; leave --nproc out");
  if (flags.simulate_world > 0 && flags.rank >= flags.simulate_world)
    throw ConfigError(str("--rank ", flags.rank, ": expected 0 to ", flags.simulate_world - 1,
                          ", the ranks of --simulate-world"));
  const std::vector<int> stages = parse_stages(flags.stages);
  LaunchFlags launch = flags.launch;
  launch.nproc = launch.nproc.value_or(1);
  launcher::should_start_ranks(launch.nproc);  // throws for numbers out of range
  const int world_size = flags.simulate_world > 0 ? flags.simulate_world : *launch.nproc;
  for (const int stage : stages)
    run_config(flags, world_size, stage);  // mistakes are one line here, not one from every rank
  if (!flags.out.empty()) {
    std::error_code error;
    fs::create_directories(flags.out, error);
    if (error) throw ConfigError(str("--out ", flags.out, ": cannot be made: ", error.message()));
  }

  const TemporaryFolder folder("tessera_memory");
  MemoryTrials trials;
  for (const int stage : stages) {
    if (::isatty(STDERR_FILENO) != 0) std::cerr << "\rstage " << stage << " ..." << std::flush;
    std::vector<std::string> rank_args = args;
    for (const std::string& word : {std::string("--trial-stage"), std::to_string(stage),
                                    std::string("--trial-folder"), folder.path().string()})
      rank_args.push_back(word);
    const int code = run_ranks_of_self(launch, rank_args, log);
    if (::isatty(STDERR_FILENO) != 0) std::cerr << "\r            \r" << std::flush;
    if (code != 0) return code;
    if (flags.simulate_world > 0) {
      trials[stage].push_back(read_trial(folder.path() / str("stage", stage, "_rank", flags.rank, ".json")));
    } else {
      for (int rank = 0; rank < *launch.nproc; ++rank)
        trials[stage].push_back(read_trial(folder.path() / str("stage", stage, "_rank", rank, ".json")));
    }
  }
  std::cout << memory_table(trials);
  if (!flags.out.empty()) {
    const fs::path out = flags.out;
    replace_file(out / "memory.json", memory_json(trials).dump(1) + "\n");
    replace_file(out / "memory.csv", memory_csv(trials));
    replace_file(out / "memory.svg", memory_chart(trials));
    std::cout << "\nwritten: memory.json, memory.csv and memory.svg (the chart) in " << out.string() << '\n';
  }
  return 0;
}

// ----------------------------------------------------------------------------------------- estimating

int64_t parse_count(const std::string& text) {
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  double factor = 1;
  const std::string rest(stop, text.data() + text.size());
  if (rest == "K" || rest == "k")
    factor = 1e3;
  else if (rest == "M" || rest == "m")
    factor = 1e6;
  else if (rest == "B" || rest == "b" || rest == "G")
    factor = 1e9;
  else if (!rest.empty())
    factor = 0;
  if (error != std::errc() || !(value * factor >= 1 && value * factor <= 1e15))
    throw ConfigError(str("--params ", text.empty() ? "''" : text,
                          ": expected a number of parameters, such as 7.5e9, 7.5B or 350M"));
  return static_cast<int64_t>(value * factor);
}

DType parse_precision(const std::string& word) {
  const auto dtype = parse_dtype(word);
  if (!dtype || *dtype == DType::kFloat64)
    throw ConfigError(str("--precision ", word.empty() ? "''" : word, ": expected fp32, bf16 or fp16"));
  return *dtype;
}

/// fp32 state tensors an element.
int num_states_of(const OptimizerConfig& config) {
  const OptimizerSetup setup = set_up_optimizer(config);
  return static_cast<int>(kernels::state_names(setup.kind, setup.groups.front()).size());
}

int num_states_of(const std::string& type) {
  const auto options = options_named<OptimizerOptions>(type);
  if (!options) throw ConfigError(str("optimizer.type: ", type, " is not an optimizer Tessera has"));
  return num_states_of(OptimizerConfig{.options = *options});
}

/// What an estimate is made of.
struct Estimated {
  int64_t num_trainable = 0, num_frozen = 0;
  DType dtype = DType::kFloat32;
  DType accumulate_dtype = DType::kFloat32;
  int num_states = 0;
  std::string precision, optimizer;  // in words

  zero::StateBytes bytes(int stage, int64_t world, DType accumulate) const {
    const zero::StateModel model{
        .sharding = zero::sharding_of(stage), .accumulate_dtype = accumulate, .num_states = num_states};
    zero::StateBytes sum = zero::estimate_state_bytes(num_trainable, static_cast<int>(world), dtype, model);
    return sum += zero::state_bytes({num_frozen, (num_frozen + world - 1) / world, dtype, false}, model);
  }
  /// As zero::smallest_world.
  int64_t smallest_world(int stage, int64_t budget_bytes) const {
    return zero::smallest_fitting_world(num_trainable + num_frozen, [&](int64_t world) {
      return bytes(stage, world, accumulate_dtype).total() <= budget_bytes;
    });
  }
};

Estimated estimated_of_flags(const MemoryFlags& flags) {
  Estimated estimated;
  estimated.num_trainable = parse_count(flags.params);
  estimated.precision = flags.precision.empty() ? "bf16" : flags.precision;
  estimated.dtype = parse_precision(estimated.precision);
  estimated.optimizer = flags.optimizer.empty() ? "AdamW" : flags.optimizer;
  estimated.num_states = num_states_of(estimated.optimizer);
  return estimated;
}

/// Makes the configuration's model, in this process and on the CPU, to count it; nothing is trained.
Estimated estimated_of_config(const MemoryFlags& flags, const Logger& log) {
  std::vector<std::string> overrides = {"train_batch_size=auto",
                                        "gradient_accumulation_steps=1"};  // for any world
  overrides.insert(overrides.end(), flags.overrides.begin(), flags.overrides.end());
  overrides.insert(overrides.end(), {"zero_optimization.stage=0", "trainer.device=cpu"});
  const train::RunConfig run = train::load_run_config(flags.config, 1, overrides);
  Estimated estimated;
  estimated.dtype = run.engine.compute_dtype();
  estimated.accumulate_dtype = run.engine.grad_accum_dtype.value_or(DType::kFloat32);
  estimated.precision = train::precision_of(run.engine);
  estimated.optimizer = type_of(run.engine.optimizer.options);
  estimated.num_states = num_states_of(run.engine.optimizer);
  EngineConfig alone = run.engine;
  alone.optimizer = {.options = SGDOptions{.lr = 0}};
  alone.scheduler = ConstantLrOptions{};
  alone.checkpoint.async = false;
  const std::unique_ptr<train::Task> task = tasks().make(run.model, run.data);
  Engine& engine =
      task->initialize(alone, std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{}), {.log = log});
  const zero::Layout& layout = engine.sharded_model().layout();
  for (int i = 0; i < static_cast<int>(layout.parameters().size()); ++i)
    (layout.units()[layout.slice(i).unit].trainable ? estimated.num_trainable : estimated.num_frozen) +=
        layout.parameters()[i].numel();
  return estimated;
}

// 10^9 bytes; of small models 10^6
std::string in_unit(int64_t bytes, double unit, size_t width) {
  return padded_left(fixed(static_cast<double>(bytes) / unit, 1), width);
}

void print_stages(const Estimated& estimated, int world) {
  const double unit = estimated.bytes(0, 1, DType::kFloat32).total() >= 10'000'000'000 ? 1e9 : 1e6;
  // The paper accumulates gradients in the model's own dtype; Tessera in fp32, unless
  // data_types.grad_accum_dtype says otherwise.
  const bool two = estimated.dtype != DType::kFloat32 && estimated.accumulate_dtype != estimated.dtype;
  const std::string gradients = two ? str("gradients in ", name_of(estimated.dtype)) : "";
  std::cout << (unit == 1e9 ? "\nGB (10^9 bytes) a rank on " : "\nMB (10^6 bytes) a rank on ") << world
            << (world == 1 ? " rank" : " ranks") << "\n\n"
            << "          parameters  gradients  master  optimizer     total"
            << (two ? "   " + gradients : "") << '\n';
  for (const int stage : {0, 1, 2, 3}) {
    const zero::StateBytes bytes = estimated.bytes(stage, world, estimated.accumulate_dtype);
    std::cout << "stage " << stage << "  " << in_unit(bytes.parameters, unit, 11)
              << in_unit(bytes.gradients, unit, 11) << in_unit(bytes.master, unit, 8)
              << in_unit(bytes.optimizer, unit, 11) << in_unit(bytes.total(), unit, 10);
    if (two)
      std::cout << in_unit(estimated.bytes(stage, world, estimated.dtype).total(), unit,
                           gradients.size() + 3);
    std::cout << '\n';
  }
}

void print_fit(const Estimated& estimated, const std::string& size, int given_world) {
  const int64_t budget = parse_size("--fit", size, /*bare_bytes=*/false);
  std::cout << "\nTo fit into " << size << " a rank\n\n";
  int smallest_stage = -1;
  for (const int stage : {0, 1, 2, 3}) {
    const int64_t world = estimated.smallest_world(stage, budget);
    std::cout << "stage " << stage << "  "
              << (world == 0 ? "in no world: what it does not shard is more"
                             : str("from ", format_count(world), world == 1 ? " rank on" : " ranks on"))
              << '\n';
    const int64_t wanted = given_world > 0 ? given_world : INT64_MAX;
    if (smallest_stage < 0 && world > 0 && world <= wanted) smallest_stage = stage;
  }
  if (given_world == 0) return;
  std::cout << '\n'
            << (smallest_stage < 0
                    ? str("On ", given_world, " ranks no stage fits.")
                    : str("On ", given_world, " ranks the smallest stage that fits is ", smallest_stage, "."))
            << '\n';
}

int estimate(const MemoryFlags& flags, const Logger& log) {
  if (flags.params.empty() == flags.config.empty())
    throw ConfigError("--estimate: expected CONFIG, or the size of a model, e.g. --params 7.5e9");
  if (!flags.config.empty() && !(flags.precision.empty() && flags.optimizer.empty()))
    throw ConfigError(
        "--precision and --optimizer are for --params: CONFIG has its own; expected --set for its keys");
  if (flags.world < 1 && flags.fit.empty())
    throw ConfigError("--estimate: expected --world, the number of ranks, or --fit, a size");
  if (!flags.fit.empty()) parse_size("--fit", flags.fit, /*bare_bytes=*/false);
  const Estimated estimated =
      flags.config.empty() ? estimated_of_flags(flags) : estimated_of_config(flags, log);
  std::cout << "Model state of " << format_count(estimated.num_trainable)
            << (estimated.num_frozen > 0
                    ? str(" trainable and ", format_count(estimated.num_frozen), " frozen")
                    : "")
            << " parameters, " << estimated.precision << ", " << estimated.optimizer
            << ", by formula.\nActivations and buffers come on top: measure them (tessera memory CONFIG).\n";
  if (flags.world > 0) print_stages(estimated, flags.world);
  if (!flags.fit.empty()) print_fit(estimated, flags.fit, flags.world);
  return 0;
}

int memory(const MemoryFlags& flags, const std::vector<std::string>& args) {
  const Logger log{LogOptions{}};
  if (flags.trial_stage >= 0) return run_trial(flags, log);
  return flags.estimate ? estimate(flags, log) : measure(flags, args, log);
}

}  // namespace

void add_memory_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("memory", "Measure, or estimate, what every ZeRO stage costs in memory");
  const auto flags = std::make_shared<MemoryFlags>();
  command
      ->add_option("CONFIG", flags->config,
                   "JSON file as `tessera train` takes it: trained for a few steps at each stage")
      ->type_name("")
      ->option_text(" ");
  add_overrides(*command, flags->overrides, "Override a key (repeatable)");
  command->add_option("--stages", flags->stages, "Which stages (default: 0,1,2,3)")->type_name("LIST");
  command->add_option("--steps", flags->num_steps, "Timed training steps at each stage (default: 5)")
      ->type_name("K")
      ->check(CLI::Range(1, 1'000'000).description(""));
  command->add_option("--out", flags->out, "Folder for memory.json, memory.csv and the chart, memory.svg")
      ->type_name("DIR");
  command
      ->add_option("--simulate-world", flags->simulate_world,
                   "Hold what one rank of so many would hold, alone on this machine")
      ->type_name("N")
      ->check(CLI::Range(1, 100'000).description(""));
  command->add_option("--rank", flags->rank, "Which rank of --simulate-world (default: 0)")
      ->type_name("R")
      ->check(CLI::Range(0, 99'999).description(""));
  add_launch_flags(*command, flags->launch);
  command->add_flag("--estimate", flags->estimate,
                    "By formula alone, of CONFIG's model or of --params, with the options below");
  command->add_option("--params", flags->params, "Parameters of the model: 7.5e9, 7.5B, 350M")
      ->type_name("P");
  command->add_option("--world", flags->world, "Ranks")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 30).description(""));
  command->add_option("--optimizer", flags->optimizer, "As in the configuration (default: AdamW)")
      ->type_name("NAME");
  command->add_option("--precision", flags->precision, "fp32, bf16 or fp16 (default: bf16)")
      ->type_name("DTYPE");
  command
      ->add_option("--fit", flags->fit, "Smallest world at each stage for so much memory, e.g. 80GiB or 80GB")
      ->type_name("SIZE");
  command->add_option("--trial-stage", flags->trial_stage)->group("");
  command->add_option("--trial-folder", flags->trial_folder)->group("");
  command->footer("docs/memory.md says what is counted, and how.");
  command->callback([flags, args, &exit_code] { exit_code = memory(*flags, args); });
}

}  // namespace tessera::tools
