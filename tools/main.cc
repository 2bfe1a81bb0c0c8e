// The `tessera` command.
#include <iostream>

#include "core/error.h"
#include "launcher/error_file.h"
#include "tools/launch_command.h"
#include "tools/train_command.h"

namespace {

int fail(const char* message) {
  tessera::launcher::report_error(message);
  std::cerr << "error: " << message << '\n';
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tessera;
  const std::vector<std::string> program = tools::take_program(argc, argv);
  CLI::App app("Tessera: ZeRO-style sharded training on libtorch", "tessera");
  app.set_version_flag("--version", TESSERA_VERSION);
  app.require_subcommand(1);
  int exit_code = 0;
  const Logger log{LogOptions{}};
  tools::add_train_command(app, {argv + 1, argv + argc}, exit_code);
  tools::add_launch_command(app, program, log, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  return exit_code;
}
