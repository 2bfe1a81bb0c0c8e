#include "train/run/same_run.h"

#include <nlohmann/json.hpp>

#include "engine/same_config.h"

namespace tessera::train {
namespace {

/// The keys that may differ between ranks. All others must be equal.
constexpr std::pair<const char*, const char*> kPerRankKeys[] = {
    // File paths. Their contents are compared: the data by check_same_data(), the model by its layout. The
    // initial weights are rank 0's.
    {"data", "path"},
    {"data", "eval_path"},
    {"data", "images"},
    {"data", "masks"},
    {"data", "vocab"},
    {"model", "path"},
    {"model", "eval_path"},
    // How a rank makes its batches, which do not depend on it.
    {"trainer", "num_threads"},
    {"trainer", "dataloader_num_workers"},
    {"trainer", "dataloader_prefetch_factor"},
    {"trainer", "dataloader_pin_memory"},
    // Used by rank 0 only. The default is the name of the rank's configuration file.
    {"trainer", "name"},
    // Compared by comm/ when the ranks joined, or no longer used after that.
    {"comm", "backend"},
    {"comm", "rendezvous_timeout_s"},
};

}  // namespace

void check_same_run(const RunConfig& run, comm::Communicator& comm,
                    const std::vector<std::pair<std::string, bool>>& flags) {
  nlohmann::ordered_json mine = resolved(run);
  for (const auto& [section, key] : kPerRankKeys)
    if (mine.contains(section)) mine[section].erase(key);
  for (const auto& [name, value] : flags) mine[name] = value;
  check_same_config(comm, mine);
}

}  // namespace tessera::train
