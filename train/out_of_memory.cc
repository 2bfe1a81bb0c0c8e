#include "train/out_of_memory.h"

#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/str.h"
#include "train/report.h"
#include "zero/stage.h"

namespace tessera::train {

bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         std::string_view(error.what_without_backtrace()).find("can't allocate memory") != std::string_view::npos;
}

void fail_for_memory(const c10::Error& error, const std::string& when, const EngineConfig& config, const comm::Communicator& comm,
                     const std::optional<MemoryMeter>& meter) {
  const std::string what = error.what_without_backtrace();
  std::string held = "; memory_breakdown: true would say what it was for";
  if (meter) held = str("; held then (MB): ", format_memory(meter->at_failure().value_or(meter->peak())));
  std::vector<std::string> advice;
  if (!zero::sharding_of(config.zero.stage).parameters && comm.size() > 1)
    advice.push_back(str("raise zero_optimization.stage (", config.zero.stage, ")"));
  if (config.train_micro_batch_size_per_gpu > 1)
    advice.push_back(str("lower train_micro_batch_size_per_gpu (", config.train_micro_batch_size_per_gpu,
                         ") and raise gradient_accumulation_steps (", config.gradient_accumulation_steps, ") to match"));
  advice.push_back(str("use more ranks than ", comm.size()));
  throw Error(str("out of memory ", when, " on rank ", comm.rank(), ": ", what.substr(0, what.find('\n')), held, "; to change: ",
                  join(advice, ", or ")));
}

}  // namespace tessera::train
