#include <unistd.h>

#include <iostream>
#include <memory>

#include "core/log.h"
#include "tools/commands.h"
#include "tools/common/command_line.h"
#include "tools/common/tasks.h"
#include "tools/launch/launch_command.h"
#include "train/trained_run.h"

namespace tessera::tools {
namespace {

struct EvalFlags {
  std::string folder, tag;
  std::vector<std::string> overrides;
  LaunchFlags launch;
};

int eval(const EvalFlags& flags, const std::vector<std::string>& args) {
  const Logger log{LogOptions{}};
  if (starts_ranks(flags.launch)) {
    const LaunchPlan plan = plan_launch(flags.launch);
    train::open_run(flags.folder, plan.num_ranks, flags.overrides,
                    flags.tag);  // a mistake is one line here, not one from every rank
    return run_ranks_of_self(plan, args, log);
  }
  const comm::Environment environment = comm::environment();
  const train::TrainedRun run =
      train::open_run(flags.folder, environment.world_size, flags.overrides, flags.tag);
  train::evaluate_run(run, tasks(), environment, {train::display_for(std::cout, STDOUT_FILENO), log});
  return 0;
}

}  // namespace

void add_eval_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code) {
  CLI::App* command = app.add_subcommand("eval", "Evaluate a trained model on its validation and test data");
  const auto flags = std::make_shared<EvalFlags>();
  add_run(*command, flags->folder, flags->tag);
  add_overrides(*command, flags->overrides,
                "Override a key of its config.json, e.g. --set data.path=DIR (repeatable)");
  add_launch_flags(*command, flags->launch);
  command->footer("The results are in RUN/eval_results.json too, where this user may write.");
  command->callback([flags, args, &exit_code] { exit_code = eval(*flags, args); });
}

}  // namespace tessera::tools
