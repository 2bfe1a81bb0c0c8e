#include "tools/train_command.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>

#include "core/error.h"
#include "core/log.h"
#include "launcher/environment.h"
#include "tools/command_line.h"
#include "tools/launch_command.h"
#include "tools/tasks.h"
#include "train/run.h"
#include "train/run_checkpoints.h"
#include "train/run_lock.h"

namespace tessera::tools {
namespace {

struct TrainFlags {
  std::string config;
  std::vector<std::string> overrides;
  LaunchFlags launch;
  bool resume = false;
  std::string init;
};

/// What asks a run to save and to end after the step under way. SIGHUP: its terminal is gone.
constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGHUP};

/// Set by one of them. A handler can reach nothing but a global.
volatile std::sig_atomic_t stop_requested = 0;

/// Of each, whether it was there before.
volatile std::sig_atomic_t came_before[std::size(kStopSignals)] = {};

/// The first signal asks; the same signal again ends the process, below its progress bars, as if nobody had listened. A SIGHUP that is ignored (nohup)
/// stays so.
void ask_to_stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) {
    stop_requested = 1;
    volatile std::sig_atomic_t& before = came_before[std::find(std::begin(kStopSignals), std::end(kStopSignals), signal) - kStopSignals];
    if (before) {
      if (::isatty(STDOUT_FILENO)) (void)!::write(STDOUT_FILENO, "\n\n", 2);
      ::signal(signal, SIG_DFL);
      ::raise(signal);  // is delivered when this handler returns
    }
    before = 1;
  };
  action.sa_flags = SA_RESTART;
  for (const int signal : kStopSignals) {
    struct sigaction before {};
    if (signal == SIGHUP && ::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    ::sigaction(signal, &action, nullptr);
  }
}

int train(const TrainFlags& flags, const std::vector<std::string>& args) {
  const Logger log{LogOptions{}};
  if (flags.config.empty()) throw ConfigError("CONFIG is empty; expected the name of a JSON file");
  if (launcher::should_start_ranks(flags.launch.nproc)) {
    // A mistake in the configuration is one line here, not one from every rank.
    const train::RunConfig run = train::load_run_config(flags.config, *flags.launch.nproc, flags.overrides);
    train::check_not_in_use(run.trainer.output_dir);
    if (!flags.resume) train::check_may_start_anew(run.trainer);
    return run_ranks_of_self(flags.launch, args, log);
  }
  const comm::Environment environment = comm::environment();
  train::RunConfig run = train::load_run_config(flags.config, environment.world_size, flags.overrides);
  std::setvbuf(stdout, nullptr, _IOFBF, 1 << 16);  // two bars are drawn by one write, which no other line can cut in two
  train::run(std::move(run), tasks(), environment, {train::display_for(std::cout, STDOUT_FILENO), log},
             {.resume = flags.resume, .init = flags.init, .joined = ask_to_stop_on_signals, .stop = [] { return stop_requested != 0; }});
  return 0;
}

}  // namespace

void add_train_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code) {
  CLI::App* command = app.add_subcommand("train", "Train what a JSON configuration describes");
  const auto flags = std::make_shared<TrainFlags>();
  command->add_option("CONFIG", flags->config, "JSON file: DeepSpeed's keys, and model, data, trainer")
      ->required()
      ->type_name("")
      ->option_text(" ");
  add_overrides(*command, flags->overrides, "Override a key, e.g. --set zero_optimization.stage=3 (repeatable)");
  command->add_flag("--resume", flags->resume, "Go on from the latest checkpoint in the run's folder");
  command->add_option("--init", flags->init, "Start from the weights of a .safetensors file (or a folder of them)")->type_name("FILE");
  add_launch_flags(*command, flags->launch);
  command->footer("Under torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set,\n"
                  "it is one rank. Keys: docs/configuration.md. Starting, logs, exit codes:\n"
                  "docs/launching.md.");
  command->callback([flags, args, &exit_code] { exit_code = train(*flags, args); });
}

}  // namespace tessera::tools
