#include "tools/memory/memory_command.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/environment/environment.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/json/json_text.h"
#include "core/log.h"
#include "core/str.h"
#include "core/terminal.h"
#include "core/utf8.h"
#include "engine/config/sharding_plan.h"
#include "launcher/environment/environment.h"
#include "launcher/process/signals.h"
#include "tools/common/command_line.h"
#include "tools/common/tasks.h"
#include "tools/launch/launch_command.h"
#include "tools/memory/counted_model.h"
#include "tools/memory/fit_command.h"
#include "tools/memory/fit_trial.h"
#include "tools/memory/memory_estimate.h"
#include "tools/memory/memory_report.h"
#include "tools/memory/trial_ranks.h"
#include "train/memory_page.h"
#include "train/memory_trial.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

struct MemoryFlags {
  std::string config;
  std::vector<std::string> overrides;
  std::optional<std::string> stages;  ///< unset: all at which the configuration's state may lie where it says
  int num_steps = 5;
  std::string out;
  bool compare = false;
  int simulate_world = 0;
  int rank = 0;
  LaunchFlags launch;

  bool estimate = false;
  EstimateFlags by_formula;

  bool fit = false;
  std::string fit_value;  ///< CONFIG; of --estimate a size
  FitFlags by_measurement;

  // What the command tells the ranks that it starts.
  std::string trial_folder;  ///< for their results; empty: this process is no such rank
  int trial_stage = -1;
  bool fit_trial = false;
  int64_t trial_limit = 0;
  bool trial_saves = false;
};

