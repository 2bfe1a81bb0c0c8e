#include "tools/launch/launch_plan.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <sstream>
#include <string_view>

#include "core/environment/environment.h"
#include "core/error.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/environment/env_file.h"
#include "launcher/environment/environment.h"
#include "launcher/environment/hosts.h"
#include "launcher/environment/run_id.h"
#include "launcher/failure/failure_report.h"

namespace tessera::tools {
namespace {

using launcher::Engine;
using launcher::Host;

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1000)));
}

/// The local ranks of "0:3,1-2:3"; empty for all, as in "3"; nullopt for none, as in "0".
std::optional<std::vector<int>> ranks_to_show(const std::string& text) {
  const ConfigError wrong("--tee ", text, ": expected 0 to 3, or ranks as in 0:3,1:3");
  std::vector<int> ranks;
  if (text.find(':') == text.npos) {
    const std::vector<int> streams = launcher::parse_numbers(text, "--tee");
    if (streams.size() != 1 || streams[0] > 3) throw wrong;
    return streams[0] == 0 ? std::nullopt : std::optional(ranks);
  }
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t colon = item.find(':');
    const std::vector<int> numbers = launcher::parse_numbers(item.substr(0, colon), "--tee");
    const std::string streams = colon == item.npos ? "" : item.substr(colon + 1);
    if (streams.size() != 1 || streams[0] < '0' || streams[0] > '3') throw wrong;
    if (streams != "0") ranks.insert(ranks.end(), numbers.begin(), numbers.end());
  }
  return ranks.empty() ? std::nullopt : std::optional(ranks);
}

/// `most`: the ranks of the host that has most.
void check_shown(const launcher::Options& options, int most) {
  for (const int rank : options.tee_ranks)
    if (rank >= most)
      throw ConfigError("--tee: there is no rank ", rank, " of a host; expected 0 to ", most - 1);
}

bool is_this_host(const Host& host) {
  const std::string& name = host.name;
  return host.user.empty() && (name == "localhost" || name == "127.0.0.1" || name == launcher::node_name());
}

/// The hosts that --hostfile, --include, --exclude, --nnodes and --nproc leave.
std::vector<Host> hosts_of(const LaunchFlags& flags) {
  if (flags.hostfile.empty()) {
    if (!flags.include.empty() || !flags.exclude.empty())
      throw ConfigError("--include, --exclude: choose hosts of a hostfile; expected --hostfile FILE too");
    if (flags.fewest_nodes > 0) throw ConfigError("--nnodes MIN:MAX: expected --hostfile FILE, the hosts");
    return {};
  }
  std::vector<Host> hosts =
      launcher::select_hosts(launcher::read_hostfile(flags.hostfile), flags.include, flags.exclude);
  const auto num_nodes = static_cast<size_t>(flags.num_nodes.value_or(static_cast<int>(hosts.size())));
  if (num_nodes < 1 || num_nodes > hosts.size())
    throw ConfigError("--nnodes ", num_nodes, ": the hostfile leaves ", hosts.size(), " hosts");
  hosts.resize(num_nodes);
  for (Host& host : hosts) {
    const auto nproc = static_cast<size_t>(flags.nproc.value_or(static_cast<int>(host.slots.size())));
    if (nproc < 1 || nproc > host.slots.size())
      throw ConfigError("--nproc ", nproc, ": host ", host.name, " has ", host.slots.size(), " slots");
    host.slots.resize(nproc);
  }
  return hosts;
}

/// Throws where other processes beside this one would start the same ranks. A place that flags give, a single
/// rank each, and an interactive shell of Slurm's are what somebody wants.
void check_is_alone(const LaunchFlags& flags) {
  if (flags.node_rank || flags.nproc == 1 || text_variable("SLURM_PTY_PORT")) return;
  const auto env = scheduler_environment();
  if (env && env->local_world_size > 1)
    throw ConfigError("this process already is rank ", env->rank, " of ", env->world_size, " (",
                      env->launcher, "), one of ", env->local_world_size,
                      " on this host that would each start ranks; expected one process a host, the program "
                      "itself, or that launcher's variables unset");
  if (flags.hostfile.empty()) return;
  if (const auto place = launcher::place_of_this_host(); place && place->num_nodes > 1)
    throw ConfigError(
        "--hostfile ", flags.hostfile, ": this process is one of ", place->num_nodes,
        " that something else has started, one a host, and each would start all ranks; expected "
        "one process, no --hostfile, or that launcher's variables unset");
}

