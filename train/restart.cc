#include "train/restart.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/host_name.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/variables.h"
#include "engine/config/batch.h"
#include "train/run/run_checkpoints.h"
#include "train/run/run_directory.h"
#include "train/run/run_lock.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// The process that started this one, and when: torchrun's agent, which stays when ranks are started again.
std::string parent_process() {
  constexpr int kStartTime = 22, kAfterName = 3;  // fields of /proc/PID/stat
  std::ifstream file(str("/proc/", ::getppid(), "/stat"));
  std::string line, field;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == line.npos) return "";
  std::istringstream fields(line.substr(name_end + 1));
  for (int i = kAfterName; i <= kStartTime; ++i) fields >> field;
  return str("process ", ::getppid(), " of ", host_name(), ", started at ", field);
}

/// Waits while rank 0 of the attempt before still has the folder. On a host that is gone, a network file
/// system keeps its lock for some time.
void wait_for_lock(const std::filesystem::path& folder, std::chrono::milliseconds most) {
  constexpr std::chrono::milliseconds kPause{100};
  for (const auto give_up = std::chrono::steady_clock::now() + most;;) {
    try {
      return check_not_in_use(folder);
    } catch (const ConfigError&) {
      if (std::chrono::steady_clock::now() > give_up) throw;
    }
    std::this_thread::sleep_for(kPause);
  }
}

/// A checkpoint that may be continued from.
struct Saved {
  std::string tag;
  std::string launched, run;  ///< who has saved it
  int64_t steps_done = 0;
  int64_t train_batch = 0, micro_batch = 0;
};

void to_json(json& out, const Saved& saved) {
  out = {saved.tag, saved.launched, saved.run, saved.steps_done, saved.train_batch, saved.micro_batch};
}
void from_json(const json& in, Saved& saved) {
  in.at(0).get_to(saved.tag);
  in.at(1).get_to(saved.launched);
  in.at(2).get_to(saved.run);
  in.at(3).get_to(saved.steps_done);
  in.at(4).get_to(saved.train_batch);
  in.at(5).get_to(saved.micro_batch);
}

bool is_own(const Saved& saved) { return !saved.launched.empty() && saved.launched == launched_run(); }

/// `state`: of a manifest. nullopt: it is not one of `tessera train`.
std::optional<Saved> saved_by(const std::string& tag, const json& state) try {
  const json& trainer = state.at("client_state").at("trainer");
  const json& config = state.at("config");
  return Saved{.tag = tag,
               .launched = trainer.value(kLaunchedKey, ""),
               .run = trainer.value(kRunKey, ""),
               .steps_done = trainer.at("steps_done"),
               .train_batch = config.at(config::kTrainBatchSize),
               .micro_batch = config.at(config::kMicroBatchSize)};
} catch (const json::exception&) {
  return std::nullopt;
}

/// What is in the run's folder.
struct OnDisk {
  std::vector<Saved> own;  // the newest first
  // These are of this run, but of an earlier start: the one that `latest` names, then the newest.
  std::vector<Saved> others;
  std::vector<std::string> damaged;
};

/// Is called on rank 0. A folder may hold checkpoints of an earlier run, too.
OnDisk look_on_disk(const fs::path& output_dir) {
  const fs::path folder = checkpoints_of(output_dir);
  OnDisk found;
  std::string latest;
  std::error_code error;
  const bool has_latest = fs::exists(folder / checkpoint::kLatestName, error);
  try {
    latest = checkpoint::read_latest(folder).value_or("");
    if (!latest.empty() && !fs::is_directory(folder / latest, error))
      found.damaged.push_back(
          str(folder / checkpoint::kLatestName, ": names ", latest, ", which is not there"));
  } catch (const Error& caught) {
    found.damaged.emplace_back(caught.what());
  }
  std::string run;
  try {
    run = read_run_id(output_dir);
  } catch (const Error&) {
    // RunRecord says so.
  }
  std::vector<std::string> tags;
  try {
    tags = checkpoint::list_folders(folder);
  } catch (const Error& caught) {
    found.damaged.emplace_back(caught.what());
  }
  for (const std::string& tag : tags) try {
      const std::optional<Saved> saved = saved_by(tag, checkpoint::read_manifest(folder / tag).state);
      if (!saved) continue;
      if (is_own(*saved))
        found.own.push_back(*saved);
      else if (run.empty() || saved->run.empty() || saved->run == run)
        found.others.push_back(*saved);
    } catch (const Error& caught) {
      found.damaged.emplace_back(caught.what());
    }
  if (!has_latest && !found.own.empty())
    found.damaged.push_back(str(folder / checkpoint::kLatestName, ": is not there"));
  const auto newest_first = [&](const Saved& a, const Saved& b) {
    return std::tuple(a.tag == latest, a.steps_done) > std::tuple(b.tag == latest, b.steps_done);
  };
  std::sort(found.own.begin(), found.own.end(),
            [](const Saved& a, const Saved& b) { return a.steps_done > b.steps_done; });
  std::sort(found.others.begin(), found.others.end(), newest_first);
  return found;
}

