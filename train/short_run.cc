#include "train/short_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "core/memory/process_memory.h"
#include "engine/profile/memory_meter.h"
#include "train/run.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

/// `run` in a few steps: what it does every so many epochs or steps it does once.
void shorten(RunConfig& run, const ShortRunOptions& options) {
  TrainerConfig& trainer = run.trainer;
  const bool evaluates = trainer.eval_every_epochs > 0 || trainer.eval_every_steps > 0;
  const bool saves = options.saves && (trainer.save_every_epochs > 0 || trainer.save_every_steps > 0);
  trainer.epochs = 0;
  trainer.max_steps = options.num_steps;
  trainer.eval_every_epochs = trainer.save_every_epochs = trainer.histograms_every_steps = 0;
  trainer.eval_every_steps = evaluates ? options.num_steps : 0;
  trainer.save_every_steps = saves ? options.num_steps : 0;
  trainer.export_model = trainer.export_model && saves;
  trainer.early_stopping_patience = 0;
  trainer.output_dir = options.folder.string();
  run.engine.monitors = {};
  run.engine.memory_breakdown = false;                // its meter would take what is counted here
  fill_in_schedule(run.engine.scheduler, 1'000'000);  // memory does not depend on it
}

}  // namespace

ShortRun run_briefly(RunConfig run, const Registry& registry, const comm::Environment& environment,
                     const ShortRunOptions& options, const Logger& logger) {
  set_up_process(run.trainer, environment);
  shorten(run, options);
  const std::unique_ptr<Task> task = registry.make(run.model, run.data);
  const comm::CommunicatorPtr comm = join_group(run.trainer, environment, logger);
  InitOptions init;
  init.device = comm->device();
  init.local_rank = environment.local_rank;
  std::optional<MemoryMeter> meter;
  if (!init.device.is_cpu()) meter.emplace(init.device.type());
  const auto most = [&] { return meter ? meter->peak_reserved() : std::llround(peak_bytes()); };
  ShortRun result{.idle = most(), .step_s = std::numeric_limits<double>::infinity()};
  std::optional<Clock::time_point> last;
  TrainerStart start;
  constexpr int64_t kEvalBatches = 2;
  start.max_eval_samples = kEvalBatches * run.trainer.eval_batch_size * comm->size();
  start.stop = [&] {
    const Clock::time_point now = Clock::now();
    if (last) result.step_s = std::min(result.step_s, std::chrono::duration<double>(now - *last).count());
    result.before_step.push_back(most());
    last = Clock::now();  // the kernel counts for milliseconds
    return false;
  };
  Trainer trainer(std::move(run), *task, comm, init, {.display = {}, .logger = logger}, std::move(start));
  trainer.run();
  result.peak = most();
  return result;
}

}  // namespace tessera::train
