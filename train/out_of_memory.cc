#include "train/out_of_memory.h"

#include <c10/util/Exception.h>

#include <string_view>
#include <vector>

#include "comm/error_message.h"
#include "core/error.h"
#include "core/str.h"
#include "train/report.h"
#include "zero/stage.h"

namespace tessera::train {

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr) return false;  // it may quote another rank's message
  const std::string_view text = error.what();
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         text.find("can't allocate memory") != text.npos || text.find("CUDA out of memory") != text.npos;
}

void fail_for_memory(const std::exception& error, const std::string& when, const EngineConfig& config,
                     const comm::Communicator& comm, const std::optional<MemoryMeter>& meter) {
  std::string held = "; memory_breakdown: true shows what memory was used for";
  if (meter) held = str("; in use then (MB): ", format_memory(meter->at_failure().value_or(meter->peak())));
  std::vector<std::string> advice;
  if (!zero::sharding_of(config.zero.stage).parameters && comm.size() > 1)
    advice.push_back(str("raise zero_optimization.stage (", config.zero.stage, ")"));
  if (config.train_micro_batch_size_per_gpu > 1)
    advice.push_back(str("lower train_micro_batch_size_per_gpu (", config.train_micro_batch_size_per_gpu,
                         ") and raise gradient_accumulation_steps (", config.gradient_accumulation_steps,
                         ") to match"));
  advice.push_back(str("use more ranks than ", comm.size()));
  throw Error(str("out of memory ", when, " on rank ", comm.rank(), ": ", comm::error_message(error), held,
                  "; to change: ", join(advice, ", or ")));
}

}  // namespace tessera::train
