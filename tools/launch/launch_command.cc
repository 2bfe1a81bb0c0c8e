#include "tools/launch/launch_command.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string_view>

#include "core/error.h"

namespace tessera::tools {
std::vector<std::string> take_program(int& argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "launch") return {};
  char** end = argv + argc;
  char** dashes = std::find(argv + 2, end, std::string_view("--"));
  if (dashes == end) return {};
  argc = static_cast<int>(dashes - argv);
  return {dashes + 1, end};
}

void add_launch_command(CLI::App& app, const std::vector<std::string>& program, const Logger& log,
                        int& exit_code) {
  auto flags = std::make_shared<LaunchFlags>();
  CLI::App* command = app.add_subcommand(
      "launch", "Start N ranks of any program, on this host or on several, and supervise them");
  command->footer("The program and its arguments follow `--`: tessera launch -n 2 -- PROGRAM ARGS");
  add_launch_flags(*command, *flags);
  command->allow_extras();  // for an error of our own where `--` was forgotten
  command->callback([command, flags, program, log, &exit_code] {
    const std::vector<std::string> unknown = command->remaining();
    if (program.empty() || !unknown.empty())
      throw ConfigError(
          unknown.empty() ? "launch: no program was given" : "launch: unexpected '" + unknown[0] + "'",
          "; expected: tessera launch -n N [flags] -- PROGRAM [ARGS...]");
    exit_code = run_plan(plan_launch(*flags), program.front(), {program.begin() + 1, program.end()}, log);
  });
}

int run_ranks_of_self(const LaunchPlan& plan, const std::vector<std::string>& args, const Logger& log) {
  return run_plan(plan, std::filesystem::read_symlink("/proc/self/exe").string(), args, log);
}

int run_ranks_of_self(const LaunchFlags& flags, const std::vector<std::string>& args, const Logger& log) {
  return run_ranks_of_self(plan_launch(flags), args, log);
}

}  // namespace tessera::tools
