// StepProfiler: what the sections `profiler` and `flops_profiler` ask for, at the right steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "core/log.h"
#include "engine/config/config.h"
#include "engine/profile/flop_counter.h"

namespace tessera {

/// Takes traces and counts operations of the steps that the configuration names. Owns the trace and the count
/// that are under way. Used by the thread that trains: libtorch's profiler belongs to a thread, and to what
/// autograd does for it.
class StepProfiler {
 public:
  /// `rank`: of the file, and rank 0 logs.
  StepProfiler(const FlopsProfilerConfig& flops, const ProfilerConfig& trace, at::Device device, int rank,
               Logger log);
  /// A trace that is under way is written.
  ~StepProfiler();
  StepProfiler(const StepProfiler&) = delete;

  /// `steps` optimizer steps are done: ends what ends here, and begins what begins with the next one.
  void end_step(int64_t steps);

  /// Returns the FLOPs of one optimizer step of this rank, the step that was counted; unset before.
  const std::optional<Flops>& flops() const { return flops_; }

 private:
  void begin(int64_t steps);
  void begin_trace();
  void end_trace();

  ProfilerConfig trace_;
  FlopsProfilerConfig counts_;
  at::Device device_;
  int rank_;
  Logger log_;
  bool waits_for_trace_;
  std::unique_ptr<FlopCounter> counter_;  // while the step is under way
  std::optional<int64_t> traced_;         // steps that are in the trace that is under way
  std::optional<Flops> flops_;
};

}  // namespace tessera
