#include "launcher/cluster.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/ascii.h"
#include "core/environment/environment.h"
#include "core/error.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/environment/env_file.h"
#include "launcher/environment/environment.h"

namespace tessera::launcher {
namespace {

constexpr std::pair<const char*, Engine> kEngines[] = {{"local", Engine::kLocal},
                                                       {"ssh", Engine::kSsh},
                                                       {"pdsh", Engine::kPdsh},
                                                       {"openmpi", Engine::kOpenMpi},
                                                       {"slurm", Engine::kSlurm}};

/// Variables of this process that ranks on other hosts get too; a host's own are not among them.
constexpr std::array<std::string_view, 16> kExportedPrefixes = {
    "NCCL_", "GLOO_",   "UCX_",  "PYTHON",           "OMP_",         "MKL_",       "TORCH_",  "TESSERA_",
    "HF_",   "MLFLOW_", "PATH=", "LD_LIBRARY_PATH=", "VIRTUAL_ENV=", "CUDA_HOME=", "CUBLAS_", "LC_ALL="};

constexpr std::string_view kSecret = "TESSERA_RUN_SECRET=";

bool is_exported(std::string_view line) {
  constexpr std::array<std::string_view, 3> kOwn = {"TESSERA_LAUNCH_",
                                                    "TESSERA_ERROR_FILE=", "TESSERA_MEMORY_DIR="};
  if (std::any_of(kOwn.begin(), kOwn.end(), [&](std::string_view own) { return line.starts_with(own); }))
    return false;
  return std::any_of(kExportedPrefixes.begin(), kExportedPrefixes.end(),
                     [&](std::string_view prefix) { return line.starts_with(prefix); });
}

/// What the launcher on each host needs to know.
std::vector<std::string> agent_variables(const ClusterOptions& options, const char* agent) {
  std::vector<std::string> variables = {str("TESSERA_RUN_ID=", options.run_id),
                                        str(kAgentVariable, "=", agent),
                                        str("TORCHELASTIC_RESTART_COUNT=", options.restart_count),
                                        str("TORCHELASTIC_MAX_RESTARTS=", options.restarts.max_restarts)};
  if (!options.run_secret.empty()) variables.push_back(str(kSecret, options.run_secret));
  if (!options.hosts.empty()) variables.push_back(str(kHostsVariable, "=", encode_hosts(options.hosts)));
  return variables;
}

/// Another one after each restart: what is left of an attempt must not disturb the next.
int master_port(const ClusterOptions& options) {
  if (options.master_port != 0) return options.master_port;
  return port_of_run(options.restart_count == 0 ? options.run_id
                                                : str(options.run_id, "/", options.restart_count));
}

/// `tessera launch ... -- PROGRAM ARGS` for a host; `place`: the flags that say which one it is.
std::vector<std::string> agent_command(const ClusterOptions& options, const std::vector<std::string>& place) {
  std::vector<std::string> command = {options.launcher, "launch"};
  if (options.hosts.empty()) command.push_back(str("--nproc=", options.nproc));
  const std::string first = options.hosts.empty() ? "" : options.hosts.front().name;
  if (const std::string address = options.master_addr.empty() ? first : options.master_addr; !address.empty())
    command.push_back("--master-addr=" + address);
  command.push_back(str("--master-port=", master_port(options)));
  if (options.timeout.count() > 0)
    command.push_back(str("--timeout=", static_cast<double>(options.timeout.count()) / 1000));
  command.insert(command.end(), place.begin(), place.end());
  command.insert(command.end(), options.flags.begin(), options.flags.end());
  command.push_back("--");
  command.push_back(options.program);
  command.insert(command.end(), options.args.begin(), options.args.end());
  return command;
}

/// A line for a shell: "cd DIR && export A=B ... && exec PROGRAM ARGS || exit" for ssh's, which is sh: other
/// users see the arguments of programs, and export is none. That shell would read on after a cd that fails,
/// and its input stays open. pdsh's may be csh: "cd DIR && exec env A=B ... PROGRAM ARGS".
std::string shell_line(const ClusterOptions& options, const char* agent,
                       const std::vector<std::string>& command,
                       const std::vector<std::string>& variables_of_host = {}) {
  const bool is_sh = options.engine == Engine::kSsh;
  std::string line = str("cd ", shell_quoted(options.directory), is_sh ? " && export" : " && exec env");
  const auto add = [&](const std::string& variable) {
    if (is_sh ? is_variable_name(variable.substr(0, variable.find('='))) : !variable.starts_with(kSecret))
      line += " " + shell_quoted(variable);
  };
  for (char** entry = environ; *entry; ++entry)
    if (is_exported(*entry)) add(*entry);
  for (const auto& variables : {options.variables, agent_variables(options, agent), variables_of_host})
    for (const std::string& variable : variables) add(variable);
  if (is_sh) line += " && exec";
  for (const std::string& word : command) line += " " + shell_quoted(word);
  if (is_sh) line += " || exit";
  return line;
}

EngineCommand ssh_agent_command(const ClusterOptions& options, size_t node) {
  std::vector<std::string> variables;
  if (!options.memory_folders.empty())
    variables.push_back("TESSERA_MEMORY_DIR=" + options.memory_folders[node]);
  return ssh_command(
      options, options.hosts[node].target(),
      shell_line(options, "stdin", agent_command(options, {str("--node-rank=", node)}), variables));
}

std::vector<std::string> names_of(const std::vector<Host>& hosts) {
  std::vector<std::string> names;
  for (const Host& host : hosts) names.push_back(host.target());
  return names;
}

EngineCommand pdsh_command(const ClusterOptions& options) {
  EngineCommand pdsh{.program = "pdsh", .label = "pdsh", .end_signal = SIGTERM};
  pdsh.variables = {"PDSH_RCMD_TYPE=ssh"};
  if (options.ssh_port != 0) {
    const std::string before = text_variable("PDSH_SSH_ARGS_APPEND").value_or("");
    pdsh.variables.push_back(str("PDSH_SSH_ARGS_APPEND=", before, " -p ", options.ssh_port));
  }
  // -S: the largest exit code; -N: no host in front of each line; -f: all at the same time.
  pdsh.args = {
      "-S", "-N", "-f", std::to_string(options.hosts.size()), "-w", join(names_of(options.hosts), ",")};
  pdsh.args.insert(pdsh.args.end(), options.engine_args.begin(), options.engine_args.end());
  std::string line = shell_line(options, "stdin", agent_command(options, {"--node-rank=@PLACE@"}));
  // pdsh replaces %n by the host's number, and %% by %.
  std::string escaped;
  for (const char c : line) escaped += c == '%' ? "%%" : std::string(1, c);
  escaped.replace(escaped.find("@PLACE@"), 7, "%n");
  pdsh.args.push_back(escaped);
  return pdsh;
}

EngineCommand openmpi_command(const ClusterOptions& options) {
  EngineCommand mpirun{.program = "mpirun", .label = "mpirun", .end_signal = SIGUSR2};
  mpirun.args = {"-n",        std::to_string(options.hosts.size()),
                 "--host",    join(names_of(options.hosts), ","),
                 "--map-by",  "ppr:1:node",
                 "--bind-to", "none"};
  for (const auto& variables : {options.variables, agent_variables(options, "1")})
    for (const std::string& variable : variables) {  // the values go by the environment
      mpirun.variables.push_back(variable);
      mpirun.args.insert(mpirun.args.end(), {"-x", variable.substr(0, variable.find('='))});
    }
  for (char** entry = environ; *entry; ++entry)
    if (const std::string_view line = *entry; is_exported(line))
      mpirun.args.insert(mpirun.args.end(), {"-x", std::string(line.substr(0, line.find('=')))});
  mpirun.args.insert(mpirun.args.end(), options.engine_args.begin(), options.engine_args.end());
  const std::vector<std::string> command = agent_command(options, {});
  mpirun.args.insert(mpirun.args.end(), command.begin(), command.end());
  return mpirun;
}

EngineCommand slurm_command(const ClusterOptions& options) {
  EngineCommand srun{.program = "srun", .label = "srun", .end_signal = SIGUSR2};
  srun.variables = options.variables;
  for (const std::string& variable : agent_variables(options, "1")) srun.variables.push_back(variable);
  size_t slots = options.hosts.empty() ? static_cast<size_t>(options.nproc) : 1;
  for (const Host& host : options.hosts) slots = std::max(slots, host.slots.size());
  const std::string nodes = std::to_string(options.num_nodes);
  srun.args = {"--nodes=" + nodes,
               "--ntasks=" + nodes,
               "--ntasks-per-node=1",
               str("--cpus-per-task=", slots),
               "--kill-on-bad-exit=1",
               "--export=ALL",
               "--chdir=" + options.directory};
  if (!options.hosts.empty()) srun.args.push_back("--nodelist=" + join(names_of(options.hosts), ","));
  srun.args.insert(srun.args.end(), options.engine_args.begin(), options.engine_args.end());
  const std::vector<std::string> command = agent_command(options, {});
  srun.args.insert(srun.args.end(), command.begin(), command.end());
  return srun;
}

}  // namespace

Engine engine_of(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& [known, engine] : kEngines) {
    if (ascii_lower(name) == known) return engine;
    names.emplace_back(known);
  }
  throw ConfigError("--launcher ", name.empty() ? "''" : name, ": expected one of ", join(names, ", "));
}

