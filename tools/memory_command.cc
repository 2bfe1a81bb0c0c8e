#include "tools/memory_command.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/disk.h"
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
  std::string optimizer = "AdamW";
  std::string precision = "bf16";
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
      throw ConfigError(str("--stages ", text.empty() ? "''" : text, ": expected stages from 0 to 3, such as 0,1,2,3"));
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
  const train::MemoryTrial trial =
      train::run_memory_trial(run_config(flags, world_size, flags.trial_stage), tasks(), environment,
                              {.num_steps = flags.num_steps, .simulate_world = flags.simulate_world, .simulate_rank = flags.rank}, log);
  replace_file(fs::path(flags.trial_folder) / str("stage", trial.stage, "_rank", trial.rank, ".json"), to_json(trial).dump());
  return 0;
}

train::MemoryTrial read_trial(const fs::path& path) {
  std::ifstream file(path);
  return train::memory_trial_of(nlohmann::json::parse(file));
}

int measure(const MemoryFlags& flags, const std::vector<std::string>& args, const Logger& log) {
  if (flags.config.empty()) throw ConfigError("memory: expected CONFIG, the name of a JSON file, or --estimate");
  if (launcher::in_group()) throw ConfigError("memory: starts ranks of its own; expected to be run without a launcher, with --nproc");
  if (!flags.params.empty() || !flags.fit.empty() || flags.world > 0)
    throw ConfigError("--params, --world and --fit are for --estimate; expected that too, and no CONFIG");
  if (flags.simulate_world == 0 && flags.rank > 0) throw ConfigError("--rank is for --simulate-world; expected that too");
  if (flags.simulate_world > 0 && flags.launch.nproc)
    throw ConfigError("--simulate-world is about one process alone; leave --nproc out");
  if (flags.simulate_world > 0 && flags.rank >= flags.simulate_world)
    throw ConfigError(str("--rank ", flags.rank, ": expected 0 to ", flags.simulate_world - 1, ", the ranks of --simulate-world"));
  const std::vector<int> stages = parse_stages(flags.stages);
  LaunchFlags launch = flags.launch;
  launch.nproc = launch.nproc.value_or(1);
  launcher::should_start_ranks(launch.nproc);  // throws for numbers out of range
  const int world_size = flags.simulate_world > 0 ? flags.simulate_world : *launch.nproc;
  for (const int stage : stages) run_config(flags, world_size, stage);  // mistakes are one line here, not one from every rank
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
    for (const std::string& word : {std::string("--trial-stage"), std::to_string(stage), std::string("--trial-folder"), folder.path().string()})
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
  if (rest == "K" || rest == "k") factor = 1e3;
  else if (rest == "M" || rest == "m") factor = 1e6;
  else if (rest == "B" || rest == "b" || rest == "G") factor = 1e9;
  else if (!rest.empty()) factor = 0;
  if (error != std::errc() || !(value * factor >= 1 && value * factor <= 1e15))
    throw ConfigError(str("--params ", text.empty() ? "''" : text, ": expected a number of parameters, such as 7.5e9, 7.5B or 350M"));
  return static_cast<int64_t>(value * factor);
}

DType parse_precision(const std::string& word) {
  const auto dtype = parse_dtype(word);
  if (!dtype || *dtype == DType::kFloat64) throw ConfigError(str("--precision ", word.empty() ? "''" : word, ": expected fp32, bf16 or fp16"));
  return *dtype;
}

/// fp32 state tensors an element.
int num_states_of(const std::string& name) {
  OptimizerConfig config;
  config.type = name;
  const OptimizerSetup setup = set_up_optimizer(config);
  return static_cast<int>(kernels::state_names(setup.kind, setup.groups.front()).size());
}

// 10^9 bytes
std::string gigabytes(int64_t bytes, size_t width) { return padded_left(fixed(static_cast<double>(bytes) / 1e9, 1), width); }

