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
  int64_t steps_done = 0;
  int64_t train_batch = 0, micro_batch = 0;
};

/// nullopt: another run's. Throws CheckpointError, json::exception.
std::optional<OwnCheckpoint> own_checkpoint(const nlohmann::json& state) {
  const nlohmann::json trainer = state.at("client_state").value("trainer", nlohmann::json::object());
  const std::string saved_by = trainer.value(kRunIdKey, "");
  if (saved_by.empty() || saved_by != launched_run()) return std::nullopt;
  const nlohmann::json& config = state.at("config");
  return OwnCheckpoint{trainer.at("steps_done"), config.at(config::kTrainBatchSize),
                       config.at(config::kMicroBatchSize)};
}

/// Collective. The latest in the run's folder. Rank 0 knows whose checkpoint it is; a folder may hold those
/// of an earlier run. One that cannot be read may be this run's: an error, which another restart may not
/// have.
std::optional<OwnCheckpoint> latest_on_disk(const std::filesystem::path& output_dir,
                                            comm::Communicator& comm) {
  const std::string found = comm::from_rank_0<CheckpointError>(comm, "checkpoint of this run", [&] {
    wait_for_lock(output_dir,
                  std::min<std::chrono::milliseconds>(std::chrono::minutes(2), comm.timeout() / 2));
    const std::filesystem::path folder = checkpoints_of(output_dir);
    if (!std::filesystem::exists(folder / checkpoint::kLatestName)) return std::string();
    const auto own = own_checkpoint(checkpoint::read_manifest(checkpoint::find_checkpoint(folder, "")).state);
    if (!own) return std::string();
    return nlohmann::json({own->steps_done, own->train_batch, own->micro_batch}).dump();
  });
  if (found.empty()) return std::nullopt;
  const auto own = nlohmann::json::parse(found);
  return OwnCheckpoint{own.at(0), own.at(1), own.at(2)};
}

/// Collective. The latest in memory. Without it, training continues from the disk.
HostFolders::Found latest_in_memory(HostFolders* folders, const comm::Communicator& comm, const Logger& log) {
  if (folders == nullptr) return {};
  try {
    HostFolders::Found found = folders->find([](const nlohmann::json& state) {
      const auto own = own_checkpoint(state);
      return own ? std::optional(own->steps_done) : std::nullopt;
    });
    if (!found.problem.empty() && comm.rank() == 0)
      log.warning("the latest checkpoint in memory is not used: " + found.problem);
    return found;
  } catch (const CheckpointError& error) {
    if (comm.rank() == 0) log.warning(str("the checkpoints in memory are not used: ", error.what()));
    return {};
  }
}

}  // namespace

std::string memory_folder() {
  const char* folder = std::getenv("TESSERA_MEMORY_DIR");
  return folder ? folder : "";
}

std::string launched_run() {
  if (const char* id = std::getenv("TESSERA_RUN_ID")) return id;
  const char* id = std::getenv("TORCHELASTIC_RUN_ID");
  if (!id) return "";
  return std::string_view(id) == "none" ? parent_process() : id;
}

void continue_after_restart(RunConfig& run, TrainerStart& start, int restart_count, comm::Communicator& comm,
                            const Logger& log) {
  const std::vector<int> counts = comm.exchange(restart_count, "restarts");  // agents of torchrun count alone
  if (*std::max_element(counts.begin(), counts.end()) == 0) return;
  std::optional<OwnCheckpoint> latest = latest_on_disk(run.trainer.output_dir, comm);
  const HostFolders::Found in_memory = latest_in_memory(start.memory.get(), comm, log);
  if (const auto own = in_memory.tag.empty() ? std::nullopt : own_checkpoint(in_memory.state)) {
    start.resume_in_memory = !latest || own->steps_done > latest->steps_done;
    start.or_from_folder = latest.has_value();
    if (start.resume_in_memory) latest = own;
  }
  if (!latest) return;
  start.resume = true;
  start.resume_tag = start.resume_in_memory ? in_memory.tag : "";
  const int64_t train = latest->train_batch, micro = latest->micro_batch;
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
