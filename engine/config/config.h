// EngineConfig: DeepSpeed's ds_config.json keys, with DeepSpeed's names, meaning and defaults, as plain
// values. Reading is in parse.h; the tables of keys.h say which key fills which field, and
// docs/configuration.md lists every key (checked by a test).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "engine/config/options.h"

namespace tessera {

/// optimizer.param_groups[i] (our own key): parameters whose name matches one of `match` (glob: `*`, `?`), or
/// is one of `parameters`, have these values in place of the optimizer's options. The first group that has a
/// parameter wins.
struct ParamGroupConfig {
  std::vector<std::string> match;
  /// The options that the group changes, by their fields' names (betas: beta1 and beta2); booleans are 0
  /// or 1.
  std::map<std::string, double> params;
  std::vector<std::string> parameters = {};  ///< names as they are, whatever characters they have
  bool operator==(const ParamGroupConfig&) const = default;
};

struct OptimizerConfig {
  OptimizerOptions options = AdamWOptions{};
  std::vector<ParamGroupConfig> param_groups = {};
  bool operator==(const OptimizerConfig&) const = default;
};

/// zero_optimization.offload_optimizer or offload_param: where state lies that is not in use. "none" and, on
/// CPU ranks, "cpu": in the memory of the rank's device.
struct OffloadConfig {
  std::string device = "none";           ///< or "cpu", "nvme"
  std::optional<std::string> nvme_path;  ///< "nvme": a folder on the disk
  int buffer_count = 4;                  ///< buffers in memory, of the largest tensor's size
  bool pin_memory = false;               ///< CUDA: the host's memory that state lies in is page-locked
  bool on_disk() const { return device == "nvme"; }
  bool operator==(const OffloadConfig&) const = default;
};

/// zero_optimization.leaf_module, of Python modules: those whose parameters are gathered together.
struct LeafModuleConfig {
  std::vector<std::string> classes = {};
  std::vector<std::string> names = {};
  std::vector<std::string> name_suffixes = {};
  bool operator==(const LeafModuleConfig&) const = default;
};

struct ZeroConfig {
  int stage = 0;
  int64_t unit_numel = 4'000'000;               ///< our own key: elements a unit aims at
  int64_t reduce_bucket_size = 500'000'000;     ///< caps unit_numel
  int64_t allgather_bucket_size = 500'000'000;  ///< caps unit_numel
  bool overlap_comm = true;                     ///< false: every collective is waited for where it is issued
  bool reduce_each_micro_step = false;  ///< our own key: reduce at every micro-step at stages 0 and 1 too
  /// Is a key of our own: it limits how many units have buffers at once (for gradients; gathered at stage 3).
  int communication_buffers = 3;
  int64_t prefetch_bucket_size = 50'000'000;      ///< stage3_prefetch_bucket_size, elements
  int64_t param_persistence_threshold = 100'000;  ///< stage3_param_persistence_threshold, elements
  int64_t max_live_parameters = 1'000'000'000;    ///< stage3_max_live_parameters, elements
  int64_t sub_group_size = 1'000'000'000;         ///< caps unit_numel where optimizer state is on disk
  int hpz_partition_size = 1;  ///< zero_hpz_partition_size: ranks that hold a second copy; up to 1: none
  int mics_shard_size = -1;    ///< ranks that hold one copy of the model state; -1: all
  OffloadConfig offload_optimizer = {};
  OffloadConfig offload_param{.nvme_path = {}, .buffer_count = 5};
  LeafModuleConfig leaf_module = {};
  bool operator==(const ZeroConfig&) const = default;
};

/// How the loss is scaled is also for torch_autocast in fp16.
struct Fp16Config {
  bool enabled = false;
  bool auto_cast = false;  ///< of Python's engine: casts positional arguments
  double loss_scale = 0;   ///< 0: dynamic
  int initial_scale_power = 16;
  int64_t loss_scale_window = 1000;
  int hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  bool operator==(const Fp16Config&) const = default;
};

struct AutocastConfig {
  bool enabled = false;
  DType dtype = DType::kBFloat16;
  bool operator==(const AutocastConfig&) const = default;
};

/// Which saved tensors are made again in backward, or lie on disk until then (activations/checkpointing.h).
struct ActivationConfig {
  std::string policy = "none";                     ///< our own key: "none", "cheap", "block" or "offload"
  std::optional<int64_t> number_checkpoints = {};  ///< for "block": so many blocks are recomputed; unset: all
  std::string blocks;  ///< our own key: for "block": patterns of modules' names, separated by spaces
  std::optional<std::string> nvme_path = {};  ///< our own key: for "offload": a folder on the disk
  int64_t verify = 1;                  ///< our own key: forwards in which what is made again is compared
  std::vector<std::string> keep = {};  ///< our own key: operators whose results are never made again
  bool profile = false;                ///< logs after the first forward, and the second, what is kept
  bool operator==(const ActivationConfig&) const = default;
};

struct CheckpointConfig {
  bool async = false;     ///< our own key: save_checkpoint() returns after a copy; a thread writes it
  int64_t keep_last = 0;  ///< our own key: checkpoints to keep; 0: all
  bool fsync = true;      ///< our own key: survive a loss of power, too
  bool operator==(const CheckpointConfig&) const = default;
};

/// A monitor that writes files: tensorboard, csv_monitor or jsonl_monitor
/// (DeepSpeed's keys; jsonl_monitor is our own).
struct FileMonitorConfig {
  bool enabled = false;
  std::string output_path;  ///< empty: the run's folder
  std::string job_name;     ///< folder inside output_path; empty: the run's name
  bool operator==(const FileMonitorConfig&) const = default;
};

/// The mlflow section (our own).
struct MlflowConfig {
  bool enabled = false;
  std::string tracking_uri;     ///< as MLflow takes it; empty: $MLFLOW_TRACKING_URI, or http://127.0.0.1:5000
  std::string experiment_name;  ///< empty: $MLFLOW_EXPERIMENT_NAME, or "Default"
  std::string run_name;         ///< empty: the run's name
  bool operator==(const MlflowConfig&) const = default;
};

/// Monitors of a run's numbers, in addition to its metrics.jsonl (train/report/monitoring.h).
struct MonitorConfig {
  FileMonitorConfig tensorboard;
  FileMonitorConfig csv;
  FileMonitorConfig jsonl;
  MlflowConfig mlflow;
  bool operator==(const MonitorConfig&) const = default;
};

/// Model FLOPs, counted in one step (engine/profile/flop_counter.h).
struct FlopsProfilerConfig {
  bool enabled = false;
  int64_t profile_step = 1;  ///< the optimizer step that is counted, or the first whole one after it
  double peak_tflops = 0;    ///< our own key: what one device can do, for MFU; 0: unknown
  bool operator==(const FlopsProfilerConfig&) const = default;
};

/// The profiler section (our own): traces of libtorch's profiler (engine/profile/step_profiler.h).
struct ProfilerConfig {
  int64_t steps = 0;       ///< optimizer steps traced; 0: none
  int64_t first_step = 3;  ///< of these; the first two steps of a run learn what later ones use
  std::string path;        ///< a folder, for a file of each rank; empty: profile
  bool operator==(const ProfilerConfig&) const = default;
};

struct EngineConfig {
  int64_t train_batch_size = 0;  ///< = micro_batch * accumulation * world once parsed; 0: not given
  int64_t train_micro_batch_size_per_gpu = 0;  ///< 0: not given
  int64_t gradient_accumulation_steps = 1;
  double gradient_clipping = 0;  ///< largest global norm; 0: none
  OptimizerConfig optimizer;
  ScheduleOptions scheduler;
  ZeroConfig zero;
  Fp16Config fp16;
  bool bf16 = false;
  bool bf16_auto_cast = false;
  AutocastConfig autocast;
  std::optional<DType> grad_accum_dtype;     ///< data_types.grad_accum_dtype; unset: fp32
  std::optional<DType> buffer_dtype;         ///< data_types.buffer_dtype; unset: buffers keep their dtypes
  std::optional<DType> communication_dtype;  ///< communication_data_type; unset: grad_accum_dtype
  double gradient_predivide_factor = 1;
  bool prescale_gradients = false;
  bool managed_gradient_accumulation = true;
  std::string gradient_allreduce_op = "mean";  ///< or "sum"
  int64_t steps_per_print = 10;                ///< 0: never
  bool wall_clock_breakdown = false;
  bool memory_breakdown = false;
  bool dump_state = false;
  ActivationConfig activations;
  FlopsProfilerConfig flops_profiler;
  ProfilerConfig profiler;
  CheckpointConfig checkpoint;
  MonitorConfig monitors;
  int64_t seed = 42;

  /// Float16, of the whole model or of operators under autocast, needs loss scaling.
  bool scales_loss() const { return fp16.enabled || (autocast.enabled && autocast.dtype == DType::kFloat16); }
  DType compute_dtype() const {
    return bf16 ? DType::kBFloat16 : fp16.enabled ? DType::kFloat16 : DType::kFloat32;
  }
  bool operator==(const EngineConfig&) const = default;
};

}  // namespace tessera
