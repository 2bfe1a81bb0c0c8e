// The keys that the engine uses, and the monitors'. tensorboard and csv_monitor are DeepSpeed's.
#include "core/str.h"
#include "engine/config/keys.h"
#include "zero/plan/stage.h"

namespace tessera::config {
namespace {

constexpr double kMaxBatch = 1e9;
constexpr double kMaxNumel = 9e15;  // an exact double

/// Makes the choices of a key for a DType, with their other spellings.
Attribute dtypes(std::vector<std::string> words) {
  std::map<std::string, std::string> aliases;
  for (const std::string& word : words)
    for (const char* other : {"float32", "float", "bfloat16", "float16", "half"})
      if (parse_dtype(other) == parse_dtype(word)) aliases[other] = aliases[str("torch.", other)] = word;
  return choices(std::move(words), std::move(aliases));
}

std::vector<Field> training_fields(EngineConfig& c) {
  return {
      {"gradient_clipping", &c.gradient_clipping,
       "Largest global norm of the gradient; 0: no clipping (DeepSpeed's default until 0.19.2; 1.0 since)",
       at_least(0), auto_is("1.0"), argument("max_grad_norm")},
      {"communication_data_type", &c.communication_dtype,
       "Type in which gradients are sent; null: the type in which they are accumulated",
       dtypes({"fp32", "bf16", "fp16"}), kNullable},
      {"prescale_gradients", &c.prescale_gradients,
       "Divides gradients by the number of ranks before they are summed, not after"},
      {"gradient_predivide_factor", &c.gradient_predivide_factor,
       "Divides gradients by this before they are summed over the ranks, and by the rest of the number of "
       "ranks after; no effect with `prescale_gradients`",
       above(0)},
      {"gradient_allreduce_op", &c.gradient_allreduce_op,
       "Whether gradients are averaged or summed over the ranks", choices({"mean", "sum"})},
      {"managed_gradient_accumulation", &c.managed_gradient_accumulation,
       "Counts micro-steps by `gradient_accumulation_steps`; false, in a loop of your own: each step() uses "
       "the gradients of all backward() calls since the last step()"},
      {"steps_per_print", &c.steps_per_print, "Optimizer steps between two progress lines; 0 or null: none",
       between(0, 1e15), kNullable, argument("logging_steps")},
      {"wall_clock_breakdown", &c.wall_clock_breakdown,
       "Times forward, backward and step, and reports them with the progress"},
      {"memory_breakdown", &c.memory_breakdown,
       "Reports what memory was used for at the peak, with the progress and when memory runs out"},
      {"dump_state", &c.dump_state, "Logs the resolved configuration at the start"},
      {"seed", &c.seed, "Our own key: seed of initial weights, dropout and data order", between(0, kMaxNumel),
       argument("seed")},
  };
}

constexpr const char* kAutoCast =
    "the floating tensors among the positional arguments of Python's `engine(...)`; false: leaves them as "
    "they are, as in DeepSpeed. In C++ and in `tessera train` inputs are always cast";

std::vector<Field> precision_fields(EngineConfig& c) {
  return {
      {"bf16.enabled", &c.bf16, "Computes in bfloat16, with fp32 master weights"},
      {"bf16.auto_cast", &c.bf16_auto_cast, str("Casts to bf16 ", kAutoCast)},
      {"fp16.enabled", &c.fp16.enabled, "Computes in float16, with fp32 master weights and loss scaling"},
      {"fp16.auto_cast", &c.fp16.auto_cast, str("Casts to fp16 ", kAutoCast)},
      {"fp16.loss_scale", &c.fp16.loss_scale, "Fixed loss scale; 0: dynamic", between(0, 1e30)},
      {"fp16.initial_scale_power", &c.fp16.initial_scale_power, "The dynamic scale starts at 2 to this power",
       between(0, 64)},
      {"fp16.loss_scale_window", &c.fp16.loss_scale_window, "Steps without overflow until the scale doubles",
       between(1, 1e15)},
      {"fp16.hysteresis", &c.fp16.hysteresis, "Overflows until the scale is halved", between(1, 1e6)},
      {"fp16.consecutive_hysteresis", &c.fp16.consecutive_hysteresis,
       "A step without overflow refills the hysteresis"},
      {"fp16.min_loss_scale", &c.fp16.min_loss_scale, "Smallest dynamic scale, also at the start", above(0)},
      {"torch_autocast.enabled", &c.autocast.enabled,
       "Keeps the model's types and runs operators under torch.autocast"},
      {"torch_autocast.dtype", &c.autocast.dtype,
       "The type autocast casts to; fp16 scales the loss as `fp16` says", dtypes({"bf16", "fp16"})},
      {"data_types.grad_accum_dtype", &c.grad_accum_dtype,
       "Type in which gradients are accumulated: fp32, or the type in which the model computes; null: fp32 "
       "(DeepSpeed: the model's)",
       dtypes({"fp32", "bf16", "fp16"}), kNullable, alias("gradient_accumulation_dtype")},
      {"data_types.buffer_dtype", &c.buffer_dtype,
       "Type that floating buffers get at the start; null: they keep the model's, as in DeepSpeed",
       dtypes({"fp32", "bf16", "fp16"}), kNullable},
  };
}

std::vector<Field> zero_fields(ZeroConfig& c) {
  const Attribute numel = between(1, kMaxNumel), numel_or_0 = between(0, kMaxNumel);
  return {
      {"stage", &c.stage,
       "What is sharded over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters",
       between(0, zero::kMaxStage)},
      {"unit_numel", &c.unit_numel,
       "Our own key: elements that a unit (what is sent at once) should have, the same at every stage",
       numel},
      {"reduce_bucket_size", &c.reduce_bucket_size, "Upper bound of unit_numel", numel},
      {"allgather_bucket_size", &c.allgather_bucket_size, "Upper bound of unit_numel", numel},
      {"overlap_comm", &c.overlap_comm,
       "Communicates while computing; false: waits for each collective right away (DeepSpeed: true only at "
       "stage 3)"},
      {"reduce_each_micro_step", &c.reduce_each_micro_step,
       "Our own key: stages 0 and 1 reduce at every micro-step too, so that all stages give equal bits under "
       "accumulation"},
      {"communication_buffers", &c.communication_buffers,
       "Our own key: units whose communication buffers exist at once", between(1, 1024)},
      {"stage3_prefetch_bucket_size", &c.prefetch_bucket_size,
       "Stage 3: elements gathered ahead of their use", numel_or_0,
       alias("zero_optimization.prefetch_bucket_size")},
      {"stage3_param_persistence_threshold", &c.param_persistence_threshold,
       "Stage 3: parameters of fewer elements stay unsharded", numel_or_0,
       alias("zero_optimization.param_persistence_threshold")},
      {"stage3_max_live_parameters", &c.max_live_parameters,
       "Stage 3: elements that may be unsharded at once", numel_or_0,
       alias("zero_optimization.max_live_parameters")},
      {"sub_group_size", &c.sub_group_size, "Upper bound of unit_numel where optimizer states are offloaded",
       numel_or_0},
      {"zero_hpz_partition_size", &c.hpz_partition_size,
       "Stage 3, ZeRO++'s hpZ: each group of this many consecutive ranks keeps a second copy of the "
       "parameters, which all gathers but the first of a step read; 0 and 1: no groups",
       between(0, 1e9)},
      {"mics_shard_size", &c.mics_shard_size,
       "Stage 3, MiCS and FSDP's HYBRID_SHARD: each group of this many consecutive ranks has a copy of the "
       "model state, sharded over its ranks; -1: one group of all ranks",
       between(-1, 1e9)},
  };
}

std::vector<Field> offload_fields(OffloadConfig& c, const char* what) {
  return {
      {"device", &c.device,
       str("Where ", what,
           " lie while they are not in use. none: in the memory of the rank's device; cpu: in the host's "
           "memory, which on CPU ranks is the same; nvme: in a private file on disk, which is read ahead"),
       choices({"none", "cpu", "nvme"})},
      {"nvme_path", &c.nvme_path, "Folder for that file, which has no name and is gone when the process ends",
       kNullable},
      {"buffer_count", &c.buffer_count,
       str("Buffers in memory, of the largest tensor's size", c.buffer_count == 4 ? "; twice as many while "
                                                                                    "reading ahead"
                                                                                  : ""),
       between(1, 1e6)},
      {"pin_memory", &c.pin_memory,
       "On CUDA ranks: page-locks the host's memory for offloaded state, so that copies overlap with the "
       "device's work. Set in one section, it applies to both"},
  };
}

std::vector<Field> activation_fields(ActivationConfig& c) {
  Field policy(
      "policy", &c.policy,
      "Our own key: what is recomputed in backward: \"none\"; \"cheap\": elementwise operators, "
      "norms, casts and dropout; \"block\": all of a block but its input; \"offload\": nothing, what "
      "is saved lies on disk until backward",
      choices({"none", "cheap", "block", "offload"}));
  policy.key.refused_choices["budget"] =
      "\"block\" with `number_checkpoints`, the number of blocks that are recomputed, keeps as little";
  return {
      std::move(policy),
      {"number_checkpoints", &c.number_checkpoints,
       "For \"block\": how many blocks are recomputed, the first of the model; the others are treated as by "
       "\"cheap\". null: all",
       at_least(0), kNullable},
      {"blocks", &c.blocks,
       "Our own key: patterns (`*`, `?`) of the names of the modules that are blocks, separated by spaces; "
       "\"\": "
       "repeated submodules are found by themselves"},
      {"nvme_path", &c.nvme_path,
       "Our own key: folder for saved tensors, for \"offload\"; the files have no name and are gone when the "
       "process ends",
       kNullable},
      {"verify", &c.verify,
       "Our own key: in this many first forwards, and in one of 256 later, tensors that backward recomputes "
       "(or reads from disk) are compared with hashes of the forward's; a difference is an error. 0: never",
       between(0, 9e15)},
      {"keep", &c.keep,
       "Our own key: names of operators whose results are always kept, such as \"aten::gelu\"; null: none",
       kNullable},
      {"profile", &c.profile, "Logs what the first two steps keep, recompute and offload"},
  };
}

std::vector<Field> flops_profiler_fields(FlopsProfilerConfig& c) {
  return {
      {"enabled", &c.enabled, "Counts a step's model FLOPs, and reports TFLOP/s with the progress"},
      {"profile_step", &c.profile_step, "The optimizer step that is counted", between(1, 9e15)},
      {"peak_tflops", &c.peak_tflops,
       "Our own key: TFLOP/s that one device can do by its data sheet, for MFU; 0: MFU is not reported",
       at_least(0)},
  };
}

std::vector<Field> profiler_fields(ProfilerConfig& c) {
  return {
      {"steps", &c.steps, "Our own key: optimizer steps that libtorch's profiler traces; 0: none",
       between(0, 1e6)},
      {"first_step", &c.first_step, "Our own key: the first of them", between(1, 9e15)},
      {"path", &c.path,
       "Our own key: folder for a Chrome trace of each rank; \"\": `trainer.output_dir`/profile"},
  };
}

std::vector<Field> checkpoint_fields(CheckpointConfig& c) {
  return {
      {"async", &c.async,
       "Our own key: saving returns after a copy (in memory set aside for it), and a thread writes the "
       "files"},
      {"keep_last", &c.keep_last,
       "Our own key: checkpoints to keep, the oldest are deleted once a newer one is complete; 0 or null: "
       "all",
       between(0, 1e6), kNullable, argument("save_total_limit")},
      {"fsync", &c.fsync,
       "Our own key: waits until files are on the disk, so that a checkpoint also survives a loss of power"},
  };
}

std::vector<Field> file_monitor_fields(const char* section, const char* what, FileMonitorConfig& c) {
  return {
      {"enabled", &c.enabled, str("Writes ", what)},
      {"output_path", &c.output_path, str("Folder for them; \"\": `trainer.output_dir`/", section)},
      {"job_name", &c.job_name,
       "Folder inside it; \"\": the last part of `trainer.output_dir`, or none where `output_path` is \"\" "
       "too"},
  };
}

std::vector<Field> mlflow_fields(MlflowConfig& c) {
  return {
      {"enabled", &c.enabled,
       "Our own key: gives the run's numbers to MLflow's own library, in the background"},
      {"tracking_uri", &c.tracking_uri,
       "Our own key: the server or store, as MLflow's library takes it; \"\": the environment's "
       "MLFLOW_TRACKING_URI, else http://127.0.0.1:5000"},
      {"experiment_name", &c.experiment_name,
       "Our own key: the experiment, made where it is absent; \"\": the environment's "
       "MLFLOW_EXPERIMENT_NAME, else Default"},
      {"run_name", &c.run_name, "Our own key: the run's name; \"\": `trainer.name`"},
  };
}

std::vector<Field> leaf_module_fields(LeafModuleConfig& c) {
  return {
      {"classes", &c.classes, "Classes of modules: `Experts`, or with their Python module", kNullable},
      {"names", &c.names, "Names of modules in the model: `layers.0.mlp`", kNullable},
      {"name_suffixes", &c.name_suffixes, "Ends of their names", kNullable},
  };
}

}  // namespace

std::vector<Field> fields_of(EngineConfig& config) {
  std::vector<Field> fields = training_fields(config);
  MonitorConfig& monitors = config.monitors;
  const std::vector<std::pair<std::string, std::vector<Field>>> sections = {
      {"", precision_fields(config)},
      {"zero_optimization", zero_fields(config.zero)},
      {"zero_optimization.offload_optimizer",
       offload_fields(config.zero.offload_optimizer, "optimizer states, fp32 masters and sharded gradients")},
      {"zero_optimization.offload_param", offload_fields(config.zero.offload_param, "sharded parameters")},
      {"zero_optimization.leaf_module", leaf_module_fields(config.zero.leaf_module)},
      {"activation_checkpointing", activation_fields(config.activations)},
      {"flops_profiler", flops_profiler_fields(config.flops_profiler)},
      {"profiler", profiler_fields(config.profiler)},
      {"checkpoint", checkpoint_fields(config.checkpoint)},
      {"tensorboard", file_monitor_fields("tensorboard", "TensorBoard event files", monitors.tensorboard)},
      {"csv_monitor",
       file_monitor_fields("csv_monitor", "one CSV file for each of a run's numbers", monitors.csv)},
      {"jsonl_monitor", file_monitor_fields("jsonl_monitor", "one JSON object a line", monitors.jsonl)},
      {"mlflow", mlflow_fields(monitors.mlflow)}};
  for (const auto& [section, rows] : sections)
    for (Field& field : in_section(section, rows)) {
      kAutoIsDefault(field.key);  // DeepSpeed drops any "auto" in its sub-sections
      fields.push_back(std::move(field));
    }
  return fields;
}

std::vector<Field> fields_of(GivenBatch& batch) {
  const Attribute range = between(1, kMaxBatch);
  return {
      {kTrainBatchSize, &batch.train, "Samples of one optimizer step, over all ranks", range,
       auto_is("null", "from the other two")},
      {kMicroBatchSize, &batch.micro, "Samples of one forward pass on one rank", range,
       auto_is("null", "from the other two; 8 when all are open"), argument("per_device_train_batch_size")},
      {kAccumulationSteps, &batch.accumulation, "Forward and backward passes of one optimizer step", range,
       auto_is("null", "from the other two; 1 when open"), argument("gradient_accumulation_steps")},
  };
}

KeyTable engine_keys() {
  EngineConfig config;
  GivenBatch batch;
  KeyTable table;
  const std::vector<Key> keys = keys_of(fields_of(config));
  table.add(keys_of(fields_of(batch)));
  for (const Key& key : keys)
    if (key.parent().empty()) table.add(key);
  table.add(optimizer_keys());
  table.add(schedule_keys());
  table.add(make_key(Type::kSection, "bf16", "bfloat16 training", alias("bfloat16")));
  for (const auto& [section, doc] :
       {std::pair{"fp16", "float16 training; its loss scale is also used by `torch_autocast` in fp16"},
        {"torch_autocast", "Mixed precision operator by operator"},
        {"data_types", "Types of gradients and buffers"},
        {"zero_optimization", "Sharding. The old form `true` (stage 1) or `false` is understood"},
        {"activation_checkpointing", "What is kept from forward to backward, and what is recomputed"},
        {"flops_profiler", "Model FLOPs, TFLOP/s and MFU"},
        {"profiler", "Our own: a trace of what the host and the device did"},
        {"checkpoint", "Saving and loading"},
        {"tensorboard", "TensorBoard event files"},
        {"csv_monitor", "One CSV file a number"},
        {"jsonl_monitor", "Our own: one file of JSON lines"},
        {"mlflow", "Our own: MLflow"}})
    table.add(make_key(Type::kSection, section, doc));
  table.add(make_key(Type::kSection, "zero_optimization.offload_optimizer",
                     "Optimizer states and gradients that don't fit in memory", kNullable));
  table.add(make_key(Type::kSection, "zero_optimization.offload_param",
                     "Parameters that don't fit in memory (stage 3)", kNullable));
  table.add(make_key(Type::kSection, "zero_optimization.leaf_module",
                     "Python, stage 3: modules whose parameters are gathered all together, so that ranks may "
                     "use different ones of them. C++ has no leaf modules",
                     kNullable));
  const Attribute old_form = [](Key& key) { key.use = Use::kOldForm; };
  for (const auto& [name, section] : kOldOffload)
    table.add(make_key(Type::kBool, str("zero_optimization.", name),
                       str("The old form: true is read as `", section, "` with `device` \"cpu\""), old_form));
  table.add(make_key(Type::kBool, "zero_optimization.cpu_offload_use_pin_memory",
                     "The old form of `pin_memory` in both sections", old_form));
  for (const Key& key : keys)
    if (!key.parent().empty()) table.add(key);
  table.add(deepspeed_keys());
  return table;
}

}  // namespace tessera::config