/// The lines of all of --env-file.
std::vector<std::string> variables_of(const LaunchFlags& flags) {
  std::map<std::string, std::string> lines;
  for (const std::string& file : flags.env_files)
    for (const std::string& line : launcher::read_env_file(file))
      lines[line.substr(0, line.find('='))] = line;
  if (!flags.rendezvous_timeout.empty()) lines.erase("TESSERA_RENDEZVOUS_TIMEOUT_S");
  std::vector<std::string> variables;
  for (const auto& [name, line] : lines) variables.push_back(line);
  return variables;
}

launcher::Options common_options(const LaunchFlags& flags) {
  launcher::Options options;
  options.nproc = flags.nproc.value_or(1);
  options.master_port = flags.master_port;
  options.log_dir = flags.log_dir;
  const auto shown = flags.tee ? ranks_to_show(*flags.tee) : std::nullopt;
  options.tee = shown.has_value();
  options.tee_ranks = shown.value_or(std::vector<int>());
  options.bind_cores = flags.bind_cores || !flags.core_list.empty();
  if (!flags.core_list.empty())
    options.core_list = launcher::parse_numbers(flags.core_list, "--bind-core-list");
  options.variables = variables_of(flags);
  options.timeout = milliseconds_of(flags.timeout_s);
  options.save_grace = milliseconds_of(flags.save_grace_s);
  options.signals.handled = launcher::parse_signals(flags.signals_to_handle, "--signals-to-handle");
  return options;
}

/// Whether these are slots 0 to N-1. For others CUDA_VISIBLE_DEVICES says which they are.
bool are_first(const std::vector<int>& slots) {
  std::vector<int> first(slots.size());
  std::iota(first.begin(), first.end(), 0);
  return slots == first;
}

void check_devices(const launcher::Options& options, const std::vector<Host>& hosts) {
  for (const std::string& line : options.variables)
    for (const Host& host : hosts)
      if (line.starts_with("CUDA_VISIBLE_DEVICES=") && !are_first(host.slots))
        throw ConfigError("--env-file: has CUDA_VISIBLE_DEVICES, but the slots of host ", host.name, " are ",
                          join(host.slots, ","), ", which are its devices; expected one of the two");
}

/// The slots of this host, options.node_rank, and those before it.
void take_slots(launcher::Options& options, const std::vector<Host>& hosts) {
  options.num_nodes = static_cast<int>(hosts.size());
  for (const Host& host : hosts) options.ranks_by_node.push_back(static_cast<int>(host.slots.size()));
  const std::vector<int>& slots = hosts[static_cast<size_t>(options.node_rank)].slots;
  options.nproc = static_cast<int>(slots.size());
  if (!are_first(slots)) options.visible_devices = join(slots, ",");
}

/// This host's place by flags, else by what else started this process on each host.
void take_place(launcher::Options& options, const LaunchFlags& flags) {
  const auto place = launcher::place_of_this_host();
  const std::string address = place ? place->master_addr : text_variable("MASTER_ADDR").value_or("");
  options.num_nodes = flags.num_nodes.value_or(place ? place->num_nodes : 1);
  options.node_rank = flags.node_rank.value_or(place ? place->node_rank : 0);
  if (place && !flags.num_nodes && !place->range.empty())
    throw ConfigError("PET_NNODES=", place->range,
                      ": expected a number, or --nnodes N; pods whose number may change are torchrun's");
  if (place && !flags.nproc && !place->nproc_word.empty())
    throw ConfigError("PET_NPROC_PER_NODE=", place->nproc_word,
                      ": expected the number of ranks to start on this host, or --nproc N");
  if (place && !flags.nproc) options.nproc = place->nproc.value_or(1);
  if (place && options.master_port == 0) options.master_port = place->master_port;
  if (options.num_nodes > 1 && options.master_port == 0)
    options.master_port = integer_variable("MASTER_PORT").value_or(launcher::kDefaultMasterPort);
  if (!flags.master_addr.empty())
    options.master_addr = flags.master_addr;
  else if (options.num_nodes > 1)
    options.master_addr = address;
  if (options.num_nodes == 1) return;
  if (!place && !flags.node_rank)
    throw ConfigError("--nnodes ", options.num_nodes, ": expected --node-rank 0 to ", options.num_nodes - 1,
                      " on each host, or --hostfile FILE to start all from here");
  if (options.master_addr.empty())
    throw ConfigError(flags.num_nodes ? "--nnodes " : "PET_NNODES=", options.num_nodes, ": expected ",
                      flags.num_nodes ? "" : "PET_MASTER_ADDR, or ",
                      "--master-addr HOST, the address of host 0");
}

