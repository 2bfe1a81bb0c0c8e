// A rank for the launcher's tests: test_rank FOLDER ACTION [ARGS...]. It writes
// FOLDER/pid_RANK, then runs the action.
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "core/str.h"
#include "launcher/process/error_file.h"

namespace {

using tessera::str;
using Args = std::vector<std::string>;

std::string folder;
int rank = 0, world_size = 1;
std::atomic<int> num_interrupts{0};  // lock-free, so a handler may count with it
std::atomic<bool> terminated{false};

void leave(const std::string& name, const std::string& content) {
  const std::string path = str(folder, "/", name), temporary = str(path, ".", ::getpid(), "~");
  std::ofstream(temporary) << content;
  std::filesystem::rename(temporary, path);
}

void sleep_ms(int ms) { ::usleep(static_cast<useconds_t>(ms) * 1000); }

void wait_for_all() {
  for (int r = 0; r < world_size; ++r)
    while (!std::filesystem::exists(str(folder, "/pid_", r))) sleep_ms(2);
}

[[noreturn]] void sleep_forever() {
  for (;;) ::pause();
}

void ignore_sigterm() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_IGN);
}

int ok(const Args&) {
  std::cout << "out " << rank << std::endl;
  std::cerr << "err " << rank << std::endl;
  return 0;
}

int env(const Args&) {
  std::string text;
  for (char** entry = environ; *entry; ++entry) text += str(*entry, "\n");
  leave(str("env_", rank), text);
  return 0;
}

/// fail RANK CODE MESSAGE: reports the message; quiet: only prints it. The others ignore SIGTERM.
int fail(const Args& args, bool quiet) {
  ignore_sigterm();
  leave(str("ready_", rank), "");
  wait_for_all();
  if (rank != std::stoi(args.at(0))) sleep_forever();
  for (int r = 0; r < world_size; ++r)
    while (!std::filesystem::exists(str(folder, "/ready_", r))) sleep_ms(2);
  if (!quiet) tessera::launcher::report_error(args.at(2));
  std::cerr << "error: " << args.at(2) << std::endl << "goodbye" << std::endl;
  return std::stoi(args.at(1));
}

/// fail_alike CODE MESSAGE: all ranks report and print the same error, one after another.
int fail_alike(const Args& args) {
  wait_for_all();
  sleep_ms(300 * rank);
  tessera::launcher::report_error(args.at(1));
  if (rank > 0) std::cerr << "[error] " << args.at(1) << std::endl;
  return std::stoi(args.at(0));
}

/// cascade RANK [late]: that rank reports its error, maybe after the others, and ends slowly; the others fail
/// because of it and end quickly.
int cascade(const Args& args) {
  wait_for_all();
  if (rank == std::stoi(args.at(0))) {
    if (args.size() > 1) sleep_ms(300);
    tessera::launcher::report_error("the real reason");
    sleep_ms(400);
    return 7;
  }
  sleep_ms(150);
  tessera::launcher::report_error("connection closed by peer", tessera::launcher::ErrorKind::kOfPeer);
  return 1;
}

[[noreturn]] int hang(const Args& args) {
  if (!args.empty() && args[0] == "stubborn") ignore_sigterm();
  leave(str("ready_", rank), "");
  sleep_forever();
}

int restart_count() { return std::atoi(std::getenv("TORCHELASTIC_RESTART_COUNT")); }

/// fail_until N CODE: leaves its environment; rank 1 fails with CODE before the Nth restart.
int fail_until(const Args& args) {
  std::string text = "\n";
  for (char** entry = environ; *entry; ++entry) text += str(*entry, "\n");
  leave(str("env_", rank, "_", restart_count()), text);
  if (restart_count() >= std::stoi(args.at(0))) return 0;
  std::cout << "attempt " << restart_count() << std::endl;
  return rank == 1 ? std::stoi(args.at(1)) : hang({});
}

/// Rank 1 fails after a time.
int fail_slowly(const Args& args) {
  if (rank != 1) hang({});
  sleep_ms(std::stoi(args.at(0)));
  return 3;
}

/// mistake MESSAGE: an error of the configuration, on all ranks.
int mistake(const Args& args) {
  tessera::launcher::report_error(args.at(0), tessera::launcher::ErrorKind::kWouldRecur);
  return 1;
}

int raise_signal(const Args& args) {
  wait_for_all();
  if (rank != std::stoi(args.at(0))) sleep_forever();
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  const int signal = std::stoi(args.at(1));
  ::signal(signal, SIG_DFL);  // sanitizers install their own handlers
  ::raise(signal);
  return 99;
}

/// Ends some time after SIGTERM with 0, as a rank that saves a checkpoint.
int save(const Args& args) {
  ::signal(SIGTERM, [](int) { terminated = true; });
  leave(str("ready_", rank), "");
  while (!terminated) sleep_ms(5);
  if (args.size() > 1 && args[1] == "crash" && rank == 1) {
    ::signal(SIGSEGV, SIG_DFL);  // a sanitizer would turn it into an exit
    ::raise(SIGSEGV);
  }
  sleep_ms(std::stoi(args.at(0)));
  leave(str("saved_", rank), "");
  return 0;
}

std::atomic<int> taken[8], num_taken{0};

