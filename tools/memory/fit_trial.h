// A trial of `tessera memory --fit`: a setting is trained in a short run, in processes of its own, and its
// memory is measured.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "core/log.h"
#include "tools/launch/launch_command.h"

namespace tessera::tools {

/// What a run needs, in bytes: on CPU ranks all of this host's together, on CUDA the one that needs most.
struct Needed {
  int64_t memory = 0;               ///< 0 with `is_more`: an allocation failed, and no bytes are known
  int64_t idle = 0;                 ///< of that, what there was before the model was made
  double step_s = 0;                ///< of an optimizer step
  bool is_more = false;             ///< the trial was ended there, and it needs more
  bool without_checkpoint = false;  ///< TMPDIR had no room for one
  int64_t growth = 0;               ///< what each later step needed more than the one before
};

struct FitTrialOptions {
  std::string config;
  std::vector<std::string> overrides;  ///< as --set gives them
  LaunchFlags launch;                  ///< nproc: ranks on this host
  bool on_cuda = false;
  int64_t memory_limit = 0;  ///< bytes at which it ends, so that it takes nothing from other programs
  int64_t disk_bytes = 0;    ///< without as much in TMPDIR it saves no checkpoint
};

/// The ranks have failed, and have printed why.
struct TrialFailed : std::exception {
  explicit TrialFailed(int code) : exit_code(code) {}
  const int exit_code;
};

/// Runs a trial, which takes seconds to minutes. Throws TrialFailed.
Needed run_fit_trial(const FitTrialOptions& options, const Logger& log);

/// What a rank of a trial is told.
struct FitRankOptions {
  std::string folder;  ///< for its results
  int64_t limit = 0;   ///< bytes of its process; 0: none
  bool saves = false;
};

/// Collective. What a rank of a trial does. `config` and `overrides`: its setting.
int run_fit_rank(const std::string& config, const std::vector<std::string>& overrides,
                 const FitRankOptions& options);

}  // namespace tessera::tools
