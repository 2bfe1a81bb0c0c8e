#include "train/memory/out_of_memory.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <string_view>
#include <vector>

#include "comm/control/error_message.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/memory/allocation_failure.h"
#include "core/str.h"
#include "train/memory/cuda_memory_abi.h"
#include "train/memory/memory_advice.h"
#include "train/report/report.h"
#include "zero/plan/stage.h"

namespace tessera::train {
namespace {

/// "16.8 MB were asked for, for communication buffers of unit 3 (a.weight … b.weight), with 12.3 MB free"
std::string describe(const AllocationFailure& failure, MemoryUse use) {
  std::string text = str(megabytes(failure.bytes), " were asked for, for ", name_of(use));
  if (!failure.unit.empty()) text += " of " + failure.unit;
  if (failure.available) text += str(", with ", megabytes(*failure.available), " free");
  if (failure.total) text += str(" of ", megabytes(*failure.total));
  return text;
}

/// What the allocator said, and what was noted. The CPU's says less than the latter.
std::string describe(const std::exception& error, const std::optional<AllocationFailure>& failure,
                     MemoryUse use) {
  if (!failure) return comm::error_message(error);
  if (!failure->total) return describe(*failure, use);
  return str(describe(*failure, use), ": ", comm::error_message(error));
}

/// Advises where nothing can be computed.
std::vector<std::string> what_may_help(const MemoryDemand& demand, const RankMemory& rank) {
  const EngineConfig& config = rank.config;
  std::vector<std::string> advice;
  if (!zero::sharding_of(config.zero.stage).parameters && rank.comm.size() > 1)
    advice.push_back(str("a higher zero_optimization.stage (now ", config.zero.stage, ")"));
  if (demand.batch > 1)
    advice.push_back(str("a smaller ", demand.batch_key, " (now ", demand.batch, ")",
                         demand.trains ? str(" with more gradient_accumulation_steps (now ",
                                             config.gradient_accumulation_steps, ")")
                                       : ""));
  advice.push_back(str("more ranks (now ", rank.comm.size(), ")"));
  return advice;
}

std::string changes(const std::optional<AllocationFailure>& failure, MemoryUse use,
                    const std::optional<MemoryBytes>& held, const MemoryDemand& demand,
                    const RankMemory& rank) {
  if (!failure || !failure->available || rank.engine == nullptr)
    return str("; what may help: ", join(what_may_help(demand, rank), ", or "));
  Shortage shortage{.wanted = failure->bytes,
                    .available = *failure->available,
                    .activations = {},
                    .for_activations = use == MemoryUse::kActivations,
                    .batch_key = demand.batch_key,
                    .batch = demand.batch,
                    .trains = demand.trains};
  if (held) shortage.activations = (*held)[MemoryUse::kActivations];
  const zero::ShardedModel& model = rank.engine->sharded_model();
  const std::vector<std::string> advice =
      memory_advice(shortage, rank.config, model.layout(), model.state_model(rank.config.checkpoint.async));
  if (advice.empty())
    return str("; neither a stage, more ranks, offloading nor a smaller batch alone frees the ",
               megabytes(shortage.missing()), " that were missing");
  return str("; to free the ", megabytes(shortage.missing()), " that were missing: ", join(advice, ", or "));
}

}  // namespace

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr) return false;  // it may quote another rank's message
  const std::string_view text = error.what();
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         text.find("can't allocate memory") != text.npos || text.find("CUDA out of memory") != text.npos;
}

void note_failures_of(at::Device device) {
  if (!device.is_cuda()) return;
  static const char* const failed = [] {
    at::globalContext().lazyInitDevice(at::kCUDA);
    const auto note_failures = TESSERA_RESOLVE(tessera_cuda_note_failures);
    return note_failures(
        [](int64_t bytes, int64_t free, int64_t total) { note_allocation_failure(bytes, free, total); });
  }();
  (void)failed;  // the message then has less
}

void fail_for_memory(const std::exception& error, const MemoryDemand& demand, const RankMemory& rank) {
  const std::optional<AllocationFailure> failure = take_allocation_failure();
  std::optional<MemoryBytes> held;
  if (rank.meter) held = rank.meter->at_failure();
  const MemoryUse use = failure && failure->use    ? *failure->use
                        : demand.batch_key.empty() ? MemoryUse::kOther
                                                   : MemoryUse::kActivations;
  std::string line =
      str("out of memory ", demand.when, " on rank ", rank.comm.rank(), ": ", describe(error, failure, use));
  line += rank.meter ? str("; in use then (MB): ", format_memory(held.value_or(rank.meter->peak())))
                     : "; memory_breakdown: true shows what memory was used for";
  throw OutOfMemoryError(line + changes(failure, use, held, demand, rank));
}

}  // namespace tessera::train