/// Collective. The same on all ranks.
OnDisk find_on_disk(const fs::path& output_dir, comm::Communicator& comm) {
  const std::string text = comm::from_rank_0<CheckpointError>(comm, "checkpoints of this run", [&] {
    wait_for_lock(output_dir,
                  std::min<std::chrono::milliseconds>(std::chrono::minutes(2), comm.timeout() / 2));
    const OnDisk found = look_on_disk(output_dir);
    return json_text(json::array({found.own, found.others, found.damaged}));
  });
  const json found = parse_json(text);
  return {found.at(0), found.at(1), found.at(2)};
}

/// Collective. The newest in memory that this run has saved.
std::optional<Saved> find_in_memory(HostFolders* folders, std::vector<std::string>& damaged) {
  if (folders == nullptr) return std::nullopt;
  try {
    const HostFolders::Found found = folders->find([](const json& state) {
      const auto saved = saved_by("", state);
      return saved && is_own(*saved) ? std::optional(saved->steps_done) : std::nullopt;
    });
    if (!found.problem.empty())
      damaged.push_back("the latest checkpoint in memory is not used: " + found.problem);
    return found.tag.empty() ? std::nullopt : saved_by(found.tag, found.state);
  } catch (const CheckpointError& error) {
    damaged.push_back(str("the checkpoints in memory are not used: ", error.what()));
    return std::nullopt;
  }
}

}  // namespace

std::string memory_folder() { return text_variable("TESSERA_MEMORY_DIR").value_or(""); }

std::string launched_run() {
  if (auto id = text_variable("TESSERA_RUN_ID")) return *id;
  const std::string id = text_variable("TORCHELASTIC_RUN_ID").value_or("");
  return id == "none" ? parent_process() : id;
}

void continue_after_restart(RunConfig& run, TrainerStart& start, int restart_count,
                            comm::Communicator& comm) {
  const std::vector<int> counts = comm.exchange(restart_count, "restarts");  // agents of torchrun count alone
  if (*std::max_element(counts.begin(), counts.end()) == 0) return;
  RestartFrom from;
  const std::optional<Saved> memory = find_in_memory(start.memory.get(), from.damaged);
  const OnDisk disk = find_on_disk(run.trainer.output_dir, comm);
  from.damaged.insert(from.damaged.end(), disk.damaged.begin(), disk.damaged.end());
  std::vector<std::pair<Saved, bool>> own;  // and whether it is in memory
  for (const Saved& saved : disk.own) own.emplace_back(saved, false);
  if (memory) own.emplace_back(*memory, true);
  std::stable_sort(own.begin(), own.end(),
                   [](const auto& a, const auto& b) { return a.first.steps_done > b.first.steps_done; });
  for (const auto& [saved, in_memory] : own) from.sources.push_back({in_memory, saved.tag});
  if (start.resume && start.resume_tag.empty())
    for (const Saved& saved : disk.others) from.sources.push_back({false, saved.tag});
  if (start.resume && !start.resume_tag.empty()) from.sources.push_back({false, start.resume_tag});
  if (from.sources.empty()) {
    if (!from.damaged.empty())
      throw ConfigError("trainer.output_dir: no whole checkpoint of this run is left to continue from: ",
                        join(from.damaged, "; "),
                        "; expected one, or a new start with --set trainer.overwrite_output_dir=true");
    return;
  }
  start.resume = true;
  start.restart_from = std::move(from);
  if (own.empty()) return;
  const int64_t train = own.front().first.train_batch, micro = own.front().first.micro_batch;
  EngineConfig& engine = run.engine;
  if (engine.train_batch_size == train && engine.train_micro_batch_size_per_gpu <= micro) return;
  const auto batch = config::divide_batch(train, micro, comm.size());
  if (!batch)
    throw ConfigError(config::kTrainBatchSize, ": the run has ", train,
                      " samples in a step, which cannot be divided among ", comm.size(), " ranks");
  engine.train_batch_size = batch->train;
  engine.train_micro_batch_size_per_gpu = batch->micro;
  engine.gradient_accumulation_steps = batch->accumulation;
}

}  // namespace tessera::train
