#include "engine/config/keys.h"

#include "engine/config/batch.h"
#include "engine/config/bind.h"
#include "engine/config/keys_bound.h"

namespace tessera::config {
namespace {

using Bindings = std::vector<Binding<EngineConfig>>;

constexpr double kMaxBatch = 1e9;
constexpr double kMaxNumel = 9e15;  // an exact double

const std::vector<std::string> kDTypes = {"fp32", "bf16", "fp16"};

Key dtype(std::string path, std::vector<std::string> words) {
  Key key = word(std::move(path), std::move(words));
  for (const std::string& known : key.words) {
    std::vector<std::string> others;
    if (known == "fp32") others = {"float32", "float"};
    if (known == "bf16") others = {"bfloat16"};
    if (known == "fp16") others = {"float16", "half"};
    for (const std::string& other : others) {
      key.also_word(other, known);
      key.also_word("torch." + other, known);
    }
  }
  return key;
}

#define TESSERA_FIELD(member) [](auto& config) -> auto& { return config.member; }

Bindings training_bindings() {
  return {
      bind<EngineConfig>(number("gradient_clipping")
                             .range(0)
                             .takes_auto("1.0")
                             .also_argument("max_grad_norm")
                             .says("Largest global norm of the gradient; 0: no clipping (DeepSpeed's default "
                                   "until 0.19.2; 1.0 since)"),
                         TESSERA_FIELD(gradient_clipping)),
      bind<EngineConfig>(dtype("communication_data_type", kDTypes)
                             .or_null()
                             .says("Type gradients are sent in; null: the type they are accumulated in"),
                         TESSERA_FIELD(communication_dtype)),
      bind<EngineConfig>(
          boolean("prescale_gradients")
              .says("Divides gradients by the number of ranks before they are summed, not after"),
          TESSERA_FIELD(prescale_gradients)),
      bind<EngineConfig>(number("gradient_predivide_factor")
                             .above(0)
                             .says("Divides gradients by this before they are summed over the ranks, and by "
                                   "the rest after; of no effect with `prescale_gradients`"),
                         TESSERA_FIELD(gradient_predivide_factor)),
      bind<EngineConfig>(integer("steps_per_print")
                             .range(0, 1e15)
                             .or_null()
                             .also_argument("logging_steps")
                             .says("Optimizer steps between two progress lines; 0 or null: none"),
                         TESSERA_FIELD(steps_per_print)),
      bind<EngineConfig>(boolean("wall_clock_breakdown")
                             .says("Times forward, backward and step, and reports them with the progress"),
                         TESSERA_FIELD(wall_clock_breakdown)),
      bind<EngineConfig>(
          boolean("memory_breakdown")
              .says("Reports with the progress what memory was for at the peak, and when it runs out"),
          TESSERA_FIELD(memory_breakdown)),
      bind<EngineConfig>(integer("seed")
                             .range(0, kMaxNumel)
                             .also_argument("seed")
                             .says("Our own key: seed of initial weights, dropout and data order"),
                         TESSERA_FIELD(seed)),
  };
}

Bindings precision_bindings() {
  return {
      bind<EngineConfig>(
          boolean("bf16.enabled").takes_auto("false").says("Computes in bfloat16, with fp32 master weights"),
          TESSERA_FIELD(bf16)),
      bind<EngineConfig>(boolean("fp16.enabled")
                             .takes_auto("false")
                             .says("Computes in float16, with fp32 master weights and loss scaling"),
                         TESSERA_FIELD(fp16.enabled)),
      bind<EngineConfig>(number("fp16.loss_scale").range(0, 1e30).says("Fixed loss scale; 0: dynamic"),
                         TESSERA_FIELD(fp16.loss_scale)),
      bind<EngineConfig>(integer("fp16.initial_scale_power")
                             .range(0, 64)
                             .says("The dynamic scale starts at 2 to this power"),
                         TESSERA_FIELD(fp16.initial_scale_power)),
      bind<EngineConfig>(integer("fp16.loss_scale_window")
                             .range(1, 1e15)
                             .says("Steps without overflow until the scale doubles"),
                         TESSERA_FIELD(fp16.loss_scale_window)),
      bind<EngineConfig>(integer("fp16.hysteresis").range(1, 1e6).says("Overflows until the scale is halved"),
                         TESSERA_FIELD(fp16.hysteresis)),
      bind<EngineConfig>(
          boolean("fp16.consecutive_hysteresis").says("A step without overflow refills the hysteresis"),
          TESSERA_FIELD(fp16.consecutive_hysteresis)),
      bind<EngineConfig>(number("fp16.min_loss_scale").above(0).says("Smallest dynamic scale"),
                         TESSERA_FIELD(fp16.min_loss_scale)),
      bind<EngineConfig>(boolean("torch_autocast.enabled")
                             .says("Keeps the model's types and runs operators under torch.autocast"),
                         TESSERA_FIELD(autocast.enabled)),
      bind<EngineConfig>(dtype("torch_autocast.dtype", {"bf16", "fp16"})
                             .says("The type autocast casts to; fp16 scales the loss as `fp16` says"),
                         TESSERA_FIELD(autocast.dtype)),
      bind<EngineConfig>(dtype("data_types.grad_accum_dtype", kDTypes)
                             .or_null()
                             .also("gradient_accumulation_dtype")
                             .says("Type gradients are accumulated in: fp32, or the type the model computes "
                                   "in; null: fp32 (DeepSpeed: the model's)"),
                         TESSERA_FIELD(grad_accum_dtype)),
  };
}

Bindings zero_bindings() {
  return {
      bind<EngineConfig>(integer("zero_optimization.stage")
                             .range(0, 3)
                             .says("What is sharded over the ranks: 0 nothing, 1 optimizer state, 2 also "
                                   "gradients, 3 also parameters"),
                         TESSERA_FIELD(zero.stage)),
      bind<EngineConfig>(
          integer("zero_optimization.unit_numel")
              .range(1, kMaxNumel)
              .says("Our own key: elements a unit (what is sent at once) aims at, equal at every stage"),
          TESSERA_FIELD(zero.unit_numel)),
      bind<EngineConfig>(integer("zero_optimization.reduce_bucket_size")
                             .range(1, kMaxNumel)
                             .says("Upper bound of unit_numel"),
                         TESSERA_FIELD(zero.reduce_bucket_size)),
      bind<EngineConfig>(integer("zero_optimization.allgather_bucket_size")
                             .range(1, kMaxNumel)
                             .says("Upper bound of unit_numel"),
                         TESSERA_FIELD(zero.allgather_bucket_size)),
      bind<EngineConfig>(boolean("zero_optimization.overlap_comm")
                             .says("Communicates while computing; false waits for each collective where it "
                                   "is issued (DeepSpeed: true only at stage 3)"),
                         TESSERA_FIELD(zero.overlap_comm)),
      bind<EngineConfig>(boolean("zero_optimization.reduce_each_micro_step")
                             .says("Our own key: stages 0 and 1 reduce at every micro-step too, so that all "
                                   "stages give equal bits under accumulation"),
                         TESSERA_FIELD(zero.reduce_each_micro_step)),
      bind<EngineConfig>(integer("zero_optimization.communication_buffers")
                             .range(1, 1024)
                             .says("Our own key: units whose communication buffers exist at once"),
                         TESSERA_FIELD(zero.communication_buffers)),
      bind<EngineConfig>(integer("zero_optimization.stage3_prefetch_bucket_size")
                             .range(0, kMaxNumel)
                             .also("zero_optimization.prefetch_bucket_size")
                             .says("Stage 3: elements gathered ahead of their use"),
                         TESSERA_FIELD(zero.prefetch_bucket_size)),
      bind<EngineConfig>(integer("zero_optimization.stage3_param_persistence_threshold")
                             .range(0, kMaxNumel)
                             .also("zero_optimization.param_persistence_threshold")
                             .says("Stage 3: parameters of fewer elements stay resident"),
                         TESSERA_FIELD(zero.param_persistence_threshold)),
      bind<EngineConfig>(integer("zero_optimization.stage3_max_live_parameters")
                             .range(0, kMaxNumel)
                             .also("zero_optimization.max_live_parameters")
                             .says("Stage 3: elements that may be resident at once"),
                         TESSERA_FIELD(zero.max_live_parameters)),
  };
}

Bindings checkpoint_bindings() {
  return {
      bind<EngineConfig>(boolean("checkpoint.async")
                             .says("Our own key: saving returns after a copy (in memory set aside for it), "
                                   "and a thread writes the files"),
                         TESSERA_FIELD(checkpoint.async)),
      bind<EngineConfig>(integer("checkpoint.keep_last")
                             .range(0, 1e6)
                             .or_null()
                             .also_argument("save_total_limit")
                             .says("Our own key: checkpoints to keep, the oldest are deleted once a newer "
                                   "one is complete; 0 or null: all"),
                         TESSERA_FIELD(checkpoint.keep_last)),
      bind<EngineConfig>(boolean("checkpoint.fsync")
                             .says("Our own key: waits until files are on the disk, so that a checkpoint "
                                   "also survives a loss of power"),
                         TESSERA_FIELD(checkpoint.fsync)),
  };
}

#undef TESSERA_FIELD

/// DeepSpeed drops any "auto" in its sub-sections, which leaves the default.
void accept_auto(Bindings& bindings) {
  for (auto& binding : bindings)
    if (!binding.key.takes_word_auto()) binding.key.takes_auto(binding.key.default_json);
}

std::vector<Key> batch_keys() {
  return {
      integer(kTrainBatchSize)
          .range(1, kMaxBatch)
          .takes_auto("null", "from the other two")
          .says("Samples of one optimizer step, over all ranks"),
      integer(kMicroBatchSize)
          .range(1, kMaxBatch)
          .takes_auto("null", "from the other two; 8 when all are open")
          .also_argument("per_device_train_batch_size")
          .says("Samples of one forward pass on one rank"),
      integer(kAccumulationSteps)
          .range(1, kMaxBatch)
          .takes_auto("null", "from the other two; 1 when open")
          .also_argument("gradient_accumulation_steps")
          .says("Forward and backward passes of one optimizer step"),
  };
}

}  // namespace

Bindings engine_bindings() {
  Bindings bindings = training_bindings();
  for (Bindings more : {precision_bindings(), zero_bindings(), checkpoint_bindings(), monitor_bindings()}) {
    accept_auto(more);
    bindings.insert(bindings.end(), more.begin(), more.end());
  }
  return bindings;
}

KeyTable engine_keys() {
  KeyTable table;
  table.add(batch_keys());
  Bindings bindings = engine_bindings();
  auto add_bound = [&](const std::string& parent) {
    for (const auto& binding : bindings)
      if (binding.key.parent() == parent) table.add(binding.key);
  };
  add_bound("");
  table.add(optimizer_keys());
  table.add(scheduler_keys());
  table.add(section("bf16").also("bfloat16").says("bfloat16 training"));
  add_bound("bf16");
  table.add(section("fp16").says("float16 training; its loss scale is also for `torch_autocast` in fp16"));
  add_bound("fp16");
  table.add(section("torch_autocast").says("Mixed precision operator by operator"));
  add_bound("torch_autocast");
  table.add(section("data_types").says("Types of what is kept"));
  add_bound("data_types");
  table.add(precision_keys_without_effect());
  table.add(
      section("zero_optimization").says("Sharding. The old form `true` (stage 1) or `false` is understood"));
  add_bound("zero_optimization");
  table.add(zero_keys_without_effect());
  table.add(section("checkpoint").says("Saving and loading"));
  add_bound("checkpoint");
  table.add(checkpoint_keys_without_effect());
  for (const Key& monitor : monitor_sections()) {
    table.add(monitor);
    add_bound(monitor.path);
  }
  table.add(other_deepspeed_keys());
  return table;
}

}  // namespace tessera::config