/// This process was started on a host by run_cluster.
void become_agent(launcher::Options& options, const LaunchFlags& flags, std::string_view kind) {
  options.is_agent = true;
  options.watch_stdin = kind == "stdin";
  options.signals.is_end_by_user_2 = !options.watch_stdin;
  options.run_id = text_variable("TESSERA_RUN_ID").value_or(options.run_id);
  options.restart_count = integer_variable("TORCHELASTIC_RESTART_COUNT").value_or(0);
  options.max_restarts = integer_variable("TORCHELASTIC_MAX_RESTARTS").value_or(0);
  const auto text = text_variable(launcher::kHostsVariable);
  if (!text) return take_place(options, flags);
  const std::vector<Host> hosts = launcher::decode_hosts(*text);
  const auto place = launcher::place_of_this_host();
  options.node_rank = flags.node_rank.value_or(place ? place->node_rank : 0);
  // Slurm numbers its tasks by its own order of hosts.
  if (const auto node = text_variable("SLURMD_NODENAME"))
    for (size_t i = 0; i < hosts.size(); ++i)
      if (hosts[i].name == *node) options.node_rank = static_cast<int>(i);
  if (options.node_rank < 0 || options.node_rank >= static_cast<int>(hosts.size()))
    throw ConfigError("--node-rank ", options.node_rank, ": ", launcher::kHostsVariable, " has ",
                      hosts.size(), " hosts");
  options.master_addr = flags.master_addr.empty() ? hosts.front().name : flags.master_addr;
  take_slots(options, hosts);
}

/// The flags that the launchers on the hosts get as they are.
std::vector<std::string> flags_for_hosts(const LaunchFlags& flags) {
  std::vector<std::string> words = {str("--save-grace=", flags.save_grace_s)};
  if (!flags.log_dir.empty())
    words.push_back("--log-dir=" + std::filesystem::absolute(flags.log_dir).string());
  if (flags.tee) words.push_back("--tee=" + *flags.tee);
  if (flags.bind_cores) words.emplace_back("--bind-cores");
  if (!flags.core_list.empty()) words.push_back("--bind-core-list=" + flags.core_list);
  if (!flags.signals_to_handle.empty()) words.push_back("--signals-to-handle=" + flags.signals_to_handle);
  return words;
}

