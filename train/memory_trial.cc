#include "train/memory_trial.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/init/self.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "engine/config/sharding_plan.h"
#include "engine/optimizer/optimizer_setup.h"
#include "train/data/train_loader.h"
#include "train/report/report.h"
#include "train/run.h"
#include "zero/optimizer/whole_formula.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr MemoryUse kModelState[] = {MemoryUse::kParameters, MemoryUse::kGradients, MemoryUse::kMaster,
                                     MemoryUse::kOptimizer, MemoryUse::kSnapshot};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Runs the task's training steps.
class Steps {
 public:
  Steps(Task& task, Engine& engine, TrainSampler sampler, const DataLoaderOptions& data)
      : task_(task),
        engine_(engine),
        accumulation_steps_(sampler.shape().accumulation_steps),
        loader_(task, std::move(sampler), {}, std::numeric_limits<int64_t>::max(), data) {}

  /// Calls `begins(phase)` at the start of each phase of the last micro-step.
  template <class Begins>
  void run(const Begins& begins) {
    for (int64_t micro_step = 0; micro_step < accumulation_steps_; ++micro_step) {
      const TrainBatch part = loader_.next();
      const bool last = micro_step + 1 == accumulation_steps_;
      if (last) begins("forward");
      const at::Tensor loss = task_.loss(part.batch);
      if (last) begins("backward");
      engine_.backward(loss);
      if (last) begins("step");
      engine_.step();
    }
  }
  void run() {
    run([](const char*) {});
  }

 private:
  Task& task_;
  Engine& engine_;
  int64_t accumulation_steps_;
  TrainLoader loader_;
};

/// Returns at most kMaxSamples: the sample with the most bytes of each time interval, so that no peak is
/// lost.
std::vector<MemorySample> downsample(const std::vector<MemorySample>& all) {
  if (all.size() <= MemoryTrial::kMaxSamples) return all;
  const double end = all.back().seconds;
  std::vector<MemorySample> few;
  size_t bin = 0;
  for (const MemorySample& sample : all) {
    const auto its_bin = static_cast<size_t>(sample.seconds / end * (MemoryTrial::kMaxSamples - 1));
    if (few.empty() || its_bin != bin) {
      few.push_back(sample);
    } else if (sample.bytes.total() > few.back().bytes.total()) {
      few.back() = sample;
    }
    bin = its_bin;
  }
  return few;
}

std::string key_of(const zero::Tiers& tiers) {
  if (!tiers.any_below_device()) return kTierSettings.front().key;
  for (const TierSetting& setting : kTierSettings)
    if (setting.tiers == tiers) return setting.key;
  return "other";
}

}  // namespace

void count_owned(const OptimizerConfig& config, const std::vector<zero::ParameterSpec>& parameters,
                 ModelCount& count) {
  const OptimizerSetup setup = set_up_optimizer(config);
  count.owned_state_bytes = count.largest_owned_bytes = 0;
  if (!kernels::updates_whole_parameters(setup.kind)) return;
  for (const zero::ParameterSpec& parameter : parameters) {
    if (!parameter.trainable) continue;
    const int64_t bytes = zero::formula_state_bytes(
        setup.kind, setup.groups[static_cast<size_t>(setup.group_of(parameter.name))], parameter);
    count.owned_state_bytes += bytes;
    count.largest_owned_bytes = std::max(count.largest_owned_bytes, bytes);
  }
}

ModelCount count_of(Engine& engine) {
  const EngineConfig& config = engine.config();
  const zero::Layout& layout = engine.sharded_model().layout();
  ModelCount count{.num_states = static_cast<int>(engine.sharded_model().optimizer().state_names().size()),
                   .dtype = config.compute_dtype(),
                   .accumulate = config.grad_accum_dtype.value_or(DType::kFloat32),
                   .async_checkpoints = config.checkpoint.async && engine.device().is_cpu()};
  count_owned(config.optimizer, layout.parameters(), count);
  std::map<DType, ModelCount::OfType> by_type;
  for (int i = 0; i < layout.num_parameters(); ++i) {
    const zero::UnitSpec& unit = layout.units()[static_cast<size_t>(layout.slice(i).unit)];
    const int64_t numel = layout.parameters()[static_cast<size_t>(i)].numel();
    ModelCount::OfType& of_type = by_type[unit.dtype];
    of_type.dtype = unit.dtype;
    (unit.trainable ? of_type.num_trainable : of_type.num_frozen) += numel;
    (unit.trainable ? count.num_trainable : count.num_frozen) += numel;
  }
  if (by_type.size() > 1 || !by_type.contains(count.dtype))
    for (const auto& [dtype, of_type] : by_type) count.by_type.push_back(of_type);
  return count;
}

