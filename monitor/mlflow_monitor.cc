#include "monitor/mlflow_monitor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/environment/finishing.h"
#include "core/files/disk.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/variables.h"
#include "monitor/file_name.h"
#include "monitor/wall_time.h"

namespace tessera {

extern const std::string_view kMlflowFeed;  // mlflow_feed.py, by cmake/EmbedText.cmake

namespace {

using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

/// Python itself starts in some 30 ms.
constexpr std::chrono::seconds kStartTimeout{60};

/// An address without what may be a password.
std::string shown(const std::string& address) {
  std::string text = address.substr(0, address.find('?'));
  const size_t begin = text.find("//"), at = text.find('@');
  if (begin != text.npos && at != text.npos && at > begin) text.erase(begin + 2, at - begin - 1);
  return text;
}

MlflowOptions with_environment(MlflowOptions options) {
  if (options.server.empty())
    options.server = text_variable("MLFLOW_TRACKING_URI").value_or("http://127.0.0.1:5000");
  if (options.experiment.empty())
    options.experiment = text_variable("MLFLOW_EXPERIMENT_NAME").value_or("Default");
  std::vector<std::string> unread;
  for (const char* name : {"MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID", "MLFLOW_RUN_NAME"})
    if (text_variable(name)) unread.emplace_back(name);
  if (!unread.empty())
    options.log.warning(
        str("mlflow: ", join(unread, ", "),
            " of the environment: not read; expected mlflow.experiment_name and mlflow.run_name "
            "in the configuration, or MLFLOW_EXPERIMENT_NAME"));
  return options;
}

/// JSON has no number for them; Python's float() reads the words.
ordered_json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

}  // namespace

void forget_mlflow_run(const std::filesystem::path& folder) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::remove(folder / kMlflowRunIdName, error);
  if (error) throw Error(folder / kMlflowRunIdName, " cannot be removed: ", error.message());
}

MlflowMonitor::MlflowMonitor(MlflowOptions options)
    : options_(with_environment(std::move(options))),
      folder_("tessera_mlflow"),
      events_(folder_.path() / "events.jsonl", {}) {
  start();
}

void MlflowMonitor::start() {
  const std::string python = text_variable("TESSERA_PYTHON").value_or("python3");
  const std::string script = (folder_.path() / "mlflow_feed.py").string();
  replace_file(script, kMlflowFeed);
  int in[2], out[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0)
    throw Error("no socket: ", std::strerror(errno));
  input_ = FileDescriptor(in[0]);
  FileDescriptor childs_input(in[1]);
  if (::pipe2(out, O_CLOEXEC | O_NONBLOCK) != 0) throw Error("no pipe: ", std::strerror(errno));
  output_ = FileDescriptor(out[0]);
  FileDescriptor childs_output(out[1]);
  ::fcntl(childs_output.get(), F_SETFL, 0);  // Python waits where this process does not read

  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, childs_input.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, childs_output.get(), STDOUT_FILENO);
  // A connection that the child had too would not close when this process is killed.
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // In a session of its own it is not interrupted, or killed, together with the rank.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  const char* const words[] = {python.c_str(), script.c_str(), nullptr};
  std::string finishes = str(kFinishesVariable, "=1");
  std::vector<char*> variables{finishes.data()};
  for (char** entry = environ; *entry != nullptr; ++entry) variables.push_back(*entry);
  variables.push_back(nullptr);
  const int error = ::posix_spawnp(&process_, python.c_str(), &files, &attributes,
                                   const_cast<char* const*>(words), variables.data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  const std::string needs = "mlflow: expected Python with MLflow's library (pip install mlflow-skinny)";
  if (error != 0) {
    process_ = -1;
    throw ConfigError(needs, "; ", python, " cannot be started: ", std::strerror(error),
                      ": TESSERA_PYTHON names another one");
  }
  childs_output.reset();
  const std::string line = json_text(ordered_json{{"folder", folder_.path().string()},
                                                  {"server", options_.server},
                                                  {"shown", shown(options_.server)},
                                                  {"experiment", options_.experiment},
                                                  {"run_name", options_.run_name},
                                                  {"id_file", options_.id_file.string()},
                                                  {"resume", options_.resume}}) +
                           "\n";
  (void)::send(input_.get(), line.data(), line.size(), MSG_NOSIGNAL);  // what is wrong is heard
  const auto deadline = Clock::now() + kStartTimeout;
  while (heard_.find('\n') == heard_.npos && Clock::now() < deadline)
    if (!hear(std::chrono::milliseconds(100))) break;
  const std::string answer = heard_.substr(0, heard_.find('\n'));
  if (answer == "ready") {
    heard_.erase(0, answer.size() + 1);
    return;
  }
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
  process_ = -1;
  throw ConfigError(needs, "; ", python,
                    answer == "missing" ? " has none" : " has not run mlflow_feed.py: what it said is above",
                    ": TESSERA_PYTHON names another one");
}