std::vector<int> parse_stages(const std::string& text) {
  std::vector<int> stages;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    if (word.size() != 1 || word[0] < '0' || word[0] > '3')
      throw ConfigError("--stages ", text.empty() ? "''" : text,
                        ": expected stages from 0 to 3, such as 0,1,2,3");
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

ShardingPlan plan_of(const MemoryFlags& flags, int world_size, int stage) {
  const train::RunConfig run = run_config(flags, world_size, stage);
  return plan_sharding(run.engine, world_size, run.trainer.device == "cuda");
}

std::vector<int> stages_of(const MemoryFlags& flags, int world_size) {
  if (flags.stages) return parse_stages(*flags.stages);
  const ShardingPlan plan = plan_of(flags, world_size, 3);
  const bool in_groups = plan.groups != zero::GroupSizes();
  std::vector<int> stages;
  for (const int stage : {0, 1, 2, 3})
    if ((!in_groups || zero::sharding_of(stage).parameters) &&
        can_offload(zero::sharding_of(stage), world_size, plan.tiers))
      stages.push_back(stage);
  return stages;
}

/// The stage of the configuration, or `otherwise`: it may be valid at other stages than its own alone.
int configured_stage(const MemoryFlags& flags, int world_size, int otherwise) {
  try {
    return train::load_run_config(flags.config, world_size, flags.overrides).engine.zero.stage;
  } catch (const ConfigError&) {
    return otherwise;
  }
}

/// What a rank does: trains at one stage, and writes what it measured into the trial folder.
int run_trial(const MemoryFlags& flags, const Logger& log) {
  const comm::Environment environment = comm::environment();
  const int world_size = flags.simulate_world > 0 ? flags.simulate_world : environment.world_size;
  const train::MemoryTrial trial = train::run_memory_trial(
      run_config(flags, world_size, flags.trial_stage), tasks(), environment,
      {.num_steps = flags.num_steps, .simulate_world = flags.simulate_world, .simulate_rank = flags.rank},
      log);
  write_trial(flags.trial_folder, trial, /*timeline=*/!flags.out.empty());
  return 0;
}

/// Makes the folder of --out, if there is one, and sees now that the page can be written at the end.
void make_out(const std::string& out) {
  if (out.empty()) return;
  std::error_code error;
  fs::create_directories(out, error);
  if (error) throw ConfigError("--out ", out, ": cannot be made: ", error.message());
  check_writable(fs::path(out) / "memory.html");
}

/// The files of --out.
void write_files(const fs::path& out, const MemoryTrials& trials, const train::MemoryPage& page) {
  replace_file(out / "memory.json", json_text(memory_json(trials), 1) + "\n");
  replace_file(out / "memory.html", train::memory_page_html(page));
  std::vector<std::pair<std::string, nlohmann::ordered_json>> timelines;
  for (const auto* runs : {&page.runs, &page.variants})
    for (const train::MeasuredRun& run : *runs) timelines.emplace_back(run.label, run.timeline);
  replace_file(out / "memory_trace.json", train::memory_trace(timelines));
  std::cout << "\nwritten: memory.html (the page), memory.json, memory_trace.json (for Perfetto)\nin "
            << out.string() << '\n';
}

/// --compare: a setting that fails or takes longer than --timeout, as a larger micro-batch may, is left out
/// of the page with a warning. Returns the exit code where a signal has ended the command, else 0.
int compare(const MemoryFlags& flags, const TrialStart& start, train::MemoryPage& page, const Logger& log) {
  const auto own =
      std::ranges::find(page.runs, page.stage, [](const train::MeasuredRun& run) { return run.trial.stage; });
  const train::MemoryTrial& trial = (own == page.runs.end() ? page.runs.front() : *own).trial;
  const train::RunConfig config = run_config(flags, trial.world_size, trial.stage);
  for (const TrialSetting& setting : variants_of(trial, config.engine, flags.out)) {
    TrialResult result = run_trial_ranks(start, setting, log);
    if (result.exit_code > 128 && launcher::ends_a_run(result.exit_code - 128)) return result.exit_code;
    if (result.exit_code == 0)
      page.variants.push_back(std::move(result.largest));
    else
      log.warning(str("--compare: ", setting.label, ": failed, and is left out of the page"));
  }
  return 0;
}

/// What a measurement and --fit ask of the flags: ranks on this host that are started once.
void check_launch(const LaunchFlags& flags) {
  if (in_group())
    throw ConfigError(
        "memory: runs under a launcher, but starts its ranks itself; expected a start without one, with "
        "--nproc N");
  const int num_ranks = flags.nproc.value_or(1);
  launcher::should_start_ranks(num_ranks);  // throws for numbers out of range
  if (!starts_ranks(flags)) return;
  if (const LaunchPlan plan = plan_launch(flags); plan.cluster || plan.num_ranks != num_ranks)
    throw ConfigError("memory: measures on this host; expected --nproc N and no other hosts");
}

int measure(const MemoryFlags& flags, const std::vector<std::string>& args, const Logger& log) {
  if (flags.config.empty())
    throw ConfigError("memory: expected CONFIG, the name of a JSON file, or --estimate");
  check_launch(flags.launch);
  if (flags.simulate_world == 0 && flags.rank > 0)
    throw ConfigError("--rank chooses a rank of --simulate-world; expected --simulate-world N too");
  if (flags.simulate_world > 0 && flags.launch.nproc)
    throw ConfigError("--simulate-world runs one process; expected it without --nproc");
  if (flags.simulate_world > 0 && flags.rank >= flags.simulate_world)
    throw ConfigError("--rank ", flags.rank, ": expected 0 to ", flags.simulate_world - 1,
                      ", the ranks of --simulate-world");
  LaunchFlags launch = flags.launch;
  launch.nproc = launch.nproc.value_or(1);
  const int world_size = flags.simulate_world > 0 ? flags.simulate_world : *launch.nproc;
  const std::vector<int> stages = stages_of(flags, world_size);
  for (const int stage : stages)
    run_config(flags, world_size, stage);  // mistakes are one line here, not one from every rank
  if (flags.compare && flags.out.empty())
    throw ConfigError("--compare is shown by the page; expected --out DIR too");
  make_out(flags.out);

  TrialStart start{.launch = launch, .args = args, .ranks = {}, .timelines = !flags.out.empty()};
  if (flags.simulate_world > 0) start.ranks = {flags.rank};
  for (int rank = 0; flags.simulate_world == 0 && rank < *launch.nproc; ++rank) start.ranks.push_back(rank);
  MemoryTrials trials;
  train::MemoryPage page{.world_size = world_size};
  int exit_code = 0;
  for (const int stage : stages) {
    TrialResult result =
        run_trial_ranks(start, {.stage = stage, .overrides = {}, .label = str("stage ", stage)}, log);
    exit_code = result.exit_code;
    if (exit_code != 0) {
      if (trials.empty()) return exit_code;
      log.warning(str("stage ", stage, ": not measured; what follows is of the stages before it"));
      break;
    }
    trials[stage] = std::move(result.ranks);
    page.runs.push_back(std::move(result.largest));
  }
  page.model = page.runs.front().trial.model;
  page.optimizer = page.runs.front().trial.optimizer;
  page.stage = configured_stage(flags, world_size, stages.back());
  page.in_groups = plan_of(flags, world_size, stages.back()).groups != zero::GroupSizes();
  if (flags.compare && exit_code == 0) exit_code = compare(flags, start, page, log);
  std::cout << memory_table(trials, terminal_width(STDOUT_FILENO));
  if (!flags.out.empty()) write_files(flags.out, trials, page);
  return exit_code;
}

/// --fit: `--fit CONFIG` is `CONFIG --fit`.
int fit(const MemoryFlags& flags, const Logger& log) {
  std::string config = flags.config;
  if (config.empty()) config = flags.fit_value;
  if (config.empty()) throw ConfigError("--fit: expected --fit CONFIG, the name of a JSON file");
  if (!flags.config.empty() && !flags.fit_value.empty())
    throw ConfigError("--fit ", flags.fit_value, ": CONFIG is ", flags.config,
                      "; expected --memory SIZE for what it is to fit into, or --estimate");
  check_launch(flags.launch);
  const FitFlags& asked = flags.by_measurement;
  if (asked.no_disk && !asked.disk.empty()) throw ConfigError("--no-disk, --disk: expected one of them");
  const auto check_utf8 = [](const char* option, const std::string& value) {
    if (!is_utf8(value))
      throw ConfigError(option, " ", abridged(value),
                        ": is not UTF-8; expected UTF-8, as of the file that is written");
  };
  check_utf8("--disk", asked.disk);
  for (const std::string& one : flags.overrides) check_utf8("--set", one);
  return run_fit(config, flags.overrides, asked, flags.launch, log);
}

/// The three things that the command does.
enum Way : unsigned { kMeasures = 1, kEstimates = 2, kFits = 4 };
constexpr std::array kWays = {std::pair(kMeasures, "tessera memory CONFIG"),
                              std::pair(kEstimates, "tessera memory --estimate"),
                              std::pair(kFits, "tessera memory --fit CONFIG")};

/// Which of them an option counts for.
using Scopes = std::vector<std::pair<const CLI::Option*, unsigned>>;

/// Appends the options that `command` has got since the last call.
void add_scopes(const CLI::App& command, unsigned ways, Scopes& scopes) {
  const std::vector<const CLI::Option*> options = command.get_options();
  for (size_t i = scopes.size(); i < options.size(); ++i) scopes.emplace_back(options[i], ways);
}

/// Throws ConfigError for an option that was given and would not count.
void check_scopes(const Scopes& scopes, Way way) {
  const auto named = [](unsigned ways) {
    std::vector<std::string> names;
    for (const auto& [one, name] : kWays)
      if ((ways & one) != 0) names.emplace_back(name);
    return join(names, " or ");
  };
  for (const auto& [option, ways] : scopes)
    if (option->count() > 0 && (ways & way) == 0)
      throw ConfigError(option->get_name(), ": is no option of ", named(way), "; expected it with ",
                        named(ways));
}

int memory(const MemoryFlags& flags, const Scopes& scopes, const std::vector<std::string>& args) {
  const Logger log{LogOptions{}};
  if (flags.fit_trial)
    return run_fit_rank(
        flags.config, flags.overrides,
        {.folder = flags.trial_folder, .limit = flags.trial_limit, .saves = flags.trial_saves});
  if (!flags.trial_folder.empty()) return run_trial(flags, log);
  if (flags.launch.max_restarts)
    throw ConfigError("memory: a failure is a result; expected no --max-restarts");
  check_scopes(scopes, flags.estimate ? kEstimates : flags.fit ? kFits : kMeasures);
  if (flags.fit && !flags.estimate) return fit(flags, log);
  if (!flags.estimate) return measure(flags, args, log);
  if (flags.config.empty() && !flags.overrides.empty())
    throw ConfigError(
        "--set: changes a key of CONFIG, and there is none; expected --estimate CONFIG, or no --set");
  EstimateFlags by_formula = flags.by_formula;
  by_formula.fit = flags.fit_value;
  if (flags.fit && by_formula.fit.empty()) throw ConfigError("--fit: expected a size, such as 80GiB");
  make_out(flags.out);
  const CountedModel model = print_memory_estimate(flags.config, flags.overrides, by_formula, log);
  if (flags.out.empty()) return 0;
  train::MemoryPage page{.model = model,
                         .optimizer = model.optimizer,
                         .world_size = std::max(1, by_formula.world),
                         .in_groups = model.groups != zero::GroupSizes()};
  if (flags.fit) page.limit = parse_size("--fit", by_formula.fit, /*bare_bytes=*/false);
  if (by_formula.world == 0)  // the page begins with the fewest ranks on which a stage fits
    for (const int stage : {3, 2, 1, 0})
      if (const int64_t world = model.smallest_world(stage, {}, *page.limit); world > 0) {
        page.world_size = static_cast<int>(world);
        break;
      }
  replace_file(fs::path(flags.out) / "memory.html", train::memory_page_html(page));
  std::cout << "\nwritten: memory.html (the page) in " << flags.out << '\n';
  return 0;
}

void add_fit_flags(CLI::App& command, FitFlags& flags) {
  const char* const group = "Options of --fit CONFIG";
  command.add_option("--memory", flags.memory, "What this host's ranks may use (default: what it has free)")
      ->type_name("SIZE")
      ->group(group);
  command
      .add_option("--disk", flags.disk,
                  "Folder for state on disk (default: nvme_path of CONFIG, else where its runs are)")
      ->type_name("DIR")
      ->group(group);
  command.add_flag("--no-disk", flags.no_disk, "All state stays in memory")->group(group);
  command.add_option("-o,--output", flags.output, "The file (default: CONFIG's name with _fit, beside it)")
      ->type_name("FILE")
      ->group(group);
}

void add_trial_flags(CLI::App& command, MemoryFlags& flags) {
  command.add_option("--trial-stage", flags.trial_stage)->group("");
  command.add_option("--trial-folder", flags.trial_folder)->group("");
  command.add_flag("--trial-fit", flags.fit_trial)->group("");
  command.add_option("--trial-limit", flags.trial_limit)->group("");
  command.add_flag("--trial-saves", flags.trial_saves)->group("");
}

}  // namespace

