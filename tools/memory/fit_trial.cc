#include "tools/memory/fit_trial.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "core/environment/environment.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/files/temporary_folder.h"
#include "core/json/json_reader.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "tools/common/tasks.h"
#include "train/memory/out_of_memory.h"
#include "train/short_run.h"
#include "train/task/trainer_config.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// Ends this process, with success, as soon as its memory exceeds a limit, and leaves a file with that limit;
/// or when another rank has left the file.
class MemoryGuard {
 public:
  /// `limit_bytes`: of this rank, where it shares memory with `num_ranks` - 1 others. 0: none.
  MemoryGuard(int64_t limit_bytes, int num_ranks, const fs::path& folder) : file_(file_in(folder)) {
    watcher_ = std::jthread([this, limit_bytes, num_ranks](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        if (limit_bytes > 0 && resident_share(num_ranks) > static_cast<double>(limit_bytes))
          strike(limit_bytes);
        if (has_struck()) {
          std::this_thread::sleep_for(milliseconds(30));  // until the others have seen the file
          ::_exit(0);
        }
        std::this_thread::sleep_for(milliseconds(5));
      }
    });
  }
  MemoryGuard(const MemoryGuard&) = delete;

  /// Ends the trial on all ranks. `bytes`: what this one has at least, or 0. Throws nothing: on a full disk
  /// the file is there and empty.
  void strike(int64_t bytes) const { std::ofstream(file_) << bytes; }
  /// What a rank has given to strike(); unset: none has.
  static std::optional<int64_t> struck_at(const fs::path& folder) {
    if (!fs::exists(file_in(folder))) return std::nullopt;
    int64_t bytes = 0;
    std::ifstream(file_in(folder)) >> bytes;
    return bytes;
  }
  /// Whether the process will end: what fails then is not to be reported.
  bool has_struck() const { return ::access(file_.c_str(), F_OK) == 0; }

 private:
  static fs::path file_in(const fs::path& folder) { return folder / "struck"; }

  const fs::path file_;
  std::jthread watcher_;
};

fs::path result_of(const fs::path& folder, int rank) { return folder / str("rank", rank, ".json"); }

/// What each step of the second half needs more than the one before; 0: one of them needs no more.
int64_t growth_of(const std::vector<int64_t>& before_step) {
  constexpr int64_t kLeast = 1'000'000;
  int64_t growth = before_step.size() < 2 ? 0 : INT64_MAX;
  for (size_t step = std::max<size_t>(1, before_step.size() / 2); step < before_step.size(); ++step)
    growth = std::min(growth, before_step[step] - before_step[step - 1]);
  return growth < kLeast ? 0 : growth;
}

}  // namespace

Needed run_fit_trial(const FitTrialOptions& options, const Logger& log) {
  const TemporaryFolder folder("tessera_fit");
  const int num_ranks = options.launch.nproc.value();
  std::vector<std::string> args = {"memory", options.config, "--trial-fit", "--trial-folder",
                                   folder.path().string()};
  for (const std::string& one : options.overrides) args.insert(args.end(), {"--set", one});
  if (!options.on_cuda) {  // ranks may differ somewhat: their sum is what counts in the end
    const int64_t limit = num_ranks == 1 ? options.memory_limit : options.memory_limit / num_ranks * 5 / 4;
    args.insert(args.end(), {"--trial-limit", std::to_string(limit)});
  }
  std::error_code error;
  const fs::space_info space = fs::space(folder.path(), error);
  const bool saves = !error && static_cast<int64_t>(space.available) > options.disk_bytes;
  if (saves) args.emplace_back("--trial-saves");
  if (const int code = run_ranks_of_self(options.launch, args, log); code != 0) throw TrialFailed(code);
  if (const std::optional<int64_t> struck = MemoryGuard::struck_at(folder.path()))
    return {.memory = *struck, .is_more = true};
  Needed needed{.without_checkpoint = !saves};
  int64_t sum = 0, code = INT64_MAX;  // ranks share their code
  for (int rank = 0; rank < num_ranks; ++rank) {
    const nlohmann::json result = parse_json(InputFile(result_of(folder.path(), rank)).read_all());
    const auto memory = result.at("memory").get<int64_t>(), growth = result.at("growth").get<int64_t>();
    sum += memory;
    needed.idle += result.at("idle").get<int64_t>();
    needed.memory = std::max(needed.memory, memory);
    needed.growth = options.on_cuda ? std::max(needed.growth, growth) : needed.growth + growth;
    needed.step_s = std::max(needed.step_s, result.at("step_s").get<double>());
    code = std::min(code, result.at("code").get<int64_t>());
  }
  if (options.on_cuda) return needed;
  needed.memory = sum - (num_ranks - 1) * code;
  needed.idle = std::max<int64_t>(0, needed.idle - (num_ranks - 1) * code);
  return needed;
}

int run_fit_rank(const std::string& config, const std::vector<std::string>& overrides,
                 const FitRankOptions& options) {
  const comm::Environment environment = comm::environment();
  const MemoryGuard guard(options.limit, environment.local_world_size, options.folder);
  try {
    const train::ShortRun run = train::run_briefly(
        train::load_run_config(config, environment.world_size, overrides), tasks(), environment,
        {.folder = fs::path(options.folder) / "run", .saves = options.saves}, Logger());
    const nlohmann::json result = {{"memory", run.peak},
                                   {"idle", run.idle},
                                   {"growth", growth_of(run.before_step)},
                                   {"step_s", run.step_s},
                                   {"code", std::llround(file_mapping_bytes())}};
    replace_file(result_of(options.folder, environment.rank), result.dump());
  } catch (const std::exception& error) {
    if (guard.has_struck()) return 0;  // another rank has ended
    if (!train::is_out_of_memory(error) && dynamic_cast<const train::OutOfMemoryError*>(&error) == nullptr)
      throw;
    guard.strike(0);
  }
  return 0;
}

}  // namespace tessera::tools
