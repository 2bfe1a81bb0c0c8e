#include "engine/profile/step_profiler.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <utility>

#include "comm/control/error_message.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

/// "12.3 GFLOP"
std::string in_words(int64_t flops) {
  auto value = static_cast<double>(flops);
  const char* unit = " ";
  for (const char* larger : {" k", " M", " G", " T", " P"}) {
    if (value < 1000) break;
    value /= 1000, unit = larger;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.4g%sFLOP", value, unit);
  return text;
}

}  // namespace

StepProfiler::StepProfiler(const FlopsProfilerConfig& flops, const ProfilerConfig& trace, at::Device device,
                           int rank, Logger log)
    : trace_(trace),
      counts_(flops),
      device_(device),
      rank_(rank),
      log_(std::move(log)),
      waits_for_trace_(trace.steps > 0) {
  if (trace_.path.empty()) trace_.path = "profile";
  begin(0);
}

StepProfiler::~StepProfiler() {
  if (traced_) end_trace();
}

void StepProfiler::begin(int64_t steps) {
  // Where a run goes on after the step that is asked for, the next whole one takes its place.
  if (counts_.enabled && !flops_ && steps + 1 >= counts_.profile_step)
    counter_ = std::make_unique<FlopCounter>();
  if (waits_for_trace_ && !traced_ && steps + 1 >= trace_.first_step) {
    traced_ = 0;
    begin_trace();
  }
}

void StepProfiler::end_step(int64_t steps) {
  if (counter_) {
    flops_ = counter_->flops();
    counter_.reset();
    if (rank_ == 0)
      log_.info(str("flops_profiler: step ", steps, " took ", in_words(flops_->forward), " in forward and ",
                    in_words(flops_->backward), " in backward on rank 0"));
  }
  if (traced_ && ++*traced_ >= trace_.steps) end_trace();
  begin(steps);
}

void StepProfiler::begin_trace() {
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device_.is_cuda()) activities.insert(ActivityType::CUDA);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO,
                                                     /*report_input_shapes=*/true);
  try {
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
  } catch (const std::exception& error) {  // another profiler is at work on this thread
    traced_.reset();
    waits_for_trace_ = false;
    log_.warning(str("profiler: no trace: ", comm::error_message(error)));
  }
}

void StepProfiler::end_trace() {
  traced_.reset();
  waits_for_trace_ = false;
  char name[64];
  std::snprintf(name, sizeof name, "rank_%05d.pt.trace.json", rank_);
  const std::filesystem::path path = std::filesystem::path(trace_.path) / name;
  try {
    const auto result = profiler::disableProfiler();
    std::filesystem::create_directories(trace_.path);
    result->save(path.string());
    if (!std::filesystem::exists(path)) throw Error("the file was not written");
    if (rank_ == 0) log_.info(str("profiler: the trace of rank 0 is ", path));
  } catch (const std::exception& error) {  // training goes on without it
    log_.warning(str("profiler: no trace at ", path, ": ", comm::error_message(error)));
  }
}

}  // namespace tessera