void add_memory_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("memory", "Measure, or estimate, what every ZeRO stage costs in memory");
  const auto flags = std::make_shared<MemoryFlags>();
  command->add_option("CONFIG", flags->config,
                      "JSON file as `tessera train` takes it: trained for a few steps at each stage");
  add_overrides(*command, flags->overrides, "Override a key (repeatable)");
  Scopes scopes;
  add_scopes(*command, kMeasures | kEstimates | kFits, scopes);
  command->add_option("--stages", flags->stages, "Which stages (default: 0,1,2,3)")->type_name("LIST");
  command->add_option("--steps", flags->num_steps, "Timed training steps at each stage (default: 5)")
      ->type_name("K")
      ->check(CLI::Range(1, 1'000'000).description(""));
  add_scopes(*command, kMeasures, scopes);
  command
      ->add_option("--out", flags->out, "Folder for the page memory.html, memory.json and memory_trace.json")
      ->type_name("DIR");
  add_scopes(*command, kMeasures | kEstimates, scopes);
  command->add_flag("--compare", flags->compare,
                    "With --out: also measure other recomputation, another micro-batch, and optimizer states "
                    "on disk, for the page");
  command
      ->add_option("--simulate-world", flags->simulate_world,
                   "Measure one rank of a group of N, alone on this machine")
      ->type_name("N")
      ->check(CLI::Range(1, 100'000).description(""));
  command->add_option("--rank", flags->rank, "Which rank of the N (default: 0)")
      ->type_name("R")
      ->check(CLI::Range(0, 99'999).description(""));
  add_scopes(*command, kMeasures, scopes);
  add_launch_flags(*command, flags->launch);
  add_scopes(*command, kMeasures | kFits, scopes);
  command->add_flag("--estimate", flags->estimate,
                    "By formula, without training: of CONFIG's model or of --params, with the options below");
  add_scopes(*command, kMeasures | kEstimates | kFits, scopes);
  command
      ->add_option("--params", flags->by_formula.params,
                   "Number of parameters of the model: 7.5e9, 7.5B, 350M")
      ->type_name("P");
  command->add_option("--world", flags->by_formula.world, "Number of ranks")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 30).description(""));
  command->add_option("--optimizer", flags->by_formula.optimizer, "As in the configuration (default: AdamW)")
      ->type_name("NAME");
  command->add_option("--precision", flags->by_formula.precision, "fp32, bf16 or fp16 (default: bf16)")
      ->type_name("DTYPE");
  command
      ->add_option("--mics-shard-size", flags->by_formula.groups.shard,
                   "Stage 3 with zero_optimization.mics_shard_size, too")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 30).description(""));
  command
      ->add_option("--hpz-partition-size", flags->by_formula.groups.secondary,
                   "Stage 3 with zero_optimization.zero_hpz_partition_size, too")
      ->type_name("N")
      ->check(CLI::Range(2, 1 << 30).description(""));
  add_scopes(*command, kEstimates, scopes);
  CLI::Option* const fits =
      command
          ->add_option("--fit", flags->fit_value,
                       "Find a setting of CONFIG that fits into this machine's memory, try it, and write it; "
                       "with --estimate, the ranks that each stage needs to fit into a size, e.g. 80GiB")
          ->type_name("CONFIG")
          ->expected(0, 1);
  add_scopes(*command, kEstimates | kFits, scopes);
  add_fit_flags(*command, flags->by_measurement);
  add_scopes(*command, kFits, scopes);
  add_trial_flags(*command, *flags);
  command->footer("docs/memory.md says what is counted, and how.");
  command->callback([flags, fits, scopes, args, &exit_code] {
    flags->fit = fits->count() > 0;
    exit_code = memory(*flags, scopes, args);
  });
}

}  // namespace tessera::tools
