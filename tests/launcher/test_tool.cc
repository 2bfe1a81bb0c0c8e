// A command with `launch` alone, and `self`, which starts ranks of itself as `tessera train` does.
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "core/error.h"
#include "core/str.h"
#include "launcher/process/error_file.h"
#include "tools/launch/launch_command.h"

int main(int argc, char** argv) {
  using namespace tessera;
  const std::vector<std::string> program = tools::take_program(argc, argv);
  CLI::App app("launcher test");
  app.require_subcommand(1);
  int exit_code = 0;
  const Logger log{LogOptions{}};
  tools::add_launch_command(app, program, log, exit_code);
  tools::LaunchFlags flags;
  std::string folder;
  CLI::App* self = app.add_subcommand("self", "write a file per rank to a folder");
  self->add_option("folder", folder)->required();
  tools::add_launch_flags(*self, flags);
  self->callback([&] {
    if (tools::starts_ranks(flags)) {
      exit_code = tools::run_ranks_of_self(flags, {argv + 1, argv + argc}, log);
    } else {
      const char* rank = std::getenv("RANK");
      std::ofstream(str(folder, "/self_", rank ? rank : "alone")) << "done";
    }
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const Error& error) {
    launcher::report_error(error.what());
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return exit_code;
}
