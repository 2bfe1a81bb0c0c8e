#include "train/trained_run.h"

#include <unistd.h>

#include <cerrno>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "comm/init/agreement.h"
#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "train/data/data_digest.h"
#include "train/report/report.h"
#include "train/run/run_directory.h"
#include "train/run/run_path.h"
#include "train/run/same_run.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// Drops momentum and moments, which would take twice the memory of the weights.
void drop_training_state(EngineConfig& config) {
  config.optimizer = {.options = SGDOptions{.lr = 0}};
  config.scheduler = ConstantLrOptions{};
  config.checkpoint.async = false;  // which would reserve memory for a copy
  config.flops_profiler = {};
  config.profiler = {};
}

/// Keeps the micro-batch and derives the global batch from it, since the number of ranks may have changed.
std::vector<std::string> allow_any_world_size(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"train_batch_size=auto", "gradient_accumulation_steps=1"});
  return overrides;
}

/// The folder may be another user's, or on a file system that is mounted read-only.
void write_results(const fs::path& folder, const std::string& model, const nlohmann::ordered_json& numbers,
                   const Logger& logger) {
  const fs::path path = folder / kEvalResultsName;
  if (::access(folder.c_str(), W_OK) != 0) {
    const std::string reason = describe_errno(errno);
    std::error_code error;
    logger.warning(str(path, " is not written: ", reason,
                       fs::exists(path, error) ? "; what it holds is of an earlier evaluation" : ""));
    return;
  }
  nlohmann::ordered_json results;
  results["model"] = model;
  results.update(numbers);
  replace_file(path, json_text(results, 2) + "\n");
}

/// Collective. Returns the folder of the checkpoint loaded.
std::string load_latest(const fs::path& checkpoints, const LoadOptions& options, Engine& engine,
                        const Logger& logger) {
  std::optional<checkpoint::LatestCheckpoint> latest;  // on rank 0
  std::string tag = comm::from_rank_0<CheckpointError>(engine.comm(), "latest checkpoint",
                                                       [&] { return latest.emplace(checkpoints, "").tag(); });
  while (true) {
    try {
      return engine.load_checkpoint(checkpoints.string(), tag, options).path;
    } catch (const CheckpointError&) {
      const std::string moved = comm::from_rank_0<CheckpointError>(engine.comm(), "next checkpoint",
                                                                   [&] { return latest->move_on(); });
      if (moved.empty()) throw;
      if (latest) logger.warning(moved);
      tag =
          comm::from_rank_0<CheckpointError>(engine.comm(), "next checkpoint", [&] { return latest->tag(); });
    }
  }
}

}  // namespace

TrainedRun open_run(const fs::path& given, int world_size, const std::vector<std::string>& overrides,
                    const std::string& tag) {
  const RunPath path = find_run(given, tag);
  const fs::path& folder = path.run;
  std::error_code error;
  const fs::path config = folder / kConfigName;
  if (!fs::is_regular_file(config, error))
    throw ConfigError(folder,
                      ": has no config.json; expected the folder of a run of `tessera train` "
                      "(trainer.output_dir), or of its checkpoints");
  TrainedRun run{.folder = folder,
                 .config = load_run_config(config.string(), world_size, allow_any_world_size(overrides)),
                 .checkpoints = path.checkpoints,
                 .weights = {},
                 .tag = path.tag};
  run.config.trainer.output_dir = folder.string();
  run.config.report = {};  // its warnings were logged in training
  drop_training_state(run.config.engine);
  if (!run.tag.empty()) return run;
  const bool whole_run = path.checkpoints != given;
  if (whole_run && fs::exists(folder / kModelName, error)) {
    run.weights = folder / kModelName;
  } else if (!checkpoint::read_latest(run.checkpoints)) {
    throw ConfigError(given, ": has neither ", kModelName,
                      " nor checkpoints; expected a run that has saved one (trainer.save_every_epochs)");
  }
  return run;
}