void describe_engine(Engine& engine, MemoryTrial& trial) {
  const EngineConfig& config = engine.config();
  const comm::Communicator& comm = engine.comm();
  trial.stage = config.zero.stage;
  trial.rank = comm.rank();
  trial.world_size = comm.size();
  trial.device = engine.device().is_cpu() ? "cpu" : "cuda";
  trial.backend = comm.backend();
  trial.precision = precision_of(config);
  trial.optimizer = type_of(config.optimizer.options);
  trial.activations = config.activations.policy;
  trial.tiers = key_of(plan_sharding(config, comm.size(), !engine.device().is_cpu()).tiers);
  trial.model = count_of(engine);
}

int64_t MemoryTrial::model_state() const {
  int64_t sum = 0;
  for (const MemoryUse use : kModelState) sum += held[use];
  return sum;
}

namespace {

/// The ranks' communicator, or one that simulates `options.simulate_world` ranks.
comm::CommunicatorPtr trial_group(const TrainerConfig& trainer, const comm::Environment& environment,
                                  const MemoryTrialOptions& options, const Logger& logger) {
  comm::CommunicatorPtr comm = join_group(trainer, environment, logger);
  if (options.simulate_world == 0) return comm;
  return std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{.rank = options.simulate_rank,
                                                                       .size = options.simulate_world,
                                                                       .one_host = trainer.backend == "shm",
                                                                       .device = comm->device()});
}

Engine& initialize_trial(RunConfig& run, Task& task, const comm::CommunicatorPtr& comm, int local_rank,
                         const Logger& logger) {
  InitOptions init;
  init.device = comm->device();
  init.local_rank = local_rank;
  init.log = logger;
  init.caller_reports = true;
  init.steps_per_epoch = 1'000;  // memory does not depend on the schedule
  fill_in_schedule(run.engine.scheduler, 1'000'000);
  run.engine.flops_profiler = {};
  run.engine.profiler = {};
  at::manual_seed(static_cast<uint64_t>(run.engine.seed));
  return task.initialize(run.engine, comm, init);
}

/// The folder of the state on disk.
std::string folder_of(const ZeroConfig& zero) {
  return (zero.offload_optimizer.on_disk() ? zero.offload_optimizer : zero.offload_param)
      .nvme_path.value_or("");
}

/// The bytes of the tensors of model state that the device's allocator has made; snapshots are not there.
int64_t state_on_device(const Engine& engine) {
  zero::StateBytes bytes = engine.measured_bytes();
  bytes.snapshot = 0;
  return bytes.total();
}

/// Fills in `formula`, `host` and `disk`. `before`: what the file had read and written `num_steps` steps ago.
void measure_state(Engine& engine, const ZeroConfig& zero, std::pair<int64_t, int64_t> before, int num_steps,
                   MemoryTrial& trial) {
  trial.formula = engine.formula_bytes();
  trial.host.held = engine.measured_bytes(zero::Tier::kHost);
  trial.host.used = trial.host.held.total() > 0;
  trial.host.formula = engine.formula_bytes(zero::Tier::kHost);
  trial.host.pinned = engine.pinned_bytes();
  const zero::OffloadStore* const store = engine.sharded_model().offload_store();
  if (store == nullptr) return;
  trial.disk.used = true;
  trial.disk.formula = engine.formula_bytes(zero::Tier::kDisk);
  trial.disk.held = engine.measured_bytes(zero::Tier::kDisk);
  trial.disk.file = unnamed_file_bytes(folder_of(zero));
  trial.disk.buffers_limit = store->budget();
  trial.disk.read = (store->bytes_read() - before.first) / num_steps;
  trial.disk.written = (store->bytes_written() - before.second) / num_steps;
}

