// Trials of `tessera memory --fit`: a setting is trained for a few steps, in processes of its own, and its
// memory is measured.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "core/log.h"
#include "tools/launch/launch_command.h"
#include "tools/memory/fit_setting.h"

namespace tessera::tools {

/// Ends this process, with success, as soon as its memory exceeds a limit, and leaves a file that says so; or
/// when another rank has left that file. So a trial that does not fit takes nothing from other programs.
class MemoryGuard {
 public:
  /// `limit_bytes`: of this rank, where it shares memory with `num_ranks` - 1 others. 0: none.
  MemoryGuard(int64_t limit_bytes, int num_ranks, const std::filesystem::path& folder);
  ~MemoryGuard();
  MemoryGuard(const MemoryGuard&) = delete;
  /// Whether the process will end: what fails then is not to be reported.
  bool has_struck() const;

 private:
  std::filesystem::path file_;
  std::jthread watcher_;
};

/// What a setting needs on this host, over all of its ranks. Bytes.
struct Needed {
  int64_t memory = 0;
  double step_ms = 0;    ///< of an optimizer step; 0: not measured
  bool is_more = false;  ///< it was ended there, and needs more
  int64_t growth = 0;    ///< measure_run(): what each later step needed more than the one before
};

struct TrialOptions {
  std::string config;
  std::vector<std::string> overrides;  ///< the user's
  std::string disk_folder;
  LaunchFlags launch;     ///< nproc: ranks on this host
  bool simulate = false;  ///< one process that is rank 0 of Setting::world
};

/// The ranks have failed, and have printed why.
struct TrialFailed : std::exception {
  explicit TrialFailed(int code) : exit_code(code) {}
  const int exit_code;
};

/// Runs trials. Each takes seconds to minutes, and ends when the ranks of this host have more than
/// `memory_limit`.
class FitTrials {
 public:
  FitTrials(TrialOptions options, const Logger& log);

  /// Some steps of training. Throws TrialFailed.
  Needed measure(const Setting& setting, int64_t memory_limit);
  /// A short run as `tessera train` makes it, with evaluation and, where TMPDIR has `disk_bytes`, a
  /// checkpoint. `step_ms`: of a step as measured; the slower it is, the fewer steps it has: 8 to 4.
  Needed measure_run(const Setting& setting, int64_t memory_limit, int64_t disk_bytes, double step_ms);
  bool simulates() const { return options_.simulate; }
  int num_trials() const { return num_trials_; }

 private:
  Needed run(const Setting& setting, int64_t memory_limit, const std::vector<std::string>& more);

  TrialOptions options_;
  Logger log_;
  int num_trials_ = 0;
};

/// Of the command line of a rank of a trial, hidden.
struct TrialFlags {
  int stage = -1;      ///< of such a rank
  std::string folder;  ///< for its results; empty: this process is no such rank
  bool fits = false;   ///< of --fit: it is guarded, and fewer steps are measured
  bool whole_run = false;
  int num_steps = 0;  ///< of a whole run
  bool saves = false;
  int64_t limit = 0;  ///< of MemoryGuard
};

/// Collective. What a rank of a trial of --fit does. `config` and `overrides`: its setting.
int run_fit_trial(const std::string& config, const std::vector<std::string>& overrides, int simulate_world,
                  const TrialFlags& flags);

}  // namespace tessera::tools
