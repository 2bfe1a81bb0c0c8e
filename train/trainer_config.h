// RunConfig: everything one configuration file says about a run. The engine's keys, the `trainer` section,
// and `model` and `data`, whose inside is read by the task that is named there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config/check.h"
#include "engine/config/config.h"
#include "engine/config/key.h"
#include "engine/config/section.h"

namespace tessera::train {

/// The `trainer` section.
struct TrainerConfig {
  std::string name = {};  ///< of the run; default: the configuration file's name without folder and ending
  std::string output_dir = {};           ///< default: runs/NAME
  bool overwrite_output_dir = false;     ///< replaces a run in output_dir that has not finished
  int64_t epochs = 1;                    ///< passes over the training data; 0 when max_steps counts instead
  int64_t max_steps = 0;                 ///< optimizer steps; 0: epochs count
  int64_t eval_every_epochs = 1;         ///< 0: not by epochs
  int64_t eval_every_steps = 0;          ///< optimizer steps; 0: not by steps
  int64_t eval_batch_size = 0;           ///< samples of one forward pass on one rank; once read never 0
  int64_t histograms_every_steps = 0;    ///< optimizer steps; 0: none
  int64_t save_every_epochs = 1;         ///< 0: not by epochs
  int64_t save_every_steps = 0;          ///< optimizer steps; 0: not by steps
  std::string metric_for_best = "loss";  ///< by which evaluation the best checkpoint is chosen
  std::string best_is = "auto";  ///< "greatest", "least", or by the metric's name: losses are to be low
  bool load_best_at_end = true;  ///< tests and exports the best checkpoint's weights; false: the last
  int64_t early_stopping_patience =
      0;  ///< evaluations without a better metric_for_best; 0: never stops early
  double early_stopping_threshold = 0;  ///< by how much it is to be better
  bool export_model = true;             ///< writes model.safetensors at the end
  std::string device = "auto";          ///< auto: cuda when the machine has it; cpu; cuda
  std::string backend = "auto";         ///< comm.backend: auto, shm, gloo or nccl
  int64_t num_threads = 0;     ///< CPU threads of one rank; 0: the machine's cores over the ranks on it
  bool deterministic = false;  ///< refuses operators whose result may differ from run to run
  double timeout_s = 1800;     ///< a collective that waits longer fails
  double rendezvous_timeout_s = 300;  ///< so does the meeting of all ranks
  int64_t dataloader_num_workers =
      0;  ///< threads of one rank that make batches; 0: the training thread makes them
  int64_t dataloader_prefetch_factor = 2;  ///< batches made ahead, for each of these threads
  bool dataloader_pin_memory = true;       ///< CUDA: batches go to the device through page-locked memory
  bool dataloader_drop_last = true;        ///< false: what is left over of an epoch is a smaller step
  /// As Hugging Face's Trainer: a metric whose name ends in "loss" is better when it is
  /// lower. So are perplexity and errors.
  bool greater_is_better() const {
    if (best_is != "auto") return best_is == "greatest";
    if (metric_for_best.ends_with("loss")) return false;
    for (const char* error : {"perplexity", "mse", "rmse", "mae"})
      if (metric_for_best == error) return false;
    return true;
  }
  bool operator==(const TrainerConfig&) const = default;
};

struct RunConfig {
  EngineConfig engine;
  TrainerConfig trainer;
  config::Section model;        ///< `model`, to be read by the model's factory
  config::Section data;         ///< `data`, to be read by the task
  config::ConfigReport report;  ///< warnings, and what became of "auto"
};

/// Local. total_num_steps of a schedule that ends with the run, unless it was given, and
/// warmup_num_steps in place of warmup_ratio.
void fill_in_schedule(ScheduleOptions& schedule, int64_t total_steps);

/// Local. A warning when this schedule is probably not meant for a run of `total_steps` optimizer steps; else
/// "".
std::string schedule_warning(const ScheduleOptions& schedule, int64_t total_steps);

/// Local. "fp32", "bf16", or "fp32 under bf16 autocast".
std::string precision_of(const EngineConfig& config);

/// Local. The engine's keys and the trainer's.
config::KeyTable run_keys();

/// Local. Reads a configuration file for a run on `world_size` ranks; `overrides`
/// as given to --set. Throws ConfigError.
RunConfig load_run_config(const std::string& file, int world_size,
                          const std::vector<std::string>& overrides = {});

/// Local. The same from text; `source` names it in errors and gives the run its name.
RunConfig parse_run_config(std::string_view json_text, const std::string& source, int world_size,
                           const std::vector<std::string>& overrides = {});

/// Local. The resolved configuration: every key filled in (model and data as far as they have been
/// read), which parses to the same values again.
nlohmann::ordered_json resolved(const RunConfig& run);
/// Local. That as indented text, for files.
std::string dump_resolved(const RunConfig& run);

}  // namespace tessera::train