std::pair<int64_t, int64_t> transferred(Engine& engine) {
  const zero::OffloadStore* const store = engine.sharded_model().offload_store();
  return store == nullptr ? std::pair<int64_t, int64_t>()
                          : std::pair(store->bytes_read(), store->bytes_written());
}

/// Fills in `step_ms`, `held`, `phases`, `timeline` and `peak`, and what measure_state() does.
void measure_steps(Steps& steps, Engine& engine, const ZeroConfig& zero, MemoryMeter& meter, int num_steps,
                   MemoryTrial& trial) {
  steps.run();  // the first step records the order of units
  steps.run();
  meter.reset_peak();
  const std::pair<int64_t, int64_t> before = transferred(engine);
  std::vector<double> times;
  for (int step = 0; step < num_steps; ++step) {
    const auto start = Clock::now();
    steps.run();
    times.push_back(seconds_since(start) * 1e3);
  }
  std::sort(times.begin(), times.end());
  trial.step_ms = times.empty() ? 0 : times[times.size() / 2];
  measure_state(engine, zero, before, num_steps, trial);
  trial.held = meter.now();
  if (trial.device != "cpu") trial.rounding = trial.model_state() - state_on_device(engine);
  const auto start = Clock::now();
  meter.record(&engine.sharded_model().layout());
  steps.run([&](const char* phase) { trial.phases.emplace_back(phase, seconds_since(start)); });
  trial.record = meter.take_record();
  trial.timeline = downsample(trial.record.samples());
  trial.peak = meter.peak();
}

}  // namespace

MemoryTrial run_memory_trial(RunConfig run, const Registry& registry, const comm::Environment& environment,
                             const MemoryTrialOptions& options, const Logger& logger) {
  set_up_process(run.trainer, environment);
  if (options.simulate_world > 0) {  // workspaces depend on the number of threads
    comm::Environment simulated = environment;
    simulated.local_world_size = options.simulate_world;
    at::set_num_threads(choose_num_threads(run.trainer, simulated));
  }
  const std::unique_ptr<Task> task = registry.make(run.model, run.data);
  const comm::CommunicatorPtr comm = trial_group(run.trainer, environment, options, logger);
  const at::Device device = comm->device();

  MemoryTrial trial;
  const double idle_bytes = own_bytes();
  MemoryMeter meter(device.type());
  Engine& engine = initialize_trial(run, *task, comm, environment.local_rank, logger);

  // A simulated rank trains on its own samples: the whole group's batch may be larger than the data.
  const bool alone = options.simulate_world > 0;
  TrainSampler sampler = train_sampler(run, *task, alone ? 1 : comm->size(), alone ? 0 : comm->rank());
  trial.micro_batch = sampler.shape().micro_batch;
  Steps steps(*task, engine, std::move(sampler), data_loader_options(run.trainer, device));
  meter.set_default_use(MemoryUse::kActivations);
  describe_engine(engine, trial);
  measure_steps(steps, engine, run.engine.zero, meter, options.num_steps, trial);
  trial.process_peak = std::llround(peak_own_bytes([&] { steps.run(), steps.run(); }) - idle_bytes);
  trial.whole_peak = std::llround(peak_bytes());
  trial.code = std::llround(file_mapping_bytes());

  trial.peak_reserved = meter.peak_reserved();
  return trial;
}

namespace {

MemoryBytes bytes_of(const nlohmann::json& json) {
  MemoryBytes bytes;
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    bytes.by_use[use] = json.at(std::string(key_of(static_cast<MemoryUse>(use))));
  return bytes;
}

nlohmann::ordered_json to_json(const zero::StateBytes& bytes) {
  return {{"parameters", bytes.parameters}, {"gradients", bytes.gradients}, {"master", bytes.master},
          {"optimizer", bytes.optimizer},   {"snapshot", bytes.snapshot},   {"total", bytes.total()}};
}

zero::StateBytes state_bytes_of(const nlohmann::json& json) {
  return {json.at("parameters"), json.at("gradients"), json.at("master"), json.at("optimizer"),
          json.at("snapshot")};
}

}  // namespace