/// take_signals N [MS]: ends with 0 after N signals, and leaves their numbers. It has handlers after MS.
int take_signals(const Args& args) {
  if (args.size() > 1) {
    leave(str("started_", rank), "");
    sleep_ms(std::stoi(args[1]));
  }
  for (const int signal : {SIGUSR1, SIGUSR2, SIGTERM, SIGINT})
    ::signal(signal, [](int number) { taken[num_taken++ % 8] = number; });
  leave(str("ready_", rank), "");
  std::string numbers;
  for (int seen = 0; seen < std::stoi(args.at(0));) {
    if (seen == num_taken) {
      sleep_ms(5);
      continue;
    }
    numbers += str(taken[seen++].load(), " ");
    leave(str("signals_", rank), numbers);
  }
  return 0;
}

int count_interrupts(const Args&) {
  ::signal(SIGINT, [](int) { ++num_interrupts; });
  leave(str("ready_", rank), "");
  while (num_interrupts == 0) sleep_ms(5);
  sleep_ms(300);
  leave(str("interrupts_", rank), std::to_string(num_interrupts.load()));
  return 130;
}

/// Starts a child in its group and one in a new session. Neither ends by itself.
int family(const Args& args) {
  for (const bool daemon : {false, true}) {
    if (::fork() != 0) continue;
    if (daemon && (::setsid() < 0 || ::fork() != 0)) ::_exit(0);
    ignore_sigterm();
    leave(str(daemon ? "pid_daemon_" : "pid_child_", rank), std::to_string(::getpid()));
    sleep_forever();
  }
  for (const char* name : {"pid_daemon_", "pid_child_"})
    while (!std::filesystem::exists(str(folder, "/", name, rank))) sleep_ms(2);
  leave(str("ready_", rank), "");
  if (args.at(0) == "hang") sleep_forever();
  return std::stoi(args.at(0));
}

/// Fails, and leaves a process in a session of its own that ends after a second.
int leave_behind(const Args&) {
  if (::fork() != 0) {
    while (!std::filesystem::exists(str(folder, "/began_", rank))) sleep_ms(2);
    return 3;
  }
  ::setsid();
  leave(str("began_", rank), "");
  sleep_ms(1000);
  leave(str("finished_", rank), "");
  ::_exit(0);
}

/// Rank 0 serves on MASTER_PORT as c10d's store does; the others connect.
int rendezvous(const Args&) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT"))));
  address.sin_addr.s_addr = htonl(rank == 0 ? INADDR_ANY : INADDR_LOOPBACK);
  const auto* to = reinterpret_cast<const sockaddr*>(&address);
  for (int attempt = 0; attempt < 500; ++attempt) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (rank > 0) {
      if (::connect(fd, to, sizeof(address)) == 0) return 0;
      ::close(fd);
      sleep_ms(10);
      continue;
    }
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd, to, sizeof(address)) != 0 || ::listen(fd, 128) != 0) return 2;
    for (int peer = 1; peer < world_size; ++peer)
      if (::accept(fd, nullptr, nullptr) < 0) return 3;
    return 0;
  }
  return 4;
}

/// speak N: says N MiB.
int speak(const Args& args) {
  for (int line = 0; line < std::stoi(args.at(0)) << 10; ++line) std::cout << std::string(1023, '.') << '\n';
  std::cout.flush();
  leave(str("said_", rank), "");
  return 0;
}

int read_stdin(const Args&) {
  leave(str("stdin_", rank), std::string(std::istreambuf_iterator<char>(std::cin), {}));
  return 0;
}

/// Uses the terminal as a progress bar does, then reads from it, which must fail and not stop the rank.
int use_terminal(const Args&) {
  termios modes{};
  const bool set = ::tcgetattr(1, &modes) == 0 && ::tcsetattr(1, TCSANOW, &modes) == 0;
  std::cout << "hello from rank " << rank << std::endl;
  const int tty = ::open("/dev/tty", O_RDWR);
  char c = 0;
  const bool read_fails = tty < 0 || ::read(tty, &c, 1) < 0;
  leave(str("terminal_", rank), str(::isatty(1), ::isatty(2), set, read_fails));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  folder = argv[1];
  rank = std::atoi(std::getenv("RANK"));
  world_size = std::atoi(std::getenv("WORLD_SIZE"));
  leave(str("pid_", rank), std::to_string(::getpid()));
  const std::map<std::string, std::function<int(const Args&)>> actions = {
      {"ok", ok},
      {"env", env},
      {"fail", [](const Args& args) { return fail(args, false); }},
      {"fail_quietly", [](const Args& args) { return fail(args, true); }},
      {"cascade", cascade},
      {"fail_alike", fail_alike},
      {"fail_until", fail_until},
      {"fail_slowly", fail_slowly},
      {"mistake", mistake},
      {"raise", raise_signal},
      {"hang", hang},
      {"save", save},
      {"take_signals", take_signals},
      {"count_interrupts", count_interrupts},
      {"family", family},
      {"leave_behind", leave_behind},
      {"rendezvous", rendezvous},
      {"speak", speak},
      {"read_stdin", read_stdin},
      {"use_terminal", use_terminal},
  };
  return actions.at(argv[2])({argv + 3, argv + argc});
}
