#include "tools/memory/fit_trials.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stop_token>
#include <utility>

#include "core/environment/environment.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/files/temporary_folder.h"
#include "core/json/json_reader.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "tools/common/tasks.h"
#include "train/memory_trial.h"
#include "train/short_run.h"
#include "train/task/trainer_config.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr const char* kStruck = "struck";

fs::path result_of(const fs::path& folder, int rank) { return folder / str("rank", rank, ".json"); }

/// Ranks may differ somewhat: their sum is what counts in the end.
int64_t limit_of_rank(int64_t limit, int num_ranks) {
  return num_ranks == 1 ? limit : limit / num_ranks * 5 / 4;
}

/// What each step of the second half needs more than the one before; 0: one of them needs no more.
int64_t growth_of(const std::vector<double>& peak_before_step) {
  constexpr double kLeast = 1e6;
  double growth = peak_before_step.size() < 2 ? 0 : HUGE_VAL;
  for (size_t step = std::max<size_t>(1, peak_before_step.size() / 2); step < peak_before_step.size(); ++step)
    growth = std::min(growth, peak_before_step[step] - peak_before_step[step - 1]);
  return growth < kLeast ? 0 : std::llround(growth);
}

}  // namespace

MemoryGuard::MemoryGuard(int64_t limit_bytes, int num_ranks, const fs::path& folder)
    : file_(folder / kStruck) {
  if (limit_bytes == 0) return;
  watcher_ = std::jthread([this, limit_bytes, num_ranks](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const bool is_over = resident_share(num_ranks) > static_cast<double>(limit_bytes);
      if (is_over) std::ofstream(file_).put('\n');
      if (is_over || has_struck()) {
        std::this_thread::sleep_for(milliseconds(30));  // until the others have seen the file
        ::_exit(0);
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
}

MemoryGuard::~MemoryGuard() = default;

bool MemoryGuard::has_struck() const { return ::access(file_.c_str(), F_OK) == 0; }

FitTrials::FitTrials(TrialOptions options, const Logger& log) : options_(std::move(options)), log_(log) {}

Needed FitTrials::measure(const Setting& setting, int64_t memory_limit) {
  return run(setting, memory_limit, {});
}

Needed FitTrials::measure_run(const Setting& setting, int64_t memory_limit, int64_t disk_bytes,
                              double step_ms) {
  std::error_code error;
  const fs::space_info space = fs::space(fs::temp_directory_path(error), error);
  const bool saves = !error && static_cast<int64_t>(space.available) > disk_bytes;
  constexpr double kLimitMs = 20e3, kFewest = 4, kMost = 8;
  const double num_steps = std::clamp(kLimitMs / std::max(1.0, step_ms), kFewest, kMost);
  std::vector<std::string> more = {"--trial-whole-run", "--trial-steps",
                                   std::to_string(static_cast<int>(num_steps))};
  if (saves) more.emplace_back("--trial-saves");
  return run(setting, memory_limit, more);
}

Needed FitTrials::run(const Setting& setting, int64_t memory_limit, const std::vector<std::string>& more) {
  ++num_trials_;
  const TemporaryFolder folder("tessera_fit");
  LaunchFlags launch = options_.launch;
  const int num_ranks = options_.simulate ? 1 : launch.nproc.value_or(1);
  launch.nproc = num_ranks;
  std::vector<std::string> args = {"memory", options_.config};
  const auto add = [&](const std::vector<std::string>& overrides) {
    for (const std::string& one : overrides) args.insert(args.end(), {"--set", one});
  };
  add(options_.overrides);
  add(overrides_of(setting, options_.disk_folder));
  if (options_.simulate) args.insert(args.end(), {"--simulate-world", std::to_string(setting.world)});
  args.insert(args.end(), {"--trial-fit", "--trial-folder", folder.path().string(), "--trial-stage",
                           std::to_string(setting.stage), "--trial-limit",
                           std::to_string(limit_of_rank(memory_limit, num_ranks))});
  args.insert(args.end(), more.begin(), more.end());
  if (const int code = run_ranks_of_self(launch, args, log_); code != 0) throw TrialFailed(code);
  if (fs::exists(folder.path() / kStruck)) return {.memory = memory_limit, .is_more = true};
  Needed needed;
  int64_t code = INT64_MAX;  // ranks share it
  for (int rank = 0; rank < num_ranks; ++rank) {
    const nlohmann::json result = parse_json(InputFile(result_of(folder.path(), rank)).read_all());
    needed.memory += result.at("memory").get<int64_t>();
    needed.growth += result.at("growth").get<int64_t>();
    needed.step_ms = std::max(needed.step_ms, result.at("step_ms").get<double>());
    code = std::min(code, result.at("code").get<int64_t>());
  }
  needed.memory -= (num_ranks - 1) * code;
  return needed;
}

int run_fit_trial(const std::string& config, const std::vector<std::string>& overrides, int simulate_world,
                  const TrialFlags& flags) {
  const comm::Environment environment = comm::environment();
  const MemoryGuard guard(flags.limit, environment.local_world_size, flags.folder);
  const int world_size = simulate_world > 0 ? simulate_world : environment.world_size;
  nlohmann::json result = {{"step_ms", 0.0}, {"growth", 0}};
  try {
    train::RunConfig run = train::load_run_config(config, world_size, overrides);
    if (flags.whole_run) {
      const std::vector<double> peaks = train::run_briefly(
          std::move(run), tasks(), environment,
          {.num_steps = flags.num_steps, .folder = fs::path(flags.folder) / "run", .saves = flags.saves},
          Logger());
      result["growth"] = growth_of(peaks);
    } else {
      const train::MemoryTrial trial = train::run_memory_trial(
          std::move(run), tasks(), environment,
          {.num_steps = 2, .simulate_world = simulate_world, .brief = true}, Logger());
      result["step_ms"] = trial.step_ms;
    }
  } catch (...) {
    if (guard.has_struck()) return 0;  // another rank has ended
    throw;
  }
  result["memory"] = std::llround(peak_bytes());
  result["code"] = std::llround(file_mapping_bytes());
  replace_file(result_of(flags.folder, environment.rank), result.dump());
  return 0;
}

}  // namespace tessera::tools
