#include "train/restart.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>

#include "checkpoint/catalog.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/reader.h"
#include "checkpoint/verify.h"
#include "comm/agreement.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/config/batch.h"
#include "train/run_checkpoints.h"
#include "train/run_directory.h"
#include "train/run_lock.h"

namespace tessera::train {
namespace {

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
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  return str("process ", ::getppid(), " of ", host, ", started at ", field);
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

/// A checkpoint that this run has saved.
struct OwnCheckpoint {
  std::filesystem::path folder;
  int64_t steps_done = 0;
  int64_t train_batch = 0, micro_batch = 0;
};

/// The latest in the folder. nullopt: there is none, or another run's. Throws CheckpointError.
std::optional<OwnCheckpoint> own_checkpoint(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / checkpoint::kLatestName)) return std::nullopt;
  const nlohmann::json state = checkpoint::read_manifest(checkpoint::find_checkpoint(folder, "")).state;
  const nlohmann::json trainer = state.at("client_state").value("trainer", nlohmann::json::object());
  const std::string saved_by = trainer.value(kRunIdKey, "");
  if (saved_by.empty() || saved_by != launched_run()) return std::nullopt;
  const nlohmann::json& config = state.at("config");
  return OwnCheckpoint{folder, trainer.at("steps_done"), config.at(config::kTrainBatchSize),
                       config.at(config::kMicroBatchSize)};
}

/// The same of the folder in memory, whose every byte is compared with its hash: a rank was killed while it
/// may have written there. One that is damaged is none.
std::optional<OwnCheckpoint> whole_checkpoint_in_memory(const std::filesystem::path& folder,
                                                        const Logger& log) {
  if (folder.empty()) return std::nullopt;
  try {
    const auto found = own_checkpoint(folder);
    if (!found) return std::nullopt;
    const checkpoint::VerifyReport report = checkpoint::verify(folder, "");
    if (report.ok()) return found;
    throw CheckpointError(report.problems.front());
  } catch (const std::exception& error) {
    log.warning(str("the checkpoint in memory is not used: ", error.what()));
    return std::nullopt;
  }
}

}  // namespace

std::string memory_folder(const comm::Environment& environment) {
  const char* folder = std::getenv("TESSERA_MEMORY_DIR");
  return folder && environment.local_world_size == environment.world_size ? folder : "";
}

std::string launched_run() {
  if (const char* id = std::getenv("TESSERA_RUN_ID")) return id;
  const char* id = std::getenv("TORCHELASTIC_RUN_ID");
  if (!id) return "";
  return std::string_view(id) == "none" ? parent_process() : id;
}

void continue_after_restart(RunConfig& run, TrainerStart& start, const comm::Environment& environment,
                            comm::Communicator& comm, const Logger& log) {
  if (environment.restart_count == 0) return;
  // Rank 0 knows whose checkpoint it is; a folder may hold those of an earlier run. One that cannot be read
  // may be this run's: an error, which another restart may not have.
  const std::string found = comm::from_rank_0<CheckpointError>(comm, "checkpoint of this run", [&] {
    const std::filesystem::path folder = run.trainer.output_dir;
    wait_for_lock(folder, std::min<std::chrono::milliseconds>(std::chrono::minutes(2), comm.timeout() / 2));
    std::optional<OwnCheckpoint> latest = own_checkpoint(checkpoints_of(folder));
    const auto in_memory = whole_checkpoint_in_memory(start.memory_folder, log);
    if (in_memory && (!latest || in_memory->steps_done > latest->steps_done)) latest = in_memory;
    if (!latest) return std::string();
    return nlohmann::json({latest->folder.string(), latest->train_batch, latest->micro_batch}).dump();
  });
  if (found.empty()) return;
  const auto saved = nlohmann::json::parse(found);
  start.resume = true;
  start.resume_tag.clear();
  start.resume_folder = saved.at(0);
  const int64_t train = saved.at(1), micro = saved.at(2);
  EngineConfig& engine = run.engine;
  if (engine.train_batch_size == train && engine.train_micro_batch_size_per_gpu <= micro) return;
  const auto batch = config::divide_batch(train, micro, comm.size());
  if (!batch)
    throw ConfigError(str(config::kTrainBatchSize, ": the run has ", train,
                          " samples in a step, which cannot be divided among ", comm.size(), " ranks"));
  engine.train_batch_size = batch->train;
  engine.train_micro_batch_size_per_gpu = batch->micro;
  engine.gradient_accumulation_steps = batch->accumulation;
}

}  // namespace tessera::train
