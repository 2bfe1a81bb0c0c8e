#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/log.h"
#include "core/str.h"
#include "engine/config/batch.h"
#include "tools/commands.h"
#include "tools/common/command_line.h"
#include "tools/common/tasks.h"
#include "tools/launch/launch_command.h"
#include "train/run.h"
#include "train/run/run_checkpoints.h"
#include "train/run/run_directory.h"
#include "train/run/run_lock.h"
#include "train/run/run_path.h"

namespace tessera::tools {
namespace {

struct TrainFlags {
  std::string config;
  std::vector<std::string> overrides;
  LaunchFlags launch;
  std::optional<std::string> resume;  // a tag; empty: the latest
  std::filesystem::path begin_from;   // where --resume was given what another program has saved
  std::string begin_tag;
  bool allow_partial_load = false;
  std::string init;
  std::vector<std::string> init_prefixes, init_ignore;
};

/// They ask a run to save and end after the current step. SIGHUP: its terminal was closed.
constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
/// They ask too, however often they come: a job that is preempted, a limit of CPU time, a battery.
constexpr int kGentleSignals[] = {SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGXCPU, SIGPWR};

/// Set by any of them; a global, because a signal handler has no arguments of ours.
volatile std::sig_atomic_t stop_requested = 0;

/// Has, for each signal in kStopSignals, whether it has come before.
volatile std::sig_atomic_t came_before[std::size(kStopSignals)] = {};

/// The first signal asks; the same of kStopSignals again ends the process with its default action, below the
/// progress bars. One that is ignored (nohup) stays ignored.
void ask_to_stop_on_signals() {
  struct sigaction action{};
  action.sa_handler = [](int signal) {
    stop_requested = 1;
    volatile std::sig_atomic_t& before =
        came_before[std::find(std::begin(kStopSignals), std::end(kStopSignals), signal) - kStopSignals];
    if (before) {
      if (::isatty(STDOUT_FILENO)) (void)!::write(STDOUT_FILENO, "\n\n", 2);
      ::signal(signal, SIG_DFL);
      ::raise(signal);  // is delivered when this handler returns
    }
    before = 1;
  };
  action.sa_flags = SA_RESTART;
  const auto set = [&](int signal) {
    struct sigaction before{};
    const bool is_ignored = ::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN;
    if (!is_ignored || signal == SIGINT || signal == SIGTERM) ::sigaction(signal, &action, nullptr);
  };
  for (const int signal : kStopSignals) set(signal);
  action.sa_handler = [](int) { stop_requested = 1; };
  for (const int signal : kGentleSignals) set(signal);
}

constexpr const char* kLatest = "latest";  // a file's name in the checkpoints' folder, so no checkpoint's

/// `--resume CONFIG`: the word after --resume is a tag or a path only if CONFIG is given besides.
void read_resume(TrainFlags& flags, bool has_config) {
  if (!has_config) {
    if (!flags.resume || *flags.resume == kLatest) throw CLI::RequiredError("CONFIG");
    flags.config = std::exchange(*flags.resume, kLatest);
  }
  if (flags.resume && *flags.resume == kLatest) flags.resume = "";
}

/// What --resume names, for a run in this folder: a checkpoint of its own, by the tag or as a path, or what
/// another program has saved, which begins a new run. `has_started`: a restart may have checkpoints of its
/// own by now, and no longer needs what it began with. Throws ConfigError for a checkpoint of another run,
/// CheckpointError for a path without any.
void find_resumed(TrainFlags& flags, const train::TrainerConfig& trainer, bool has_started) {
  namespace fs = std::filesystem;
  if (!flags.resume || flags.resume->empty()) return;
  std::error_code error;
  const fs::path word = *flags.resume, own = fs::path(trainer.output_dir) / train::kCheckpointsName;
  const bool is_tag = word.string().find('/') == std::string::npos &&
                      (fs::exists(own / word, error) || !fs::exists(word, error));
  const auto refuse_partial = [&] {  // of this run all is loaded
    if (flags.allow_partial_load && !has_started)
      throw ConfigError("--allow-partial-load: --resume ", *flags.resume,
                        " is a checkpoint of this run, all of which is loaded; expected what another program "
                        "has saved, or no --allow-partial-load");
  };
  if (is_tag) {
    if (fs::exists(own / word, error)) refuse_partial();
    return;
  }
  try {
    const train::RunPath path = train::find_run(word, "");
    if (fs::equivalent(path.checkpoints, own, error)) {
      refuse_partial();
      flags.resume = path.tag;
      return;
    }
    if (train::is_of_a_run(path.checkpoints, path.tag))
      throw ConfigError("--resume: found a checkpoint in ", path.checkpoints,
                        "; expected one of this run's, in ", own,
                        " (tessera consolidate makes a file of another's weights for --init)");
    flags.begin_from = path.checkpoints;
    flags.begin_tag = path.tag;
  } catch (const CheckpointError&) {
    if (!has_started) throw;
    flags.begin_from = word;
  }
  flags.resume.reset();
  if (!flags.init.empty())
    throw ConfigError("--init ", flags.init, ": found with --resume ", word,
                      ", which has weights, too; expected one of them");
}

/// Throws ConfigError.
LoadWeightsOptions init_options(const TrainFlags& flags) {
  if (flags.init.empty() && !(flags.init_prefixes.empty() && flags.init_ignore.empty()))
    throw ConfigError("--init-prefix and --init-ignore are options of --init; expected --init FILE too");
  LoadWeightsOptions options;
  for (const std::string& mapping : flags.init_prefixes) {
    const size_t equals = mapping.find('=');
    if (equals == mapping.npos || mapping.size() == 1)
      throw ConfigError(
          "--init-prefix ", mapping,
          ": expected OLD=NEW, e.g. module.= for names that begin with \"module.\" in the file alone");
    options.renamed_prefixes.emplace_back(mapping.substr(0, equals), mapping.substr(equals + 1));
  }
  options.ignore_missing = options.ignore_unexpected = options.ignore_mismatched = flags.init_ignore;
  options.advice = "--init-prefix OLD=NEW renames, --init-ignore GLOB leaves out";
  return options;
}

/// The arguments of a rank on fewer ranks than `run` was read for: a step keeps its number of samples.
/// nullopt: the configuration allows no such number of ranks.
std::optional<std::vector<std::string>> args_on(int num_ranks, const TrainFlags& flags,
                                                const train::RunConfig& run, std::vector<std::string> args) {
  const auto batch =
      config::divide_batch(run.engine.train_batch_size, run.engine.train_micro_batch_size_per_gpu, num_ranks);
  if (!batch) return std::nullopt;
  std::vector<std::string> overrides = flags.overrides;
  for (const auto& [key, value] :
       {std::pair(config::kTrainBatchSize, batch->train), std::pair(config::kMicroBatchSize, batch->micro),
        std::pair(config::kAccumulationSteps, batch->accumulation)}) {
    overrides.push_back(str(key, "=", value));
    args.insert(args.end(), {"--set", overrides.back()});
  }
  try {
    train::load_run_config(flags.config, num_ranks, overrides);
  } catch (const ConfigError&) {
    return std::nullopt;
  }
  return args;
}

int train(TrainFlags flags, const std::vector<std::string>& args) {
  const Logger log{LogOptions{}};
  if (flags.allow_partial_load && flags.resume.value_or("").empty())
    throw ConfigError("--allow-partial-load is an option of --resume PATH; expected --resume PATH too");
  const LoadWeightsOptions weights = init_options(flags);
  if (flags.config.empty()) throw ConfigError("CONFIG is empty; expected the name of a JSON file");
  if (starts_ranks(flags.launch)) {
    LaunchPlan plan = plan_launch(flags.launch);
    // A mistake in the configuration is one line here, not one from every rank.
    const train::RunConfig run = train::load_run_config(flags.config, plan.num_ranks, flags.overrides);
    find_resumed(flags, run.trainer, /*has_started=*/false);
    if (plan.is_first_host) train::check_not_in_use(run.trainer.output_dir);
    if (plan.is_first_host && !flags.resume) train::check_no_unfinished_run(run.trainer);
    for (launcher::SignalPolicy* signals :
         {&plan.local.signals, plan.cluster ? &plan.cluster->signals : nullptr})
      if (signals) signals->handled.insert(signals->handled.end(), {SIGUSR1, SIGUSR2});  // ranks save and end
    if (plan.restarts.max_restarts > 0)
      plan.restarts.arguments = [&, num_ranks = plan.num_ranks](int now) {
        return now == num_ranks ? std::optional(args) : args_on(now, flags, run, args);
      };
    return run_ranks_of_self(plan, args, log);
  }
  const comm::Environment environment = comm::environment();
  train::RunConfig run = train::load_run_config(flags.config, environment.world_size, flags.overrides);
  find_resumed(flags, run.trainer, environment.restart_count > 0);
  std::setvbuf(stdout, nullptr, _IOFBF,
               1 << 16);  // both bars are drawn by one write, so that no other line comes between them
  train::run(std::move(run), tasks(), environment, {train::display_for(std::cout, STDOUT_FILENO), log},
             {.resume = flags.resume.has_value(),
              .resume_tag = flags.resume.value_or(""),
              .begin_from = flags.begin_from,
              .begin_tag = flags.begin_tag,
              .allow_partial_load = flags.allow_partial_load,
              .init = flags.init,
              .init_options = weights,
              .joined = ask_to_stop_on_signals,
              .stop = [] { return stop_requested != 0; }});
  return 0;
}

}  // namespace

void add_train_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code) {
  CLI::App* command = app.add_subcommand("train", "Train what a JSON configuration describes");
  const auto flags = std::make_shared<TrainFlags>();
  command->add_option("CONFIG", flags->config, "JSON file: DeepSpeed's keys, and model, data, trainer");
  add_overrides(*command, flags->overrides,
                "Override a key, e.g. --set zero_optimization.stage=3 (repeatable)");
  command
      ->add_option("--resume", flags->resume,
                   "Continue from the latest checkpoint in the run's folder, or from checkpoint TAG; or "
                   "begin with what another program has saved, a folder or file")
      ->expected(0, 1)
      ->default_str(kLatest)  // --resume without a tag
      ->option_text("[TAG|PATH]");
  command->add_flag(
      "--allow-partial-load", flags->allow_partial_load,
      "With --resume PATH: go on without what cannot be taken over of its schedule, moments and loss scale, "
      "which is an error otherwise");
  command
      ->add_option("--init", flags->init,
                   "Start from the weights of a .safetensors file (or a folder of them), or of what another "
                   "program has "
                   "saved")
      ->type_name("FILE");
  command
      ->add_option(
          "--init-prefix", flags->init_prefixes,
          "Parameters whose names begin with OLD in that file begin with NEW in the model (repeatable)")
      ->type_name("OLD=NEW")
      ->expected(1)
      ->take_all();
  command
      ->add_option(
          "--init-ignore", flags->init_ignore,
          "Names that may be missing, left over or of another shape: they are not loaded (repeatable)")
      ->type_name("GLOB")
      ->expected(1)
      ->take_all();
  add_launch_flags(*command, flags->launch);
  command->footer(
      "Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and\n"
      "MASTER_PORT set, it is one rank. Keys: docs/configuration.md. Starting, logs,\n"
      "exit codes: docs/launching.md.");
  command->callback([command, flags, args, &exit_code] {
    if (flags->resume && flags->resume->empty())
      throw ConfigError("--resume is empty; expected TAG, or --resume alone for the latest checkpoint");
    read_resume(*flags, command->get_option("CONFIG")->count() > 0);
    exit_code = train(*flags, args);
  });
}

}  // namespace tessera::tools
