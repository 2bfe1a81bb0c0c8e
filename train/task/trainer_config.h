// RunConfig: a run's configuration file: the engine's keys, the `trainer` section, and the sections `model`
// and `data`, which the task reads.
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
  std::string name = {};  ///< of the run; default: the configuration file's name without folder and extension
  std::string output_dir = {};             ///< default: runs/NAME
  bool overwrite_output_dir = false;       ///< replaces an unfinished run in output_dir
  int64_t epochs = 1;                      ///< passes over the training data; 0 if max_steps is used
  int64_t max_steps = 0;                   ///< optimizer steps; 0: epochs is used
  int64_t eval_every_epochs = 1;           ///< 0: not by epochs
  int64_t eval_every_steps = 0;            ///< optimizer steps; 0: not by steps
  int64_t eval_batch_size = 0;             ///< samples of one forward pass on one rank; above 0 once read
  int64_t histograms_every_steps = 0;      ///< optimizer steps; 0: none
  int64_t save_every_epochs = 1;           ///< 0: not by epochs
  int64_t save_every_steps = 0;            ///< optimizer steps; 0: not by steps
  int64_t save_in_memory_every_steps = 0;  ///< optimizer steps, for --max-restarts; 0: never
  std::string metric_for_best = "loss";    ///< metric of the evaluations that chooses the best checkpoint
  std::string best_is = "auto";            ///< "greatest", "least", or "auto": see greater_is_better()
  bool load_best_at_end = true;  ///< tests and exports the best checkpoint's weights; false: the last step's
  int64_t early_stopping_patience = 0;  ///< evaluations without a better metric_for_best; 0: none
  double early_stopping_threshold = 0;  ///< smallest improvement that counts as better
  bool export_model = true;             ///< writes model.safetensors at the end
  std::string device = "auto";          ///< auto: cuda when the machine has it; cpu; cuda
  std::string backend = "auto";         ///< comm.backend: auto, shm, hybrid, gloo, nccl or staged
  int64_t num_threads = 0;              ///< CPU threads of one rank; 0: the host's cores divided by its ranks
  bool deterministic = false;           ///< as torch.use_deterministic_algorithms(True)
  bool tf32 = false;                    ///< allow_tf32(); false: as libtorch's defaults and environment say
  std::vector<std::string> attention_backends = {};  ///< prefer_attention(); empty: as libtorch chooses
  double timeout_s = 1800;                           ///< timeout of collectives
  double rendezvous_timeout_s = 300;                 ///< timeout until all ranks have joined
  bool verify = false;                               ///< comm.verify: digests of what crosses the network
  int64_t dataloader_num_workers = 0;  ///< threads of one rank that make batches; 0: the training thread does
  int64_t dataloader_prefetch_factor = 2;  ///< batches made ahead, for each of these threads
  bool dataloader_pin_memory = true;       ///< CUDA: batches go to the device through page-locked memory
  bool dataloader_drop_last = true;        ///< false: the last samples of an epoch make a smaller step
  /// Whether a greater metric_for_best is better, by best_is. For "auto", as in Hugging Face's
  /// Trainer, metrics whose names end in "loss" are better when lower; so are perplexity and the error
  /// metrics.
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
  config::Section model;        ///< `model`, read by the task's factory
  config::Section data;         ///< `data`, read by the task's factory
  config::ConfigReport report;  ///< warnings, and the values chosen for "auto"
};

/// Sets total_num_steps of a schedule that ends with the run, unless it is given, and replaces
/// warmup_ratio by warmup_num_steps.
void fill_in_schedule(ScheduleOptions& schedule, int64_t total_steps);

/// A warning if this schedule is probably wrong for a run of `total_steps` optimizer steps; else "".
std::string schedule_warning(const ScheduleOptions& schedule, int64_t total_steps);

/// "fp32", "bf16", or "fp32 under bf16 autocast".
std::string precision_of(const EngineConfig& config);

/// The keys of the engine and of the trainer.
config::KeyTable run_keys();

/// Reads a configuration file for a run on `world_size` ranks; `overrides`
/// as given to --set. Throws ConfigError.
RunConfig load_run_config(const std::string& file, int world_size,
                          const std::vector<std::string>& overrides = {});

/// The same from a text. `source`: its name in errors, and the default name of the run.
RunConfig parse_run_config(std::string_view json_text, const std::string& source, int world_size,
                           const std::vector<std::string>& overrides = {});

/// The resolved configuration, with every key filled in (model and data: the keys read so far).
/// Parsing it gives the same values again.
nlohmann::ordered_json resolved(const RunConfig& run);
/// Resolved() as indented text, for files.
std::string dump_resolved(const RunConfig& run);

}  // namespace tessera::train
