// DeepSpeed's keys that mean nothing here, so that its files work as they are: those without effect are
// accepted with one warning, those that ask for something Tessera does not do are refused by name.
// The list follows DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py, runtime/constants.py).
#include "engine/config/keys.h"

namespace tessera::config {
namespace {

constexpr const char* kOffload = "sharded state stays in the memory of its device";
constexpr const char* kQuantized = "ZeRO++ quantization of what is sent";

Key zero(Key (*type)(std::string), const char* name) {
  return type(std::string("zero_optimization.") + name);
}

std::vector<Key> zero_refused_keys() {
  return {
      zero(open_section, "offload_optimizer")
          .switched_by("device", {"\"none\""})
          .refused(kOffload, {"\"none\""}),
      zero(open_section, "offload_param").switched_by("device", {"\"none\""}).refused(kOffload, {"\"none\""}),
      zero(boolean, "cpu_offload").refused(kOffload, {"false"}),
      zero(boolean, "cpu_offload_param").refused(kOffload, {"false"}),
      zero(boolean, "cpu_offload_use_pin_memory").no_effect("nothing is offloaded"),
      zero(boolean, "zero_quantized_weights").refused(kQuantized, {"false"}),
      zero(boolean, "zero_quantized_gradients").refused(kQuantized, {"false"}),
      zero(boolean, "zero_quantized_nontrainable_weights").refused(kQuantized, {"false"}),
      zero(open_section, "zeropp_loco_param").refused(kQuantized, {}),
      zero(integer, "zero_hpz_partition_size")
          .refused("ZeRO++ secondary partitions inside a node", {"0", "1"}),
      zero(integer, "mics_shard_size").refused("MiCS shards inside sub-groups of the ranks", {"-1"}),
      zero(boolean, "mics_hierarchical_params_gather")
          .refused("MiCS shards inside sub-groups of the ranks", {"false"}),
      zero(open_section, "zenflow").refused("ZenFlow updates parts of the gradients on the CPU", {}),
  };
}

}  // namespace

std::vector<Key> checkpoint_keys_without_effect() {
  return {
      word("checkpoint.tag_validation", {"Ignore", "Warn", "Fail"})
          .no_effect("ranks that save under different tags always fail"),
      boolean("checkpoint.load_universal").no_effect("a checkpoint loads at any world size"),
      open_section("checkpoint.parallel_write").no_effect("every rank writes its own file"),
      open_section("checkpoint.writer").no_effect("`checkpoint.async` says how files are written"),
      boolean("checkpoint.use_node_local_storage")
          .refused("all ranks write into one folder they share", {"false"}),
  };
}

std::vector<Key> zero_keys_without_effect() {
  std::vector<Key> keys = {
      zero(boolean, "contiguous_gradients").no_effect("gradients always go into contiguous units"),
      zero(boolean, "reduce_scatter").no_effect("gradients are always reduce-scattered"),
      zero(boolean, "allgather_partitions").no_effect("updated parameters are always all-gathered"),
      zero(boolean, "use_multi_rank_bucket_allreduce").no_effect("gradients are always reduce-scattered"),
      zero(boolean, "round_robin_gradients").no_effect("units are cut into equal shards"),
      zero(boolean, "ignore_unused_parameters").no_effect("unused parameters are always allowed"),
      zero(boolean, "load_from_fp32_weights").no_effect("a checkpoint always brings the fp32 weights"),
      zero(boolean, "elastic_checkpoint").no_effect("a checkpoint loads at any world size"),
      zero(boolean, "legacy_stage1").no_effect("there is one implementation of every stage"),
      zero(boolean, "grad_hooks").no_effect("gradients always come through hooks"),
      zero(integer, "sub_group_size").range(0).no_effect("the step works on one unit at a time"),
      zero(integer, "stage3_max_reuse_distance")
          .range(0)
          .also("zero_optimization.max_reuse_distance")
          .no_effect("the recorded order of use decides what is released"),
      zero(integer, "stage3_model_persistence_threshold")
          .range(0)
          .also("zero_optimization.model_persistence_threshold")
          .no_effect("`stage3_max_live_parameters` bounds what is resident"),
      zero(boolean, "stage3_gather_16bit_weights_on_model_save")
          .also("zero_optimization.gather_16bit_weights_on_model_save")
          .also("zero_optimization.stage3_gather_fp16_weights_on_model_save")
          .no_effect("whole models are written from the shards"),
      zero(integer, "stage3_module_granularity_threshold")
          .also("zero_optimization.module_granularity_threshold")
          .no_effect("units, not modules, are gathered"),
      zero(boolean, "stage3_use_all_reduce_for_fetch_params")
          .also("zero_optimization.use_all_reduce_for_fetch_params")
          .no_effect("units are contiguous, so an all-gather copies nothing"),
      zero(boolean, "stage3_allgather_sequential")
          .also("zero_optimization.allgather_sequential")
          .no_effect("units are contiguous, so an all-gather copies nothing"),
      zero(boolean, "memory_efficient_linear").no_effect("layers are left as they are"),
      zero(boolean, "override_module_apply").no_effect("modules are left as they are"),
      zero(boolean, "pipeline_loading_checkpoint").no_effect("each rank reads only its own ranges"),
      zero(boolean, "log_trace_cache_warnings").no_effect("a change of the recorded order is always logged"),
      zero(boolean, "enable_sanity_checks").no_effect("the checks are always on"),
      zero(boolean, "save_muon_momentum_buffer_in_memory").no_effect("there is no Muon optimizer"),
      zero(open_section, "leaf_module").no_effect("units, not modules, are gathered"),
  };
  std::vector<Key> refused = zero_refused_keys();
  keys.insert(keys.end(), refused.begin(), refused.end());
  return keys;
}

std::vector<Key> precision_keys_without_effect() {
  return {
      boolean("fp16.auto_cast").no_effect("how inputs are cast does not depend on it"),
      boolean("fp16.fp16_master_weights_and_grads").refused("master weights are always fp32", {"false"}),
      boolean("bf16.immediate_grad_update").no_effect("gradients are always accumulated as they come"),
      boolean("bf16.check_grad_overflow")
          .also("bf16.check_overflow")
          .no_effect("non-finite gradients always skip the step"),
      boolean("bf16.bf16_master_weights_and_grads").refused("master weights are always fp32", {"false"}),
      boolean("bf16.bf16_optimizer_states").refused("optimizer state is always fp32", {"false"}),
      text_list("torch_autocast.lower_precision_safe_modules")
          .or_null()
          .no_effect("autocast decides operator by operator"),
      word("data_types.param_dtype", {"fp32", "fp16", "bf16"})
          .refused("the parameters' type comes from `fp16` and `bf16`", {}),
      word("data_types.buffer_dtype", {"fp32", "fp16", "bf16"})
          .refused("floating buffers take the parameters' compute type, others keep theirs", {}),
  };
}

std::vector<Key> other_deepspeed_keys() {
  auto enabled = [](const char* path, const char* why) {
    return open_section(path).switched_by("enabled", {"false"}).refused(why, {"false"});
  };
  auto watched = [](const char* path, const char* why) {
    return open_section(path).switched_by("enabled", {"false"}).no_effect(why);
  };
  return {
      boolean("managed_gradient_accumulation")
          .refused("step() always counts the micro-steps itself", {"true"}),
      word("gradient_allreduce_op", {"mean", "sum"})
          .refused("gradients are averaged over the ranks", {"\"mean\""}),
      boolean("sparse_gradients").refused("gradients are sent dense (sparse ones are made dense)", {"false"}),
      integer("sequence_parallel_size").refused("the sequence is not split over ranks", {"1"}),
      enabled("amp", "Apex AMP; use `bf16`, `fp16` or `torch_autocast`"),
      enabled("autotuning", "the configuration is taken as it is"),
      enabled("elasticity", "the batch size is fixed for a run; a checkpoint loads at any world size"),
      enabled("curriculum_learning", "the order of the data is the task's"),
      enabled("data_efficiency", "the order of the data is the task's"),
      enabled("progressive_layer_drop", "the model is run as it is"),
      enabled("eigenvalue", "no curvature is measured"),
      enabled("quantize_training", "weights are not quantized"),
      enabled("hybrid_engine", "there is no inference engine"),
      enabled("expert_parallel", "there is no expert parallelism"),
      enabled("nebula", "checkpoints go to the file system"),
      enabled("wandb", "there is no Weights & Biases client"),
      enabled("comet", "there is no Comet client"),
      open_section("compression_training").refused("the model is trained as it is", {}),
      open_section("sparse_attention").refused("the model's attention is used as it is", {}),
      open_section("pipeline").refused("there is no pipeline parallelism", {}),
      open_section("tensor_parallel")
          .switched_by("autotp_size", {"0", "1"})
          .refused("there is no tensor parallelism", {"0", "1"}),
      open_section("weight_quantization").refused("weights are not quantized", {}),
      open_section("datastates_ckpt").refused("checkpoints are Tessera's own", {}),
      open_section("compile")
          .switched_by("deepcompile", {"false"})
          .refused("models run as they are, uncompiled", {"false"}),
      watched("flops_profiler", "there is no FLOPS profiler"),
      watched("comms_logger", "collectives are not logged one by one"),
      open_section("activation_checkpointing").no_effect("recomputation is the model's own matter"),
      open_section("aio").no_effect("nothing is offloaded to disk"),
      open_section("timers").no_effect("`wall_clock_breakdown` decides what is timed"),
      word("seq_parallel_communication_data_type", {"fp32", "fp16", "bf16"})
          .or_null()
          .no_effect("there is no sequence parallelism"),
      boolean("zero_allow_untested_optimizer").no_effect("every optimizer here is tested with every stage"),
      boolean("zero_force_ds_cpu_optimizer").no_effect("the optimizer runs where its shard is"),
      boolean("use_data_before_expert_parallelism").no_effect("there is no expert parallelism"),
      boolean("disable_allgather").no_effect("the stage decides what is gathered"),
      boolean("dump_state").no_effect("the resolved configuration is always logged and saved"),
      boolean("graph_harvesting").no_effect("there is no graph capture"),
      boolean("dataloader_drop_last")
          .no_effect("an engine loads no data; `tessera train` takes it for trainer.dataloader_drop_last"),
      integer("vocabulary_size").or_null().no_effect("only a hint in DeepSpeed, too"),
      text("log_level").or_null().no_effect("rank 0 talks, the others log to files"),
  };
}

}  // namespace tessera::config
