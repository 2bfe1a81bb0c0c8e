// The `tessera` command.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <sstream>
#include <string_view>
#include <thread>
#include <typeinfo>

#include "comm/control/error_message.h"
#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/log.h"
#include "core/peer_failure.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/process/error_file.h"
#include "tools/commands.h"
#include "tools/common/command_line.h"
#include "tools/doctor/doctor_command.h"
#include "tools/launch/launch_command.h"
#include "tools/memory/memory_command.h"

namespace {

constexpr rlim_t kMinStackBytes = 1 << 20;

// Rank 0 shares the launcher's terminal, and the launcher prints the error that a rank reported: printed here
// too, it would stand there twice. Other ranks print to their logs.
bool launcher_prints_errors() {
  const auto report = tessera::text_variable("TESSERA_ERROR_FILE");
  return report && tessera::text_variable("RANK") == "0" && ::access(report->c_str(), F_OK) == 0;
}

using tessera::launcher::ErrorKind;

int fail(const tessera::Logger& log, const std::string& message, ErrorKind kind = ErrorKind::kOwn) {
  tessera::launcher::report_error(message, kind);
  if (launcher_prints_errors()) return 1;
  std::istringstream lines(message);  // one for each mistake of a configuration
  for (std::string line; std::getline(lines, line);) log.error(line);
  return 1;
}

/// Flushes standard output. A command whose output could not be written fails.
int finish(const tessera::Logger& log, int exit_code) {
  errno = 0;
  std::cout.flush();
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good();
  if (written || exit_code != 0) return exit_code;
  return fail(log, tessera::str("standard output cannot be written",
                                errno != 0 ? ": " + tessera::describe_errno(errno) : "",
                                "; what was printed is not complete"));
}

/// Opens the standard streams that are closed, so that no file or socket gets their numbers, into which this
/// process prints then. What is printed to standard output is an error at the end.
void hold_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    const int mode = O_CLOEXEC | (descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY);
    if (::open("/dev/null", mode) < 0) return;  // else it has the lowest number that is free: this one
  }
}

/// What libtorch and MKL need of any process, and end without saying so; nullptr: it is there.
const char* missing_of_process() {
  char folder[1];
  if (::getcwd(folder, sizeof folder) == nullptr && errno == ENOENT)
    return "the working folder has been removed; expected one that exists: cd elsewhere, and start again";
  if (::access("/proc/self/status", R_OK) != 0)
    return "/proc is not mounted, or cannot be read; expected the kernel's (mount -t proc proc /proc)";
  rlimit stack{};
  if (::getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < kMinStackBytes)
    return "the limit of a stack is too low for libtorch, which ends with a segmentation fault; expected at "
           "least 1 MiB (ulimit -s 1024)";
  return nullptr;
}

/// Runs before the constructors of libtorch and MKL, which look at the working folder. Of ours and of the C++
/// library nothing is initialized: system calls alone.
void check_process(int, char**, char**) {
  hold_standard_streams();
  const char* const missing = missing_of_process();
  if (missing == nullptr) return;
  for (const char* part : {"error: ", missing, "\n"})
    if (::write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  ::_exit(1);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const kCheckProcess)(int, char**,
                                                                          char**) = &check_process;

/// Throws std::system_error where no thread can be started: OpenMP ends the process then.
void check_threads() {
  std::thread([] {}).join();
}

/// The exit code of the command that was given.
int run(int num_given, char** given) {
  using namespace tessera;
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of file sizes fails, as on a full disk
  std::vector<char*> arguments = tools::with_command(num_given, given);
  int argc = static_cast<int>(arguments.size()) - 1;
  char** argv = arguments.data();
  const std::vector<std::string> program = tools::take_program(argc, argv);
  CLI::App app("Tessera: ZeRO-style sharded training on libtorch", "tessera");
  app.formatter(std::make_shared<tools::HelpFormatter>());  // commands added from here on inherit it
  app.set_version_flag("--version", TESSERA_VERSION, "Print the version and exit");
  app.require_subcommand(1);
  int exit_code = 0;
  const Logger log{LogOptions{}};
  tools::add_train_command(app, {argv + 1, argv + argc}, exit_code);
  tools::add_eval_command(app, {argv + 1, argv + argc}, exit_code);
  tools::add_predict_command(app);
  tools::add_launch_command(app, program, log, exit_code);
  tools::add_consolidate_command(app);
  tools::add_convert_command(app);
  tools::add_inspect_command(app, exit_code);
  tools::add_doctor_command(app, exit_code);
  tools::add_memory_command(app, {argv + 1, argv + argc}, exit_code);
  tools::add_completion_command(app);
  tools::refuse_empty_values(app);
  try {
    check_threads();
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    return finish(log, app.exit(asked));
  } catch (const CLI::ParseError& error) {
    return fail(log, tools::describe_mistake(app, error, argc, argv), ErrorKind::kWouldRecur);
  } catch (const ConfigError& error) {
    return fail(log, error.what(), ErrorKind::kWouldRecur);
  } catch (const PeerFailure& error) {
    return fail(log, error.what(), ErrorKind::kOfPeer);
  } catch (const Error& error) {
    return fail(log, error.what());
  } catch (const std::exception& error) {
    return fail(log, comm::error_message(error));  // without libtorch's back-traces
  }
  return finish(log, exit_code);
}

}  // namespace

/// Gloo throws on a thread of its own when a message has a length that no rank sends, which nobody can catch:
/// the process ends. This says why, in one line as any other error.
[[noreturn]] void end_by_gloo() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    if (std::string_view(typeid(error).name()).find("gloo") != std::string_view::npos)
      std::_Exit(
          fail(tessera::Logger(tessera::LogOptions{}),
               tessera::str("Gloo has received what no rank sends (", tessera::comm::error_message(error),
                            "): data was altered on its way, or something else is connected")));
  } catch (...) {
  }
  std::abort();
}

int main(int argc, char** argv) {
  std::set_terminate(end_by_gloo);
  const int exit_code = run(argc, argv);
#ifndef __SANITIZE_ADDRESS__   // which looks for leaks at an ordinary exit
  std::quick_exit(exit_code);  // libtorch's static objects take 80 ms to destroy, and nothing needs it
#endif
  return exit_code;
}