std::string load_trained_weights(const TrainedRun& run, Engine& engine, const Logger& logger) {
  if (!run.weights.empty()) {
    engine.load_weights(run.weights.string());
    return run.weights.string();
  }
  LoadOptions options;
  options.load_module_only = true;
  if (run.tag.empty()) return load_latest(run.checkpoints, options, engine, logger);
  return engine.load_checkpoint(run.checkpoints.string(), run.tag, options).path;
}

namespace {

std::vector<Evaluation> evaluate_in_group(const TrainedRun& run, Task& task,
                                          const comm::CommunicatorPtr& comm,
                                          const comm::Environment& environment, const TrainerOutput& output) {
  check_same_run(run.config, *comm);
  if (comm->size() > 1) check_same_data(task, *comm);
  InitOptions init;
  init.device = comm->device();
  init.log = comm->rank() == 0 ? output.logger : Logger{};
  init.caller_reports = true;  // nothing is trained
  init.local_rank = environment.local_rank;
  init.loaded_next = [](const std::string&) { return true; };
  Engine& engine = task.initialize(run.config.engine, comm, init);
  TrainedRun same = run;  // the run may be writing its model while ranks look for it
  same.weights =
      comm::from_rank_0<ConfigError>(*comm, "weights to evaluate", [&] { return run.weights.string(); });
  const std::string model = load_trained_weights(same, engine, output.logger);

  const Display display = comm->rank() == 0 ? output.display : Display{};
  std::vector<Evaluation> evaluations;
  nlohmann::ordered_json numbers;
  for (const EvaluationSet set : {EvaluationSet::kEval, EvaluationSet::kTest}) {
    if ((set == EvaluationSet::kTest ? task.test_size() : task.eval_size()) == 0) continue;
    evaluations.push_back(evaluate(task, engine, run.config.trainer, display, set));
    add_evaluation(evaluations.back(), numbers);
    print_line(display, format_result(evaluations.back()), kSummaryIndent);
  }
  if (evaluations.empty())
    throw ConfigError(run.folder, ": ", task.name(),
                      " has no samples to evaluate; expected a part for it in data");
  print_line(display, str("model    ", model), kSummaryIndent);
  if (comm->rank() == 0) write_results(run.folder, model, numbers, output.logger);
  return evaluations;
}

}  // namespace

std::vector<Evaluation> evaluate_run(const TrainedRun& run, const Registry& registry,
                                     const comm::Environment& environment, const TrainerOutput& output) {
  const TrainerConfig& trainer = run.config.trainer;
  set_up_process(trainer, environment);
  const std::unique_ptr<Task> task = registry.make(run.config.model, run.config.data, run.folder);
  const comm::CommunicatorPtr comm = join_group(trainer, environment, output.logger);
  try {
    return evaluate_in_group(run, *task, comm, environment, output);
  } catch (const std::exception& error) {
    comm::leave_because_of(error, *comm);
    throw;
  }
}

std::unique_ptr<Predictor> load_predictor(const TrainedRun& run, const Registry& registry,
                                          const Logger& logger) {
  const comm::Environment alone;
  set_up_process(run.config.trainer, alone);
  std::unique_ptr<Predictor> predictor =
      registry.make_predictor(run.config.model, run.config.data, run.folder);
  EngineConfig config = run.config.engine;
  config.zero.stage = 0;  // there is only one rank
  config.zero.mics_shard_size = ZeroConfig().mics_shard_size;
  config.zero.hpz_partition_size = ZeroConfig().hpz_partition_size;
  const comm::CommunicatorPtr comm = join_group(run.config.trainer, alone, logger);
  InitOptions init;
  init.device = comm->device();
  init.log = logger;
  init.caller_reports = true;
  init.loaded_next = [](const std::string&) { return true; };
  Engine& engine = predictor->initialize(config, comm, init);
  load_trained_weights(run, engine, logger);
  engine.eval();
  return predictor;
}

}  // namespace tessera::train