MlflowMonitor::~MlflowMonitor() {
  if (process_ < 0) return;
  try {
    close(RunStatus::kFailed);
  } catch (const std::exception&) {  // of the log
  }
}

void MlflowMonitor::scalars(int64_t step, const Scalars& scalars) {
  ordered_json values = ordered_json::object();
  for (const auto& [name, value] : scalars) values[name] = number(value);
  if (!values.empty()) write({{"step", step}, {"time", wall_time_s()}, {"scalars", values}});
}

void MlflowMonitor::image(const std::string& name, int64_t step, const PngView& png) {
  if (process_ < 0) return;
  // A folder for each: the same name and step may come again before the process has sent it.
  const std::filesystem::path place =
      folder_.path() / step_file(str("images/", ++num_images_), name, step, ".png");
  Disk().create_directories(place.parent_path());
  if (png.file.empty())
    replace_file(place, png.bytes);
  else
    std::filesystem::create_symlink(std::filesystem::absolute(png.file), place);
  write({{"artifact", place.string()}, {"in", "images"}});
}

void MlflowMonitor::text(const std::string& name, int64_t step, const std::string& text) {
  write({{"text", text}, {"name", step_file("texts", name, step, ".txt")}});
}

void MlflowMonitor::params(const ordered_json& params) { write({{"params", params}}); }

void MlflowMonitor::artifact(const std::filesystem::path& file) {
  write({{"artifact", file.string()}, {"in", nullptr}});
}

void MlflowMonitor::write(const ordered_json& record) {
  if (process_ >= 0 && !hear(std::chrono::milliseconds(0))) end();
  if (process_ >= 0) events_.append(json_text(record));
}

/// Reads what the process says, and logs its warning. False: it has ended.
bool MlflowMonitor::hear(std::chrono::milliseconds limit) {
  pollfd polled{output_.get(), POLLIN, 0};
  ::poll(&polled, 1, static_cast<int>(limit.count()));
  char buffer[4096];
  ssize_t size = 0;
  while ((size = ::read(output_.get(), buffer, sizeof buffer)) > 0)
    heard_.append(buffer, static_cast<size_t>(size));
  constexpr std::string_view kWarning = "warning ";
  for (size_t end; heard_.starts_with(kWarning) && (end = heard_.find('\n')) != heard_.npos;) {
    warn(heard_.substr(kWarning.size(), end - kWarning.size()));
    heard_.erase(0, end + 1);
  }
  return size != 0;
}

void MlflowMonitor::close(RunStatus status) {
  if (process_ < 0) return;
  try {
    write({{"status", name_of(status)}});
  } catch (const Error& error) {  // the process takes the run for killed
    warn(error.what());
  }
  input_.reset();
  // When a rank fails, the launcher gives the others two seconds. A server that has failed to take something
  // most likely goes on so.
  const auto limit = status == RunStatus::kFailed ? std::chrono::milliseconds(1'500)
                     : has_warned_                ? std::chrono::milliseconds(5'000)
                                                  : std::chrono::milliseconds(10'000);
  const auto deadline = Clock::now() + limit;
  bool has_ended = false;
  while (!has_ended && Clock::now() < deadline) has_ended = !hear(std::chrono::milliseconds(100));
  if (has_ended) return end();
  // It goes on for a time, and removes the folder.
  folder_.keep();
  process_ = -1;
  warn(str(shown(options_.server), " has not taken everything in time"));
}

/// The process has said its last: it has sent all, or the server has refused the run.
void MlflowMonitor::end() { ::waitpid(std::exchange(process_, -1), nullptr, 0); }

void MlflowMonitor::warn(const std::string& what) {
  if (!std::exchange(has_warned_, true))
    options_.log.warning(str("mlflow: ", what, "; the run does not wait for it"));
}

}  // namespace tessera
