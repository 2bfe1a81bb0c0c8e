#include "launcher/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/environment.h"
#include "core/error.h"
#include "core/str.h"
#include "launcher/host.h"

namespace tessera::launcher {
bool should_start_ranks(std::optional<int> nproc) {
  if (nproc && (*nproc < 1 || *nproc > kMaxRanks))
    throw ConfigError(str("--nproc ", *nproc, ": expected 1 to ", kMaxRanks, " ranks on this host"));
  if (!in_group()) return nproc.value_or(1) > 1;
  const char* name = std::getenv("LOCAL_WORLD_SIZE") ? "LOCAL_WORLD_SIZE" : "WORLD_SIZE";
  if (nproc && integer_variable(name) != *nproc)
    throw ConfigError(str("--nproc ", *nproc, ": this process already is rank ", std::getenv("RANK"),
                          " of a group with ", name, "=", std::getenv(name),
                          "; leave --nproc out under another launcher"));
  return false;
}

std::vector<std::string> rank_environment(const RankVariables& variables) {
  const std::string rank = std::to_string(variables.rank), size = std::to_string(variables.world_size);
  std::vector<std::pair<std::string, std::string>> ours = {
      {"RANK", rank},
      {"WORLD_SIZE", size},
      {"LOCAL_RANK", rank},
      {"LOCAL_WORLD_SIZE", size},
      {"GROUP_RANK", "0"},
      {"GROUP_WORLD_SIZE", "1"},
      {"MASTER_ADDR", variables.master_addr},
      {"MASTER_PORT", std::to_string(variables.master_port)},
      {"TESSERA_RUN_ID", variables.run_id},
      {"TESSERA_ERROR_FILE", variables.error_file},
  };
  if (!std::getenv("OMP_NUM_THREADS"))
    ours.emplace_back("OMP_NUM_THREADS",
                      std::to_string(std::max(1, available_cores() / variables.world_size)));

  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view line = *entry, name = line.substr(0, line.find('='));
    const bool replaced =
        std::any_of(ours.begin(), ours.end(), [&](const auto& our) { return our.first == name; });
    if (!replaced && !name.starts_with("TORCHELASTIC_")) environment.emplace_back(line);
  }
  for (const auto& [name, value] : ours) environment.push_back(str(name, "=", value));
  return environment;
}

}  // namespace tessera::launcher