nlohmann::ordered_json to_json(const MemoryTrial& trial) {
  nlohmann::ordered_json json;
  json["stage"] = trial.stage;
  json["rank"] = trial.rank;
  json["world_size"] = trial.world_size;
  json["device"] = trial.device;
  json["backend"] = trial.backend;
  json["precision"] = trial.precision;
  json["optimizer"] = trial.optimizer;
  json["activations"] = trial.activations;
  json["micro_batch"] = trial.micro_batch;
  json["tiers"] = trial.tiers;
  json["formula"] = to_json(trial.formula);
  json["model_state"] = trial.model_state();
  json["held"] = to_json(trial.held);
  json["rounding"] = trial.rounding;
  json["peak"] = to_json(trial.peak);
  json["peak_reserved"] = trial.peak_reserved;
  json["process_peak"] = trial.process_peak;
  json["whole_peak"] = trial.whole_peak;
  json["code"] = trial.code;
  if (trial.host.used)
    json["host"] = {{"formula", to_json(trial.host.formula)},
                    {"held", to_json(trial.host.held)},
                    {"pinned", trial.host.pinned}};
  if (trial.disk.used)
    json["disk"] = {{"formula", to_json(trial.disk.formula)},
                    {"held", to_json(trial.disk.held)},
                    {"file", trial.disk.file},
                    {"buffers_limit", trial.disk.buffers_limit},
                    {"read", trial.disk.read},
                    {"written", trial.disk.written}};
  json["step_ms"] = trial.step_ms;
  for (const auto& [phase, seconds] : trial.phases) json["phases"][phase] = seconds;
  for (const MemorySample& sample : trial.timeline) {
    nlohmann::ordered_json row = nlohmann::ordered_json::array({sample.seconds});
    for (const int64_t bytes : sample.bytes.by_use) row.push_back(bytes);
    json["timeline"].push_back(std::move(row));
  }
  return json;
}

MemoryTrial memory_trial_of(const nlohmann::json& json) {
  MemoryTrial trial;
  trial.stage = json.at("stage");
  trial.rank = json.at("rank");
  trial.world_size = json.at("world_size");
  trial.device = json.at("device");
  trial.backend = json.at("backend");
  trial.precision = json.at("precision");
  trial.optimizer = json.at("optimizer");
  trial.activations = json.at("activations");
  trial.micro_batch = json.at("micro_batch");
  trial.tiers = json.at("tiers");
  trial.formula = state_bytes_of(json.at("formula"));
  trial.held = bytes_of(json.at("held"));
  trial.rounding = json.at("rounding");
  trial.peak = bytes_of(json.at("peak"));
  trial.peak_reserved = json.at("peak_reserved");
  trial.process_peak = json.at("process_peak");
  trial.whole_peak = json.at("whole_peak");
  trial.code = json.at("code");
  if (json.contains("host")) {
    const nlohmann::json& host = json.at("host");
    trial.host = {true, state_bytes_of(host.at("formula")), state_bytes_of(host.at("held")),
                  host.at("pinned")};
  }
  if (json.contains("disk")) {
    const nlohmann::json& disk = json.at("disk");
    trial.disk = {true,
                  state_bytes_of(disk.at("formula")),
                  state_bytes_of(disk.at("held")),
                  disk.at("file"),
                  disk.at("buffers_limit"),
                  disk.at("read"),
                  disk.at("written")};
  }
  trial.step_ms = json.at("step_ms");
  for (const auto& [phase, seconds] : json.at("phases").items())
    trial.phases.emplace_back(phase, seconds.get<double>());
  std::sort(trial.phases.begin(), trial.phases.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  for (const nlohmann::json& row : json.at("timeline")) {
    MemorySample sample{row.at(0), {}};
    for (size_t use = 0; use < kNumMemoryUses; ++use) sample.bytes.by_use[use] = row.at(1 + use);
    trial.timeline.push_back(sample);
  }
  return trial;
}

}  // namespace tessera::train
