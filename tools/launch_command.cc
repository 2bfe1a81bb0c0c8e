#include "tools/launch_command.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "core/str.h"
#include "launcher/environment.h"
#include "launcher/launch.h"

namespace tessera::tools {
namespace {

constexpr double kMaxSeconds = 86400;

launcher::Options options_of(const LaunchFlags& flags) {
  launcher::Options options;
  options.nproc = flags.nproc.value_or(1);
  options.master_port = flags.master_port;
  options.log_dir = flags.log_dir;
  options.save_grace = std::chrono::milliseconds(static_cast<int64_t>(flags.save_grace_s * 1000));
  return options;
}

/// An option whose value is a number. CLI11's own takes "" for no value, and its errors name neither what was
/// found nor what is accepted.
template <class Number>
void add_number(CLI::App& command, const std::string& names, const char* type_name,
                const std::string& expected, Number& target, const std::string& description) {
  constexpr bool is_seconds = std::is_same_v<Number, double>;
  const std::string name =
      names.substr(names.find("--"), names.find(',', names.find("--")) - names.find("--"));
  const auto store = [name, expected, &target](const std::string& text) {
    std::conditional_t<is_seconds, double, int> value{};
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    const bool in_range = !is_seconds || (value >= 0 && value <= kMaxSeconds);  // no NaN either
    if (error != std::errc() || stop != end || !in_range)
      throw ConfigError(str(name, " ", text.empty() ? "''" : text, ": expected ", expected));
    target = value;
  };
  command.add_option_function<std::string>(names, store, description)->type_name(type_name);
}

}  // namespace

void add_launch_flags(CLI::App& command, LaunchFlags& flags) {
  add_number(command, "-n,--nproc,--nproc-per-node,--nproc_per_node", "N",
             str("1 to ", launcher::kMaxRanks, " ranks"), flags.nproc, "Ranks to start on this host");
  add_number(command, "--master-port,--master_port", "PORT", "1 to 65535, or 0 for a free port",
             flags.master_port, "Port of the rendezvous (default: a free one)");
  command
      .add_option(
          "--log-dir,--log_dir", flags.log_dir,
          "Folder for the output of ranks 1 and above (default: a temporary one, kept if it says more "
          "about a failure than was printed)")
      ->type_name("DIR");
  add_number(command, "--save-grace", "S", "seconds from 0 to 86400", flags.save_grace_s,
             "Seconds ranks have to end after Ctrl-C or SIGTERM (default: 30)");
  // Ranks inherit the variable; this process reads it too if it is a rank.
  command
      .add_option_function<std::string>(
          "--rendezvous-timeout,--rendezvous_timeout",
          [](const std::string& text) {
            double seconds = 0;
            const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
            if (error != std::errc() || stop != text.data() + text.size() ||
                !(seconds > 0 && seconds <= kMaxSeconds))
              throw ConfigError(str("--rendezvous-timeout ", text.empty() ? "''" : text,
                                    ": expected seconds above 0, at most ", kMaxSeconds));
            ::setenv("TESSERA_RENDEZVOUS_TIMEOUT_S", text.c_str(), /*overwrite=*/1);
          },
          "Seconds ranks wait for each other when they meet (default: 300)")
      ->type_name("S");
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
  command->allow_extras();  // for an error of our own where `--` was forgotten
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

int run_ranks_of_self(const LaunchFlags& flags, const std::vector<std::string>& args, const Logger& log) {
  launcher::Options options = options_of(flags);
  options.program = std::filesystem::read_symlink("/proc/self/exe").string();
  options.args = args;
  return launcher::run(options, log);
}

}  // namespace tessera::tools
