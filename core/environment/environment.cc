#include "core/environment/environment.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "core/environment/environment_schemes.h"
#include "core/environment/slurm_lists.h"
#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "core/variables.h"

namespace tessera {
namespace {

/// The first of these variables that is set; null if none is.
const char* first_set(const VariableNames& names) {
  const auto found = std::find_if(names.begin(), names.end(), text_variable);
  return found == names.end() ? nullptr : *found;
}

std::chrono::milliseconds parse_seconds(const char* name, const std::string& text) {
  constexpr double kMost_s = 1e6;
  const std::optional<double> seconds = parse_number<double>(text);
  if (!seconds || !(*seconds > 0 && *seconds <= kMost_s))
    throw CommError(name, "='", text, "': expected seconds, above 0 and at most ", kMost_s);
  return std::chrono::milliseconds(std::max<int64_t>(1, std::llround(*seconds * 1e3)));
}

/// `because`: added to the error for a number out of range, " (WORLD_SIZE=4)".
int optional(const char* name, int fallback, int least, int most, const std::string& because = "") {
  const auto text = text_variable(name);
  if (!text) return fallback;
  const std::optional<int> value = parse_number<int>(*text);
  if (!value) throw CommError(name, "='", *text, "' is not an integer");
  if (*value < least || *value > most)
    throw CommError(name, "=", *value, " is out of range: expected ", least, " to ", most, because);
  return *value;
}

constexpr int kMost = 1 << 20;  ///< ranks, restarts: anything above is a mistake

std::string setting(const char* name) { return str(name, "=", text_variable(name).value_or("")); }

/// One number of a place that has to be there because `other` is set.
int required(const EnvironmentScheme& scheme, const VariableNames& names, const char* other, int least,
             int most, const std::string& because = "") {
  const char* name = first_set(names);
  if (name == nullptr)
    throw CommError(names.front(), " is not set although ", setting(other), " is; ", scheme.advice);
  return optional(name, 0, least, most, because);
}

/// Whether the launcher of this scheme has started the process.
bool is_present(const EnvironmentScheme& scheme) {
  if (!scheme.mark.empty() && first_set(scheme.mark) == nullptr) return false;
  return first_set(scheme.rank) != nullptr || first_set(scheme.world_size) != nullptr;
}

const EnvironmentScheme* other_present() {
  const auto schemes = other_schemes();
  const auto found = std::find_if(schemes.begin(), schemes.end(), is_present);
  return found == schemes.end() ? nullptr : &*found;
}

bool has_any_of_torchruns() {
  const EnvironmentScheme& torchrun = torchrun_scheme();
  for (const VariableNames* names :
       {&torchrun.rank, &torchrun.world_size, &torchrun.local_rank, &torchrun.local_world_size})
    if (first_set(*names) != nullptr) return true;
  return false;
}

/// A pod of Kubernetes' PyTorchJob: its operator gives each pod a RANK, and nothing about ranks of a host.
bool in_pytorch_job() {
  if (!text_variable("KUBERNETES_SERVICE_HOST")) return false;
  if (text_variable("PET_NNODES") || text_variable("PET_NPROC_PER_NODE")) return true;
  const std::string pod = text_variable("HOSTNAME").value_or("");  // JOB-master-0, JOB-worker-3
  const size_t dash = pod.find_last_not_of("0123456789");
  if (dash == pod.npos || dash + 1 == pod.size() || pod[dash] != '-') return false;
  const std::string_view front = std::string_view(pod).substr(0, dash);
  return front.ends_with("-master") || front.ends_with("-worker");
}

/// In a pod of several processes the operator's RANK is the pod's number, and WORLD_SIZE counts the
/// processes.
void check_one_rank_a_pod() {
  const auto in_pod = integer_variable("PET_NPROC_PER_NODE");
  if (in_pod.value_or(1) > 1 && first_set(torchrun_scheme().mark) == nullptr)
    throw CommError(setting("PET_NPROC_PER_NODE"), ": PyTorchJob expects ", *in_pod,
                    " ranks in this pod, and this process was not started as one; start the program by "
                    "torchrun or by tessera launch, which read the variables PET_*");
}

/// The number of ranks on this host by Slurm's list; nullopt without one.
std::optional<int> tasks_on_this_host(const EnvironmentScheme& scheme) {
  const char* name = scheme.tasks_per_host.empty() ? nullptr : first_set(scheme.tasks_per_host);
  if (name == nullptr) return std::nullopt;
  try {
    const std::vector<int> counts = expand_task_counts(*text_variable(name));
    if (counts.size() == 1) return counts.front();  // SLURM_NTASKS_PER_NODE
    const char* index = first_set(scheme.host_index);
    if (index == nullptr) return std::nullopt;
    return counts[static_cast<size_t>(
        optional(index, 0, 0, static_cast<int>(counts.size()) - 1, str(", because of ", setting(name))))];
  } catch (const ConfigError& error) {
    throw CommError(name, ": ", error.what());
  }
}

void read_local(const EnvironmentScheme& scheme, Environment& env) {
  const char* size_name = first_set(scheme.local_world_size);
  const char* rank_name = first_set(scheme.local_rank);
  const std::optional<int> tasks = tasks_on_this_host(scheme);
  if (size_name == nullptr && rank_name == nullptr && !tasks) {  // a single host, or a pod with one rank
    const bool is_pod = &scheme == &torchrun_scheme() && in_pytorch_job();
    env.local_rank = is_pod ? 0 : env.rank;
    env.local_world_size = is_pod ? 1 : env.world_size;
    return;
  }
  const std::string of_world = str(", because ", setting(first_set(scheme.world_size)));
  if (size_name != nullptr)
    env.local_world_size = optional(size_name, env.world_size, 1, env.world_size, of_world);
  else
    env.local_world_size = std::min(tasks.value_or(env.world_size), env.world_size);
  if (rank_name == nullptr && size_name == nullptr) {
    env.local_rank = env.rank % env.local_world_size;
    return;
  }
  const std::string of_local = str(", because ", size_name != nullptr ? setting(size_name)
                                                 : tasks ? str(*tasks, " tasks are on this host")
                                                         : setting(first_set(scheme.world_size)));
  env.local_rank = required(scheme, scheme.local_rank, size_name != nullptr ? size_name : rank_name, 0,
                            env.local_world_size - 1, of_local);
}

int port_of_job(const VariableNames& names) {
  if (first_set(names) == nullptr) return 29500;  // torch's own
  std::string id;
  for (const char* name : names) id += text_variable(name).value_or("");
  return port_of_run(id);
}

/// Where rank 0 is, for a launcher that does not say so.
std::string address_of_rank_0(const EnvironmentScheme& scheme, const Environment& env) {
  if (env.local_world_size == env.world_size) return "127.0.0.1";
  if (const char* name = scheme.hosts.empty() ? nullptr : first_set(scheme.hosts)) {
    try {
      return first_host(*text_variable(name));
    } catch (const ConfigError& error) {
      throw CommError(name, ": ", error.what());
    }
  }
  throw CommError("MASTER_ADDR is not set, and ", scheme.launcher, " does not say where rank 0 is (",
                  setting(first_set(scheme.world_size)), " ranks, ", env.local_world_size,
                  " on this host); set MASTER_ADDR to the address of rank 0's host on all ranks (",
                  scheme.pass_address, ")");
}

void read_master(const EnvironmentScheme& scheme, Environment& env) {
  const bool is_torchruns = &scheme == &torchrun_scheme();
  const auto address = text_variable("MASTER_ADDR");
  if (!address && is_torchruns)
    throw CommError("MASTER_ADDR is not set although ", setting("WORLD_SIZE"),
                    " is above 1: expected the address of rank 0's host");
  env.master_addr = address ? *address : address_of_rank_0(scheme, env);
  if (!text_variable("MASTER_PORT") && is_torchruns)
    throw CommError("MASTER_PORT is not set although ", setting("WORLD_SIZE"),
                    " is above 1: expected a free port of rank 0's host");
  env.master_port = optional("MASTER_PORT", port_of_job(scheme.job), 1, 65535);
}

void read_rendezvous(const EnvironmentScheme& scheme, Environment& env) {
  read_master(scheme, env);
  if (const auto seconds = text_variable("TESSERA_RENDEZVOUS_TIMEOUT_S"))
    env.rendezvous_timeout = parse_seconds("TESSERA_RENDEZVOUS_TIMEOUT_S", *seconds);
  env.run_secret = text_variable("TESSERA_RUN_SECRET").value_or("");
  if (constexpr size_t kLeast = 16; !env.run_secret.empty() && env.run_secret.size() < kLeast)
    throw CommError("TESSERA_RUN_SECRET has ", env.run_secret.size(), " characters: expected at least ",
                    kLeast, ", the same on all ranks (for example 32 hexadecimal digits)");
  if (&scheme != &torchrun_scheme()) return;
  // torch compares with exactly this.
  env.agent_store = text_variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
}

Environment read(const EnvironmentScheme& scheme) {
  Environment env;
  env.launcher = scheme.launcher;
  const char* some = first_set(scheme.rank);
  for (const VariableNames* names : {&scheme.world_size, &scheme.local_rank, &scheme.local_world_size})
    if (some == nullptr) some = first_set(*names);
  env.world_size = required(scheme, scheme.world_size, some, 1, kMost);
  env.rank = required(scheme, scheme.rank, first_set(scheme.world_size), 0, env.world_size - 1,
                      str(", because ", setting(first_set(scheme.world_size))));
  read_local(scheme, env);
  if (&scheme == &torchrun_scheme()) env.restart_count = optional("TORCHELASTIC_RESTART_COUNT", 0, 0, kMost);
  if (env.world_size > 1) read_rendezvous(scheme, env);
  return env;
}

/// torchrun's variables set by hand beside those of another launcher have to say the same.
void check_agreement(const EnvironmentScheme& scheme, const Environment& env) {
  const EnvironmentScheme& torchrun = torchrun_scheme();
  const std::pair<const VariableNames*, int> places[] = {{&torchrun.rank, env.rank},
                                                         {&torchrun.world_size, env.world_size},
                                                         {&torchrun.local_rank, env.local_rank},
                                                         {&torchrun.local_world_size, env.local_world_size}};
  for (const auto& [names, value] : places) {
    const char* name = first_set(*names);
    if (name == nullptr || integer_variable(name) == value) continue;
    throw CommError(setting(name), ", but ", scheme.launcher, " says ", value, " (rank ", env.rank, " of ",
                    env.world_size, ", ", setting(first_set(scheme.rank)), "); unset ", name,
                    ", or start the ranks without ", scheme.launcher);
  }
}

/// torchrun's variables were set by a launcher, which then is the innermost one.
bool is_marked_as_torchruns() {
  return has_any_of_torchruns() && first_set(torchrun_scheme().mark) != nullptr;
}

}  // namespace

int port_of_run(std::string_view id) {
  uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return 15000 + static_cast<int>(hash % 15000U);
}

std::optional<Environment> scheduler_environment() {
  const EnvironmentScheme* other = is_marked_as_torchruns() ? nullptr : other_present();
  if (other == nullptr) return std::nullopt;
  return read(*other);
}

Environment environment() {
  if (std::optional<Environment> env = scheduler_environment()) {
    if (has_any_of_torchruns()) check_agreement(*other_present(), *env);
    return *std::move(env);
  }
  if (!has_any_of_torchruns()) return {};
  check_one_rank_a_pod();
  return read(torchrun_scheme());
}

bool in_group() {
  if (text_variable("RANK") && text_variable("WORLD_SIZE")) return true;
  const std::optional<Environment> env = scheduler_environment();
  return env && env->world_size > 1;
}

}  // namespace tessera