int nodes_in_slurm(const LaunchFlags& flags) {
  if (flags.num_nodes) return *flags.num_nodes;
  for (const char* name : {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"})
    if (const auto nodes = integer_variable(name)) return *nodes;
  throw ConfigError("--launcher slurm: expected --nnodes N or --hostfile FILE outside of a job of Slurm");
}

/// What ssh takes as a host, but the others do not.
void check_hosts(const std::vector<Host>& hosts, Engine engine, const std::string& name) {
  for (const Host& host : hosts) {
    const bool has_user = !host.user.empty() && (engine == Engine::kOpenMpi || engine == Engine::kSlurm);
    if (has_user || (host.name.find(':') != std::string::npos && engine != Engine::kSsh))
      throw ConfigError("--launcher ", name, ": it takes no host with ",
                        has_user ? "a user" : "an IPv6 address", ", but the hostfile has ", host.target(),
                        "; expected ",
                        has_user ? host.name + ", and User in ssh's configuration" : "its name", ", or ssh");
  }
}

launcher::ClusterOptions cluster_of(const LaunchFlags& flags, Engine engine, const launcher::Options& local,
                                    std::vector<Host> hosts) {
  launcher::ClusterOptions cluster;
  cluster.engine = engine;
  cluster.hosts = std::move(hosts);
  cluster.num_nodes = cluster.hosts.empty() ? nodes_in_slurm(flags) : static_cast<int>(cluster.hosts.size());
  cluster.nproc = flags.nproc.value_or(1);
  cluster.master_addr = flags.master_addr;
  cluster.master_port = flags.master_port;
  cluster.ssh_port = flags.ssh_port;
  cluster.engine_args = words_of(flags.launcher_args);
  cluster.launcher = std::filesystem::read_symlink("/proc/self/exe").string();
  cluster.flags = flags_for_hosts(flags);
  cluster.variables = local.variables;
  cluster.directory = std::filesystem::current_path().string();
  cluster.run_id = launcher::new_run_id();
  cluster.run_secret = launcher::new_run_secret(local.variables);
  cluster.save_grace = local.save_grace;
  cluster.timeout = local.timeout;
  cluster.signals = local.signals;
  cluster.signals.is_end_by_user_2 = engine == Engine::kOpenMpi || engine == Engine::kSlurm;
  if (engine == Engine::kPdsh)  // it passes none on, but ends the run as by SIGTERM
    cluster.signals.handled.insert(cluster.signals.handled.end(), {SIGUSR1, SIGUSR2});
  return cluster;
}

/// --max-restarts, and MIN of MIN:MAX. `engine`: what starts ranks on other hosts.
launcher::RestartPolicy restarts_of(const LaunchFlags& flags, Engine engine, const launcher::Options& local) {
  launcher::RestartPolicy policy;
  const bool is_here = engine == Engine::kLocal;
  const auto place = is_here ? launcher::place_of_this_host() : std::nullopt;
  policy.fewest = flags.fewest_nodes;
  policy.max_restarts =
      flags.max_restarts.value_or(policy.fewest > 0 ? flags.num_nodes.value_or(0) - policy.fewest
                                  : place           ? place->max_restarts
                                                    : 0);
  if (policy.max_restarts < 0)
    throw ConfigError("--max-restarts ", policy.max_restarts, ": expected 0 or more");
  if (!is_here && flags.fewest_nodes > 0 && engine != Engine::kSsh)
    throw ConfigError("--nnodes MIN:MAX: only ssh says which host is lost; expected --launcher ssh");
  if (is_here && local.num_nodes > 1 && policy.max_restarts > 0)
    throw ConfigError(flags.max_restarts ? "--max-restarts" : "PET_MAX_RESTARTS",
                      ": the launchers of hosts that were started one by one do not know of each other; "
                      "expected --hostfile FILE, torchrun --max-restarts, or --max-restarts 0");
  return policy;
}

}  // namespace

/// The first flag given that only who starts the ranks can follow; "": none.
static std::string flag_of_launcher(const LaunchFlags& flags) {
  const std::pair<const char*, bool> given[] = {
      {"--max-restarts", flags.max_restarts.value_or(0) != 0},
      {"--env-file", !flags.env_files.empty()},
      {"--log-dir", !flags.log_dir.empty()},
      {"--tee", flags.tee.has_value()},
      {"--timeout", flags.timeout_s != 0},
      {"--signals-to-handle", !flags.signals_to_handle.empty()},
      {"--bind-cores-to-rank", flags.bind_cores},
      {"--bind-core-list", !flags.core_list.empty()},
      {"--node-rank", flags.node_rank.has_value()},
      {"--master-addr", !flags.master_addr.empty()},
      {"--master-port", flags.master_port != 0},
      {"--include", !flags.include.empty()},
      {"--exclude", !flags.exclude.empty()},
      {"--ssh-port", flags.ssh_port != 0},
      {"--launcher-args", !flags.launcher_args.empty()},
      {"--hostfile", !flags.hostfile.empty()},
      {"--nnodes", flags.num_nodes.value_or(1) > 1},
      {"--save-grace", flags.save_grace_s != LaunchFlags().save_grace_s},
  };
  for (const auto& [flag, is_given] : given)
    if (is_given) return flag;
  return "";
}

bool starts_ranks(const LaunchFlags& flags) {
  const bool is_rank =
      text_variable("RANK") && (text_variable("TESSERA_RUN_ID") || text_variable("TORCHELASTIC_RUN_ID"));
  const bool names_hosts = !flags.hostfile.empty() || flags.num_nodes.value_or(1) > 1 ||
                           (!flags.launcher.empty() && launcher::engine_of(flags.launcher) != Engine::kLocal);
  if (names_hosts && !is_rank) return true;
  if (launcher::should_start_ranks(flags.nproc)) return true;
  const std::string flag = flag_of_launcher(flags);
  if (flag.empty()) return false;
  if (!in_group()) return true;  // one rank, and a launcher that does what the flag says
  // Tessera's launcher gives its ranks the flags that it has followed, and nothing of a torchrun around it.
  if (!text_variable("TESSERA_RUN_ID") || text_variable("TORCHELASTIC_RUN_ID"))
    throw ConfigError(flag, ": these ranks were started by ", environment().launcher,
                      ", which does not follow it; expected the flag where Tessera starts them "
                      "(--nproc, --hostfile, --launcher), or that launcher's own");
  return false;
}

LaunchPlan plan_launch(const LaunchFlags& flags) {
  LaunchPlan plan;
  plan.local = common_options(flags);
  const auto agent = text_variable(launcher::kAgentVariable);
  if (!agent) check_is_alone(flags);
  std::vector<Host> hosts = agent ? std::vector<Host>() : hosts_of(flags);
  check_devices(plan.local, hosts);
  Engine engine = hosts.empty() ? Engine::kLocal : Engine::kSsh;
  if (!flags.launcher.empty()) engine = launcher::engine_of(flags.launcher);
  const bool is_here = hosts.size() == 1 && is_this_host(hosts.front());
  if (is_here && flags.launcher.empty()) engine = Engine::kLocal;
  if (engine != Engine::kLocal && !agent) {
    if (flags.node_rank)
      throw ConfigError("--node-rank: --launcher starts all hosts from here; expected one of them");
    if (hosts.empty() && engine != Engine::kSlurm)
      throw ConfigError("--launcher ", flags.launcher, ": expected --hostfile FILE, the hosts");
    check_hosts(hosts, engine, flags.launcher);
    plan.restarts = restarts_of(flags, engine, plan.local);
    plan.cluster = cluster_of(flags, engine, plan.local, std::move(hosts));
    plan.num_ranks = plan.cluster->num_nodes * plan.cluster->nproc;
    int most = plan.cluster->nproc;
    if (!plan.cluster->hosts.empty()) plan.num_ranks = most = 0;
    for (const Host& host : plan.cluster->hosts) {
      plan.num_ranks += static_cast<int>(host.slots.size());
      most = std::max(most, static_cast<int>(host.slots.size()));
    }
    check_shown(plan.local, most);
    return plan;
  }
  if (!hosts.empty() && !is_here)
    throw ConfigError(
        "--launcher local: the hostfile names other hosts; expected this one alone, or another launcher");
  if (flags.hostfile.empty() && (flags.ssh_port != 0 || !flags.launcher_args.empty()))
    throw ConfigError(flags.ssh_port != 0 ? "--ssh-port" : "--launcher-args",
                      ": the ranks are started on this host alone; expected --hostfile or --launcher too");
  if (is_here && flags.node_rank.value_or(0) != 0)
    throw ConfigError("--node-rank ", *flags.node_rank, ": the hostfile has 1 host; expected 0, or none");
  if (agent)
    become_agent(plan.local, flags, *agent);
  else
    take_place(plan.local, flags);
  if (!hosts.empty()) take_slots(plan.local, hosts);
  if (!agent && plan.local.num_nodes == 1) check_shown(plan.local, plan.local.nproc);
  if (!agent) plan.restarts = restarts_of(flags, Engine::kLocal, plan.local);
  plan.is_first_host = plan.local.node_rank == 0;
  plan.num_ranks = plan.local.num_nodes * plan.local.nproc;
  return plan;
}

int run_plan(LaunchPlan plan, const std::string& program, const std::vector<std::string>& args,
             const Logger& log) {
  if (plan.cluster) {
    plan.cluster->program = program;
    plan.cluster->args = args;
    plan.cluster->restarts = std::move(plan.restarts);
    return launcher::run_cluster(*plan.cluster, log);
  }
  plan.local.program = program;
  plan.local.args = args;
  plan.local.restarts = std::move(plan.restarts);
  return launcher::run(plan.local, log);
}

}  // namespace tessera::tools