/// ssh runs a shell on the host that reads what to do from standard input: neither values of variables nor
/// arguments stand in a command line that others may read, and no limit of its length applies.
EngineCommand ssh_command(const ClusterOptions& options, const std::string& host, const std::string& line) {
  EngineCommand ssh{.program = "ssh", .label = "ssh to " + host};
  ssh.args = {"-o", "BatchMode=yes", "-T"};
  if (options.ssh_port != 0) ssh.args.insert(ssh.args.end(), {"-p", std::to_string(options.ssh_port)});
  ssh.args.insert(ssh.args.end(), options.engine_args.begin(), options.engine_args.end());
  // A host that is down does not answer, and one that is gone does not close its connections. The first value
  // of an option counts: --launcher-args'.
  for (const char* option : {"ConnectTimeout=30", "ServerAliveInterval=15", "ServerAliveCountMax=3"})
    ssh.args.insert(ssh.args.end(), {"-o", option});
  ssh.args.insert(ssh.args.end(), {"--", host, "/bin/sh"});
  ssh.input = line + "\n";
  return ssh;
}

std::string shell_quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

std::vector<EngineCommand> engine_commands(const ClusterOptions& options) {
  std::vector<EngineCommand> commands;
  switch (options.engine) {
    case Engine::kPdsh: commands.push_back(pdsh_command(options)); break;
    case Engine::kOpenMpi: commands.push_back(openmpi_command(options)); break;
    case Engine::kSlurm: commands.push_back(slurm_command(options)); break;
    case Engine::kSsh:
      for (size_t node = 0; node < options.hosts.size(); ++node)
        commands.push_back(ssh_agent_command(options, node));
      break;
    case Engine::kLocal: break;
  }
  return commands;
}

}  // namespace tessera::launcher
