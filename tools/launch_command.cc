#include "tools/launch_command.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string_view>

#include "core/error.h"
#include "core/str.h"
#include "launcher/environment.h"
#include "launcher/launch.h"

namespace tessera::tools {
namespace {

launcher::Options options_of(const LaunchFlags& flags) {
  launcher::Options options;
  options.nproc = flags.nproc.value_or(1);
  options.master_port = flags.master_port;
  options.log_dir = flags.log_dir;
  options.save_grace = std::chrono::milliseconds(static_cast<int64_t>(flags.save_grace_s * 1000));
  return options;
}

}  // namespace

void add_launch_flags(CLI::App& command, LaunchFlags& flags) {
  command
      .add_option("-n,--nproc,--nproc-per-node,--nproc_per_node", flags.nproc, "Ranks to start on this host")
      ->type_name("N");
  command
      .add_option("--master-port,--master_port", flags.master_port, "Port of the rendezvous; 0: a free one")
      ->type_name("PORT");
  command
      .add_option(
          "--log-dir,--log_dir", flags.log_dir,
          "Folder for the output of ranks 1 and on (default: a temporary one, kept when a rank fails)")
      ->type_name("DIR");
  command.add_option("--save-grace", flags.save_grace_s, "Seconds ranks have to end after Ctrl-C or SIGTERM")
      ->type_name("S")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
}

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
  CLI::App* command =
      app.add_subcommand("launch", "Start N ranks of any program on this host and supervise them");
  command->footer("The program and its arguments follow `--`: tessera launch -n 2 -- PROGRAM ARGS");
  add_launch_flags(*command, *flags);
  command->allow_extras();  // to say more than CLI11 would when `--` was forgotten
  command->callback([command, flags, program, log, &exit_code] {
    const std::vector<std::string> unknown = command->remaining();
    if (program.empty() || !unknown.empty())
      throw ConfigError(
          str(unknown.empty() ? "launch: no program was given" : "launch: unexpected '" + unknown[0] + "'",
              "; expected: tessera launch -n N [flags] -- PROGRAM [ARGS...]"));
    launcher::Options options = options_of(*flags);
    options.program = program.front();
    options.args.assign(program.begin() + 1, program.end());
    exit_code = launcher::run(options, log);
  });
}

std::optional<int> start_ranks_of_self(const LaunchFlags& flags, const std::vector<std::string>& args,
                                       const Logger& log) {
  if (!launcher::should_start_ranks(flags.nproc)) return std::nullopt;
  launcher::Options options = options_of(flags);
  options.program = std::filesystem::read_symlink("/proc/self/exe").string();
  options.args = args;
  return launcher::run(options, log);
}

}  // namespace tessera::tools
