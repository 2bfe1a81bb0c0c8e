#include "launcher/environment/environment.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

#include "core/environment/environment.h"
#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/environment/host.h"

namespace tessera::launcher {
namespace {

/// A variable PET_*, torchrun's way to give its flags by the environment; nullopt if it is unset.
std::optional<int> pet_number(const char* name, int least, int most) {
  const auto text = text_variable(name);
  if (!text) return std::nullopt;
  const auto value = parse_number<int>(*text);
  if (!value) throw CommError(name, "=", *text, ": expected a number");
  if (*value < least || *value > most)
    throw CommError(name, "=", *value, " is out of range: expected ", least, " to ", most);
  return value;
}

/// A launcher that torchrun's variables come from counts as the innermost one: its ranks start no others.
bool is_marked_rank() {
  return text_variable("RANK") && (text_variable("TORCHELASTIC_RUN_ID") || text_variable("TESSERA_RUN_ID") ||
                                   text_variable("LOCAL_RANK"));
}

std::optional<HostPlace> place_in_pytorch_job() {
  if (!text_variable("PET_NNODES") || is_marked_rank()) return std::nullopt;
  HostPlace place;
  place.master_addr = text_variable("PET_MASTER_ADDR").value_or(text_variable("MASTER_ADDR").value_or(""));
  const std::string num_nodes = text_variable("PET_NNODES").value();
  if (const size_t colon = num_nodes.find(':'); colon == num_nodes.npos)
    place.num_nodes = pet_number("PET_NNODES", 1, kMaxRanks).value();
  else if (const auto most = parse_number<int>(std::string_view(num_nodes).substr(colon + 1));
           most && num_nodes == str(*most, ":", *most))
    place.num_nodes = *most;
  else
    place.range = num_nodes;
  if (!place.range.empty()) return place;
  const auto node_rank = pet_number("PET_NODE_RANK", 0, place.num_nodes - 1);
  if (!node_rank && place.num_nodes > 1)
    throw CommError("PET_NODE_RANK is not set although PET_NNODES=", place.num_nodes,
                    " is; expected this host's number, 0 to ", place.num_nodes - 1);
  place.node_rank = node_rank.value_or(0);
  const std::string nproc = text_variable("PET_NPROC_PER_NODE").value_or("");
  if (!nproc.empty() && std::all_of(nproc.begin(), nproc.end(), [](char c) { return c >= 'a' && c <= 'z'; }))
    place.nproc_word = nproc;
  else
    place.nproc = pet_number("PET_NPROC_PER_NODE", 1, kMaxRanks);
  place.max_restarts = pet_number("PET_MAX_RESTARTS", 0, 1'000'000).value_or(0);
  place.master_port = pet_number("PET_MASTER_PORT", 1, 65535).value_or(0);
  return place;
}

}  // namespace

std::optional<HostPlace> place_of_this_host() {
  if (auto place = place_in_pytorch_job()) return place;
  if (is_marked_rank()) return std::nullopt;
  const auto env = scheduler_environment();
  if (!env || env->world_size == 1 || env->local_world_size > 1) return std::nullopt;
  return HostPlace{env->rank, env->world_size, env->master_addr, env->master_port, std::nullopt};
}

bool should_start_ranks(std::optional<int> nproc) {
  if (nproc && (*nproc < 1 || *nproc > kMaxRanks))
    throw ConfigError("--nproc ", *nproc, ": expected 1 to ", kMaxRanks, " ranks on this host");
  if (const auto place = place_of_this_host(); place && nproc.value_or(place->nproc.value_or(1)) > 1)
    return true;
  if (!in_group()) return nproc.value_or(1) > 1;
  if (!nproc) return false;
  const Environment env = environment();
  const bool is_local = env.local_world_size != env.world_size || text_variable("LOCAL_WORLD_SIZE");
  if (env.local_world_size != *nproc)
    throw ConfigError("--nproc ", *nproc, ": this process already is rank ", env.rank, " of a group with ",
                      is_local ? "LOCAL_WORLD_SIZE=" : "WORLD_SIZE=", env.local_world_size, " (",
                      env.launcher, "); leave --nproc out under another launcher");
  return false;
}

/// What each rank has its own value of, whatever it is given.
static std::vector<std::pair<std::string, std::string>> always_set(const RankVariables& variables) {
  return {
      {"RANK", std::to_string(variables.rank)},
      {"WORLD_SIZE", std::to_string(variables.world_size)},
      {"LOCAL_RANK", std::to_string(variables.local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(variables.local_world_size)},
      {"GROUP_RANK", std::to_string(variables.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(variables.num_nodes)},
      {"MASTER_ADDR", variables.master_addr},
      {"MASTER_PORT", std::to_string(variables.master_port)},
      {"TESSERA_RUN_ID", variables.run_id},
      {"TESSERA_ERROR_FILE", variables.error_file},
      {"TORCHELASTIC_ERROR_FILE", variables.error_file},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(variables.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(variables.max_restarts)},
  };
}

bool is_always_set(std::string_view name) {
  static const auto all = always_set({});
  return std::any_of(all.begin(), all.end(), [&](const auto& one) { return one.first == name; });
}

std::vector<std::string> rank_environment(const RankVariables& variables) {
  std::vector<std::pair<std::string, std::string>> ours = always_set(variables);
  if (!variables.run_secret.empty()) ours.emplace_back("TESSERA_RUN_SECRET", variables.run_secret);
  if (!variables.memory_folder.empty()) ours.emplace_back("TESSERA_MEMORY_DIR", variables.memory_folder);
  if (!variables.visible_devices.empty())
    ours.emplace_back("CUDA_VISIBLE_DEVICES", variables.visible_devices);
  std::set<std::string, std::less<>> names;
  for (const auto& [name, value] : ours) names.insert(name);
  const auto is_ours = [&](std::string_view name) { return names.contains(name); };
  bool has_threads = text_variable("OMP_NUM_THREADS").has_value();
  for (const std::string& line : variables.given) {
    if (line == "OMP_NUM_THREADS=") {  // as unset: libgomp would take all cores on each rank
      has_threads = false;
      continue;
    }
    if (const size_t equals = line.find('='); names.insert(line.substr(0, equals)).second)
      ours.emplace_back(line.substr(0, equals), line.substr(equals + 1));
  }
  if (!has_threads && names.insert("OMP_NUM_THREADS").second) {
    const int share = std::max(1, available_cores() / variables.local_world_size);
    ours.emplace_back("OMP_NUM_THREADS", std::to_string(variables.num_cores.value_or(share)));
  }

  std::vector<std::string> environment;
  // A rank of another run, whose memory is not this one's. An agent has its own run's.
  const bool is_in_rank = is_marked_rank() && !text_variable(kAgentVariable);
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view line = *entry, name = line.substr(0, line.find('='));
    const bool is_of_the_launcher = name.starts_with("TORCHELASTIC_") || name.starts_with("PET_") ||
                                    name == kHostsVariable || name == kAgentVariable ||
                                    (name == "TESSERA_MEMORY_DIR" && is_in_rank);
    if (!is_ours(name) && !is_of_the_launcher) environment.emplace_back(line);
  }
  for (const auto& [name, value] : ours) environment.push_back(str(name, "=", value));
  return environment;
}

}  // namespace tessera::launcher