int estimate(const MemoryFlags& flags) {
  if (flags.params.empty()) throw ConfigError("--estimate: expected --params too, e.g. --params 7.5e9");
  if (flags.world < 1 && flags.fit.empty()) throw ConfigError("--estimate: expected --world, the number of ranks, or --fit, a size");
  const int64_t num_parameters = parse_count(flags.params);
  const DType dtype = parse_precision(flags.precision);
  const int num_states = num_states_of(flags.optimizer);
  const int64_t budget = flags.fit.empty() ? 0 : parse_size("--fit", flags.fit);
  // The paper accumulates gradients in the model's own dtype; Tessera in fp32, unless data_types.grad_accum_dtype says otherwise.
  const auto model = [&](int stage, DType accumulate) {
    return zero::StateModel{.sharding = zero::sharding_of(stage), .accumulate_dtype = accumulate, .num_states = num_states};
  };
  const bool two = dtype != DType::kFloat32;
  const std::string gradients = two ? str("gradients in ", name_of(dtype)) : "";
  std::cout << "Model state of " << format_count(num_parameters) << " parameters, " << flags.precision << ", " << flags.optimizer
            << ", by formula.\nActivations and buffers come on top: measure them (tessera memory CONFIG).\n";
  if (flags.world > 0) {
    std::cout << "\nGB (10^9 bytes) a rank on " << flags.world << (flags.world == 1 ? " rank" : " ranks") << "\n\n"
              << "          parameters  gradients  master  optimizer     total" << (two ? "   " + gradients : "") << '\n';
    for (const int stage : {0, 1, 2, 3}) {
      const zero::StateBytes bytes = zero::estimate_state_bytes(num_parameters, flags.world, dtype, model(stage, DType::kFloat32));
      std::cout << "stage " << stage << "  " << gigabytes(bytes.parameters, 11) << gigabytes(bytes.gradients, 11) << gigabytes(bytes.master, 8)
                << gigabytes(bytes.optimizer, 11) << gigabytes(bytes.total(), 10);
      if (two)
        std::cout << gigabytes(zero::estimate_state_bytes(num_parameters, flags.world, dtype, model(stage, dtype)).total(), gradients.size() + 3);
      std::cout << '\n';
    }
  }
  if (flags.fit.empty()) return 0;
  std::cout << "\nTo fit into " << flags.fit << " a rank\n\n";
  int smallest_stage = -1;
  for (const int stage : {0, 1, 2, 3}) {
    const int64_t world = zero::smallest_world(num_parameters, dtype, model(stage, DType::kFloat32), budget);
    std::cout << "stage " << stage << "  " << (world == 0 ? "in no world: what it does not shard is more" : str("from ", format_count(world), world == 1 ? " rank on" : " ranks on"))
              << '\n';
    const int64_t wanted = flags.world > 0 ? flags.world : INT64_MAX;
    if (smallest_stage < 0 && world > 0 && world <= wanted) smallest_stage = stage;
  }
  if (flags.world > 0)
    std::cout << '\n'
              << (smallest_stage < 0 ? str("On ", flags.world, " ranks no stage fits.") : str("On ", flags.world, " ranks the smallest stage that fits is ", smallest_stage, "."))
              << '\n';
  return 0;
}

int memory(const MemoryFlags& flags, const std::vector<std::string>& args) {
  const Logger log{LogOptions{}};
  if (flags.trial_stage >= 0) return run_trial(flags, log);
  return flags.estimate ? estimate(flags) : measure(flags, args, log);
}

}  // namespace

void add_memory_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code) {
  CLI::App* command = app.add_subcommand("memory", "Measure, or estimate, what every ZeRO stage costs in memory");
  const auto flags = std::make_shared<MemoryFlags>();
  command->add_option("CONFIG", flags->config, "JSON file as `tessera train` takes it: trained for a few steps at each stage")
      ->type_name("")
      ->option_text(" ");
  add_overrides(*command, flags->overrides, "Override a key (repeatable)");
  command->add_option("--stages", flags->stages, "Which stages (default: 0,1,2,3)")->type_name("LIST");
  command->add_option("--steps", flags->num_steps, "Timed training steps at each stage (default: 5)")->type_name("K")->check(CLI::Range(1, 1'000'000).description(""));
  command->add_option("--out", flags->out, "Folder for memory.json, memory.csv and the chart, memory.svg")->type_name("DIR");
  command->add_option("--simulate-world", flags->simulate_world, "Hold what one rank of so many would hold, alone on this machine")
      ->type_name("N")
      ->check(CLI::Range(1, 100'000).description(""));
  command->add_option("--rank", flags->rank, "Which rank of --simulate-world (default: 0)")->type_name("R")->check(CLI::Range(0, 99'999).description(""));
  add_launch_flags(*command, flags->launch);
  command->add_flag("--estimate", flags->estimate, "By formula alone, without a model: takes the options below");
  command->add_option("--params", flags->params, "Parameters of the model: 7.5e9, 7.5B, 350M")->type_name("P");
  command->add_option("--world", flags->world, "Ranks")->type_name("N")->check(CLI::Range(1, 1 << 30).description(""));
  command->add_option("--optimizer", flags->optimizer, "As in the configuration (default: AdamW)")->type_name("NAME");
  command->add_option("--precision", flags->precision, "fp32, bf16 or fp16 (default: bf16)")->type_name("DTYPE");
  command->add_option("--fit", flags->fit, "Smallest world at each stage for so much memory, e.g. 80GiB")->type_name("SIZE");
  command->add_option("--trial-stage", flags->trial_stage)->group("");
  command->add_option("--trial-folder", flags->trial_folder)->group("");
  command->footer("docs/memory.md says what is counted, and how.");
  command->callback([flags, args, &exit_code] { exit_code = memory(*flags, args); });
}

}  // namespace tessera::tools
