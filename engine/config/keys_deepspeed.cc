// DeepSpeed's keys that Tessera does not implement. Those without effect are accepted with one warning; those
// that ask for something Tessera does not do are refused by name. The list follows DeepSpeed 0.19
// (runtime/config.py, runtime/zero/config.py, runtime/constants.py).
#include "engine/config/document/document.h"
#include "engine/config/keys.h"

namespace tessera::config {
namespace {

/// Adds keys to a table: booleans, unless an attribute has another type. Names with the same reason are given
/// together, separated by spaces. As in DeepSpeed, a name that begins with stage3_ is also accepted without
/// it.
struct Rows {
  const char* section;
  std::vector<Key>& keys;

  template <class... Attributes>
  void no_effect(const char* names, const char* why, const Attributes&... attributes) {
    for (const std::string& name : split_names(names)) {
      keys.push_back(make_key(Type::kBool, child_path(section, name), why, attributes...));
      keys.back().use = Use::kNoEffect;
      constexpr std::string_view kStage3 = "stage3_";
      if (name.starts_with(kStage3))
        keys.back().aliases.insert(keys.back().aliases.begin(),
                                   child_path(section, name.substr(kStage3.size())));
    }
  }
  /// `harmless`: values (JSON) that ask for nothing.
  template <class... Attributes>
  void refused(const char* names, const char* why, const char* harmless, const Attributes&... attributes) {
    const size_t first = keys.size();
    no_effect(names, why, attributes...);
    for (size_t i = first; i < keys.size(); ++i) {
      keys[i].use = Use::kRefused;
      if (keys[i].harmless.empty()) keys[i].harmless = split_names(harmless);
    }
  }
};

const Attribute kInteger = of_type(Type::kInteger), kText = of_type(Type::kText);
const Attribute kSection = of_type(Type::kOpenSection);
Attribute for_types(const char* types) {
  return [types = split_names(types)](Key& key) { key.for_types = types; };
}
/// A section that is off when `name` has one of the values `off`.
Attribute switched_by(const char* name, const char* off) {
  return [=](Key& key) {
    key.type = Type::kOpenSection;
    key.switch_key = name;
    key.harmless = split_names(off);
  };
}

void add_optimizer_rows(Rows rows) {
  const char* one_bit = "it belongs to the 1-bit optimizers, which compress what is sent";
  const char* torch_loop = "how torch.optim loops over tensors; every update here is one fused pass";
  rows.refused("amsgrad", "the AMSGrad variant is not built in", "false", for_types("LAMB"));
  rows.refused("fp32_optimizer_states", "optimizer state is always fp32", "true",
               for_types("Adam AdamW Muon"));
  rows.refused("adam_w_mode", "AdamW updates the parameters that are not matrices", "true",
               for_types("Muon"));
  rows.no_effect("torch_adam", "AdamW updates the parameters that are not matrices", for_types("Muon"));
  rows.refused("initial_accumulator_value", "the sum of squares starts at 0", "0", of_type(Type::kNumber),
               for_types("Adagrad"));
  rows.refused("eps_inside_sqrt", "eps is added outside of the square root", "false", for_types("LAMB"));
  rows.refused("max_grad_norm", "the key for clipping is `gradient_clipping`", "0", of_type(Type::kNumber));
  rows.refused("maximize", "the loss is minimised", "false", for_types("Lion LAMB Muon"));
  rows.refused("per_head_muon", "a matrix is made orthogonal as a whole", "false", for_types("Muon"));
  rows.refused("freeze_step", one_bit, "", kInteger);
  rows.refused("cuda_aware", one_bit, "");
  rows.refused("comm_backend_name", one_bit, "", kText);
  rows.no_effect("set_grad_none", "gradients are always freed, not zeroed");
  rows.no_effect("foreach fused", torch_loop, kNullable);
  rows.no_effect("capturable differentiable", torch_loop);
}

void add_schedule_rows(Rows rows) {
  rows.refused("last_batch_iteration last_epoch", "where a run resumes comes from its checkpoint", "-1",
               kInteger);
  rows.no_effect("verbose", "the learning rate is in the progress line");
}

void add_activation_rows(Rows rows) {
  rows.no_effect("partition_activations", "there is no tensor parallelism whose ranks could share them");
  rows.no_effect(
      "cpu_checkpointing",
      "on CPU ranks what is kept is in the host's memory already; `policy` \"offload\" has it on disk");
  rows.no_effect("contiguous_memory_optimization", "what is kept is not copied");
  rows.no_effect("synchronize_checkpoint_boundary", "recomputation needs no synchronization");
  rows.refused("budget_bytes", "`number_checkpoints` says how many blocks \"block\" recomputes", "0",
               kInteger);
}

void add_checkpoint_rows(Rows rows) {
  rows.no_effect("tag_validation", "ranks that save under different tags always fail",
                 choices({"Ignore", "Warn", "Fail"}));
  rows.no_effect("load_universal", "a checkpoint loads at any world size");
  rows.no_effect("parallel_write", "every rank writes its own file", kSection);
  rows.no_effect("writer", "`checkpoint.async` says how files are written", kSection);
  rows.refused("use_node_local_storage", "all ranks write into one folder they share", "false");
}

void add_zero_rows(Rows rows) {
  const char* reduced = "gradients are always reduce-scattered";
  const char* contiguous = "units are contiguous, so an all-gather copies nothing";
  const char* units = "units, not modules, are gathered";
  rows.no_effect("contiguous_gradients", "gradients always go into contiguous units");
  rows.no_effect("reduce_scatter use_multi_rank_bucket_allreduce", reduced);
  rows.no_effect("allgather_partitions", "updated parameters are always all-gathered");
  rows.no_effect("round_robin_gradients", "units are cut into equal shards");
  rows.no_effect("ignore_unused_parameters", "unused parameters are always allowed");
  rows.no_effect("load_from_fp32_weights", "a checkpoint always brings the fp32 weights");
  rows.no_effect("elastic_checkpoint", "a checkpoint loads at any world size");
  rows.no_effect("legacy_stage1", "there is one implementation of every stage");
  rows.no_effect("grad_hooks", "gradients always come through hooks");
  rows.no_effect("stage3_max_reuse_distance", "the recorded order of use decides what is released", kInteger,
                 at_least(0));
  rows.no_effect("stage3_model_persistence_threshold",
                 "`stage3_max_live_parameters` bounds what is unsharded", kInteger, at_least(0));
  rows.no_effect("stage3_gather_16bit_weights_on_model_save", "whole models are written from the shards",
                 alias("zero_optimization.stage3_gather_fp16_weights_on_model_save"));
  rows.no_effect("stage3_module_granularity_threshold", units, kInteger);
  rows.no_effect("stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential", contiguous);
  rows.no_effect("memory_efficient_linear", "layers are left as they are");
  rows.no_effect("override_module_apply", "modules are left as they are");
  rows.no_effect("pipeline_loading_checkpoint", "each rank reads only its own ranges");
  rows.no_effect("log_trace_cache_warnings", "a change of the recorded order is always logged");
  rows.no_effect("enable_sanity_checks", "the checks are always on");
  rows.no_effect("save_muon_momentum_buffer_in_memory",
                 "the momentum is in the shards, where every state is");
}

void add_refused_zero_rows(Rows rows) {
  const char* quantized = "ZeRO++ quantization of what is sent";
  rows.no_effect("offload_optimizer.fast_init", "a new file reads as zeros");
  rows.no_effect(
      "offload_optimizer.pipeline offload_optimizer.pipeline_read offload_optimizer.pipeline_write",
      "state is always read ahead and written behind");
  rows.no_effect("offload_optimizer.ratio", "all of it is offloaded", of_type(Type::kNumber));
  rows.no_effect("offload_param.buffer_size", "buffers have the size of the largest tensor", kInteger,
                 at_least(0));
  rows.no_effect("offload_param.max_in_cpu", "`buffer_count` bounds what is in memory", kInteger,
                 at_least(0));
  rows.refused("zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
               quantized, "false");
  rows.refused("zeropp_loco_param", quantized, "", kSection);
  rows.no_effect("mics_hierarchical_params_gather",
                 "gathers are hierarchical wherever ranks of several hosts share memory");
  rows.refused("zenflow", "ZenFlow updates parts of the gradients on the CPU", "", kSection);
}

void add_precision_rows(Rows rows) {
  const Attribute dtype = choices({"fp32", "fp16", "bf16"});
  const char* master = "master weights are always fp32";
  rows.no_effect("fp16.opt_level", "a level of Apex AMP, which fp16 does not use", kText);
  rows.no_effect("fp16.fp16_scale_tolerance", "fp16.hysteresis says how many overflows are tolerated",
                 of_type(Type::kNumber));
  rows.refused("fp16.fp16_master_weights_and_grads", master, "false");
  rows.no_effect("bf16.immediate_grad_update", "gradients are always accumulated as they come");
  rows.no_effect("bf16.check_grad_overflow", "non-finite gradients always skip the step",
                 alias("bf16.check_overflow"));
  rows.refused("bf16.bf16_master_weights_and_grads", master, "false");
  rows.refused("bf16.bf16_optimizer_states", "optimizer state is always fp32", "false");
  rows.no_effect("torch_autocast.lower_precision_safe_modules", "autocast decides operator by operator",
                 of_type(Type::kTextList), kNullable);
  rows.no_effect("data_types.keep_in_fp32_modules",
                 "every parameter has the compute type, with an fp32 master", of_type(Type::kTextList),
                 kNullable);
  rows.refused("data_types.param_dtype", "the parameters' type comes from `fp16` and `bf16`", "", dtype);
}

void add_refused_rows(Rows rows) {
  const Attribute enabled = switched_by("enabled", "false");
  rows.refused("sequence_parallel_size", "the sequence is not split over ranks", "1", kInteger);
  rows.refused("amp", "Apex AMP; use `bf16`, `fp16` or `torch_autocast`", "", enabled);
  rows.refused("autotuning", "the configuration is taken as it is", "", enabled);
  rows.refused("elasticity", "the batch size is fixed for a run; a checkpoint loads at any world size", "",
               enabled);
  rows.refused("curriculum_learning data_efficiency", "the order of the data is the task's", "", enabled);
  rows.refused("progressive_layer_drop", "the model is run as it is", "", enabled);
  rows.refused("eigenvalue", "no curvature is measured", "", enabled);
  rows.refused("quantize_training", "weights are not quantized", "", enabled);
  rows.refused("hybrid_engine", "there is no inference engine", "", enabled);
  rows.refused("expert_parallel", "there is no expert parallelism", "", enabled);
  rows.refused("nebula", "checkpoints go to the file system", "", enabled);
  rows.refused("compression_training", "the model is trained as it is", "", kSection);
  rows.refused("sparse_attention", "the model's attention is used as it is", "", kSection);
  rows.refused("pipeline", "there is no pipeline parallelism", "", kSection);
  rows.refused("tensor_parallel", "there is no tensor parallelism", "", switched_by("autotp_size", "0 1"));
  rows.refused("weight_quantization", "weights are not quantized", "", kSection);
  rows.refused("datastates_ckpt", "checkpoints are Tessera's own", "", kSection);
  rows.refused("compile", "models run as they are, uncompiled", "", switched_by("deepcompile", "false"));
}

void add_other_rows(Rows rows) {
  const Attribute enabled = switched_by("enabled", "false");
  rows.no_effect("sparse_gradients", "gradients are sent dense (sparse ones are made dense)",
                 [](Key& key) { key.harmless = {"false"}; });
  rows.no_effect("optimizer.legacy_fusion", "the fusion of DeepSpeed's first fp16 optimizer");
  rows.no_effect("flops_profiler.recompute_fwd_factor", "what is recomputed is not counted",
                 of_type(Type::kNumber));
  rows.no_effect("flops_profiler.module_depth flops_profiler.top_modules",
                 "operators are counted, not modules", kInteger);
  rows.no_effect("flops_profiler.detailed", "operators are counted, not modules");
  rows.no_effect("flops_profiler.output_file", "the log has the result", kText, kNullable);
  rows.no_effect("comms_logger", "collectives are not logged one by one", enabled);
  rows.no_effect("aio", "transfers are pieces of 4 MiB, 32 under way at once", kSection);
  rows.no_effect("timers", "`wall_clock_breakdown` decides what is timed", kSection);
  rows.no_effect("seq_parallel_communication_data_type", "there is no sequence parallelism",
                 choices({"fp32", "fp16", "bf16"}), kNullable);
  rows.no_effect("zero_allow_untested_optimizer", "every optimizer here is tested with every stage");
  rows.no_effect("zero_force_ds_cpu_optimizer", "the optimizer runs where its shard is");
  rows.no_effect("use_data_before_expert_parallelism", "there is no expert parallelism");
  rows.no_effect("disable_allgather", "the stage decides what is gathered");
  rows.no_effect("graph_harvesting", "there is no graph capture");
  rows.no_effect("dataloader_drop_last",
                 "the loader of Python's initialize(training_data=) always leaves out the samples after an "
                 "epoch's last whole step; `tessera train` takes it for trainer.dataloader_drop_last");
  rows.no_effect("comms_config", "collectives are not logged one by one", kSection);
  rows.no_effect("wandb", "there is no Weights & Biases client", enabled, kNullable);
  rows.no_effect("comet", "there is no Comet client", enabled, kNullable);
  rows.no_effect("monitor_config", "each monitor has a section of its own", kSection);
  rows.no_effect("cuda_visible_devices", "the environment variable of this name decides",
                 of_type(Type::kNumbersOrTexts), kNullable);
  rows.no_effect("disable_python_gc", "Python's garbage collector is the script's own matter");
  rows.no_effect("compute_grad_norm",
                 "the norm is always computed, in the pass that looks for non-finite ones");
  rows.no_effect("parameter_alignment", "units are aligned to cache lines", kInteger);
  rows.no_effect("vocabulary_size", "only a hint in DeepSpeed, too", kInteger, kNullable);
  rows.no_effect("log_level", "rank 0 talks, the others log to files", kText, kNullable);
}

}  // namespace

std::vector<Key> deepspeed_keys() {
  std::vector<Key> keys;
  add_optimizer_rows({"optimizer.params", keys});
  add_schedule_rows({"scheduler.params", keys});
  add_activation_rows({"activation_checkpointing", keys});
  add_checkpoint_rows({"checkpoint", keys});
  add_zero_rows({"zero_optimization", keys});
  add_refused_zero_rows({"zero_optimization", keys});
  add_precision_rows({"", keys});
  add_refused_rows({"", keys});
  add_other_rows({"", keys});
  return keys;
}

}  // namespace tessera::config
