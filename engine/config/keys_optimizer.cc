// Parameters of every optimizer and learning-rate schedule, with DeepSpeed's (or torch.optim's) names and
// defaults: deepspeed/ops/adam/fused_adam.py, fused_lamb.py, fused_lion.py, runtime/lr_schedules.py;
// torch.optim.SGD, Adagrad, lr_scheduler.StepLR, CosineAnnealingLR.
#include "engine/config/keys.h"

namespace tessera::config {
namespace {

const std::vector<std::string> kAdams = {"Adam", "AdamW"};
const std::vector<std::string> kOptimizers = {"Adam", "AdamW", "SGD", "Adagrad", "Lion", "LAMB"};

constexpr const char* kOneBit = "it belongs to the 1-bit optimizers, which compress what is sent";
constexpr const char* kTorchLoop = "how torch.optim loops over tensors; every update here is one fused pass";
constexpr const char* kResume = "where a run resumes comes from its checkpoint";

Key param(Key (*type)(std::string), const char* name) {
  return type(std::string("optimizer.params.") + name);
}

Key optimizer_type() {
  Key key = word("optimizer.type", kOptimizers)
                .fallback("\"AdamW\"")
                .or_null()
                .says(
                    "The update rule, in any case, also under DeepSpeed's class names (FusedAdam, "
                    "DeepSpeedCPUAdam, …). "
                    "Adam means AdamW unless `adam_w_mode` is false, as in DeepSpeed");
  key.also_argument("optim")
      .also_word("adamw_torch", "AdamW")
      .also_word("adamw_torch_fused", "AdamW")
      .also_word("adamw_hf", "AdamW");
  key.also_word("FusedAdam", "Adam").also_word("DeepSpeedCPUAdam", "Adam").also_word("CPUAdam", "Adam");
  key.also_word("FusedLamb", "LAMB").also_word("FusedLion", "Lion").also_word("DeepSpeedCPULion", "Lion");
  key.also_word("CPUAdagrad", "Adagrad").also_word("DeepSpeedCPUAdagrad", "Adagrad");
  for (const char* name : {"OneBitAdam", "ZeroOneAdam", "OneBitLamb"})
    key.refuses_word(name, "the 1-bit optimizers compress what is sent");
  for (const char* name : {"MuAdam", "MuAdamW", "MuSGD"})
    key.refuses_word(name, "muP rescales layers by their width");
  key.refuses_word("Muon", "its update needs whole matrices, not flat shards");
  for (const char* name : {"Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop",
                           "Rprop", "SparseAdam"})
    key.refuses_word(name, "this torch.optim update rule is not built in");
  return key;
}

std::vector<Key> adam_keys() {
  return {
      param(boolean, "adam_w_mode")
          .fallback("true")
          .of(kAdams)
          .says("Adam: true decouples the weight decay (AdamW), false adds it to the gradient (L2). AdamW: "
                "always true"),
      param(boolean, "torch_adam")
          .fallback("false")
          .of(kAdams)
          .says("Only changes the default weight_decay to torch.optim.AdamW's 0.01 when the decay is "
                "decoupled, as in DeepSpeed"),
      param(boolean, "bias_correction")
          .fallback("true")
          .of({"Adam", "AdamW", "LAMB"})
          .in_groups()
          .says("Corrects the moments for starting at zero"),
      param(boolean, "amsgrad")
          .of({"Adam", "AdamW", "LAMB"})
          .refused("the AMSGrad variant is not built in", {"false"}),
      param(boolean, "fp32_optimizer_states").of(kAdams).refused("optimizer state is always fp32", {"true"}),
  };
}

std::vector<Key> other_optimizer_keys() {
  return {
      param(number, "momentum").fallback("0.0").range(0, 1).of({"SGD"}).in_groups().says("Momentum factor"),
      param(number, "dampening")
          .fallback("0.0")
          .range(0, 1)
          .of({"SGD"})
          .in_groups()
          .says("Dampening of the momentum"),
      param(boolean, "nesterov")
          .fallback("false")
          .of({"SGD"})
          .in_groups()
          .says("Nesterov momentum; needs momentum above 0 and dampening 0"),
      param(number, "lr_decay")
          .fallback("0.0")
          .range(0)
          .of({"Adagrad"})
          .in_groups()
          .says("lr is divided by 1 + (step - 1) * lr_decay"),
      param(number, "initial_accumulator_value")
          .of({"Adagrad"})
          .refused("the sum of squares starts at 0", {"0"}),
      param(number, "max_coeff")
          .fallback("10.0")
          .above(0)
          .of({"LAMB"})
          .in_groups()
          .says("Upper bound of the trust ratio"),
      param(number, "min_coeff")
          .fallback("0.01")
          .range(0)
          .of({"LAMB"})
          .in_groups()
          .says("Lower bound of the trust ratio"),
      param(boolean, "eps_inside_sqrt")
          .of({"LAMB"})
          .refused("eps is added outside of the square root", {"false"}),
      param(number, "max_grad_norm").refused("the key for clipping is `gradient_clipping`", {"0"}),
      param(boolean, "maximize").refused("the loss is minimised", {"false"}),
      param(integer, "freeze_step").refused(kOneBit, {}),
      param(boolean, "cuda_aware").refused(kOneBit, {}),
      param(text, "comm_backend_name").refused(kOneBit, {}),
      param(boolean, "set_grad_none").no_effect("gradients are always freed, not zeroed"),
      param(boolean, "foreach").or_null().no_effect(kTorchLoop),
      param(boolean, "fused").or_null().no_effect(kTorchLoop),
      param(boolean, "capturable").no_effect(kTorchLoop),
      param(boolean, "differentiable").no_effect(kTorchLoop),
  };
}

Key schedule(Key (*type)(std::string), const char* name) {
  return type(std::string("scheduler.params.") + name);
}

std::vector<Key> warmup_keys() {
  const std::vector<std::string> by_lr = {"WarmupLR", "WarmupDecayLR"};
  const std::vector<std::string> by_length = {"WarmupDecayLR", "WarmupCosineLR"};
  const std::vector<std::string> all = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
  Key kind = word("scheduler.params.warmup_type", {"log", "linear"});
  return {
      schedule(integer, "total_num_steps")
          .fallback("\"auto\"")
          .range(1, 1e15)
          .takes_auto("\"auto\"", "the steps of the run")
          .of(by_length)
          .says("Optimizer steps of the whole schedule"),
      schedule(number_list, "warmup_min_lr")
          .fallback("0.0")
          .range(0)
          .takes_auto("0.0")
          .of(by_lr)
          .says("Learning rate at the start"),
      schedule(number_list, "warmup_max_lr")
          .range(0)
          .or_null()
          .takes_auto("null", "the optimizer's lr")
          .of({"WarmupLR"})
          .says("Learning rate after the warm-up; null: the optimizer's lr"),
      schedule(number_list, "warmup_max_lr")
          .fallback("0.001")
          .range(0)
          .or_null()
          .takes_auto("null", "the optimizer's lr")
          .of({"WarmupDecayLR"})
          .says("Learning rate after the warm-up; null: the optimizer's lr"),
      schedule(number, "warmup_min_ratio")
          .fallback("0.0")
          .range(0, 1)
          .of({"WarmupCosineLR"})
          .says("Start of the warm-up, as a part of the optimizer's lr"),
      schedule(number, "cos_min_ratio")
          .fallback("0.0001")
          .range(0, 1)
          .of({"WarmupCosineLR"})
          .says("End of the cosine, as a part of the optimizer's lr"),
      schedule(integer, "warmup_num_steps")
          .fallback("1000")
          .range(0, 1e15)
          .takes_auto("0")
          .of(all)
          .says("Steps of the warm-up; less than 2 counts as 2, as in DeepSpeed"),
      schedule(number, "warmup_ratio")
          .range(0, 1)
          .or_null()
          .of(all)
          .says("Our own key: the warm-up as a part of the run's steps, rounded up, in place of "
                "`warmup_num_steps`"),
      kind.fallback("\"log\"").takes_auto("\"log\"").of(all).says("Shape of the warm-up"),
  };
}

std::vector<Key> cycle_keys() {
  const std::vector<std::string> cycle = {"OneCycle"};
  return {
      schedule(number_list, "cycle_min_lr")
          .must()
          .range(0)
          .of(cycle)
          .says("Learning rate at both ends of the cycle"),
      schedule(number_list, "cycle_max_lr")
          .must()
          .range(0)
          .of(cycle)
          .says("Learning rate in the middle of the cycle"),
      schedule(number, "decay_lr_rate")
          .fallback("0.0")
          .range(0)
          .of(cycle)
          .says("Decay of the learning rate after the cycle"),
      schedule(integer, "cycle_first_step_size")
          .fallback("2000")
          .range(1, 1e15)
          .of(cycle)
          .says("Steps of the rising half"),
      schedule(integer, "cycle_second_step_size")
          .range(0, 1e15)
          .or_null()
          .of(cycle)
          .says("Steps of the falling half; null: as the first"),
      schedule(integer, "cycle_first_stair_count")
          .fallback("0")
          .range(0, 1e15)
          .of(cycle)
          .says("Stairs of the rising half; 0: no stairs"),
      schedule(integer, "cycle_second_stair_count")
          .range(0, 1e15)
          .or_null()
          .of(cycle)
          .says("Stairs of the falling half; null: as the first"),
      schedule(integer, "decay_step_size")
          .fallback("0")
          .range(0, 1e15)
          .of(cycle)
          .says("Steps between decays after the cycle; 0: no decay"),
      schedule(boolean, "cycle_momentum")
          .fallback("true")
          .of(cycle)
          .says("Cycles the momentum (beta1) against the learning rate"),
      schedule(number_list, "cycle_min_mom").fallback("0.8").range(0, 1).of(cycle).says("Lowest momentum"),
      schedule(number_list, "cycle_max_mom").fallback("0.9").range(0, 1).of(cycle).says("Highest momentum"),
      schedule(number, "decay_mom_rate")
          .fallback("0.0")
          .range(0)
          .of(cycle)
          .says("Decay of the momentum after the cycle"),
      schedule(number_list, "lr_range_test_min_lr")
          .fallback("0.001")
          .range(0)
          .of({"LRRangeTest"})
          .says("Learning rate at the start"),
      schedule(integer, "lr_range_test_step_size")
          .fallback("2000")
          .range(1, 1e15)
          .of({"LRRangeTest"})
          .says("Steps between two increases"),
      schedule(number, "lr_range_test_step_rate")
          .fallback("1.0")
          .range(0)
          .of({"LRRangeTest"})
          .says("Increase for each interval, as a part of the start"),
      schedule(boolean, "lr_range_test_staircase")
          .fallback("false")
          .of({"LRRangeTest"})
          .says("Increases in stairs, not at every step"),
  };
}

std::vector<Key> torch_schedule_keys() {
  return {
      word("scheduler.params.interval", {"epoch", "step"})
          .fallback("\"step\"")
          .of({"StepLR", "CosineAnnealingLR"})
          .says("Our own key: what step_size and T_max count. DeepSpeed steps torch's schedulers at every "
                "optimizer step"),
      schedule(integer, "step_size")
          .must()
          .range(1, 1e15)
          .of({"StepLR"})
          .says("Intervals between two decays"),
      schedule(number, "gamma").fallback("0.1").range(0).of({"StepLR"}).says("Factor of each decay"),
      schedule(integer, "T_max")
          .must()
          .range(1, 1e15)
          .of({"CosineAnnealingLR"})
          .says("Intervals from the highest to the lowest learning rate"),
      schedule(number, "eta_min")
          .fallback("0.0")
          .range(0)
          .of({"CosineAnnealingLR"})
          .says("Lowest learning rate"),
      schedule(integer, "last_batch_iteration").refused(kResume, {"-1"}),
      schedule(integer, "last_epoch").refused(kResume, {"-1"}),
      schedule(boolean, "verbose").no_effect("the learning rate is in the progress line"),
  };
}

void append(std::vector<Key>& keys, std::vector<Key> more) {
  keys.insert(keys.end(), more.begin(), more.end());
}

}  // namespace

std::vector<Key> optimizer_keys() {
  Key params = section("optimizer.params").says("Hyper-parameters; which ones depends on the type");
  params.variant_of = "optimizer.type";
  Key groups =
      section_list("optimizer.param_groups")
          .fallback("[]")
          .says(
              "Our own key: other hyper-parameters for parameters chosen by name. Each element has `match` "
              "and any of "
              "optimizer.params' keys marked \"per group\"; the first element that matches a parameter wins");
  groups.items_like = "optimizer.params";
  const std::vector<std::string> moments = {"Adam", "AdamW", "Lion", "LAMB"};
  const std::vector<std::string> without_adagrad = {"Adam", "AdamW", "SGD", "Lion", "LAMB"};
  std::vector<Key> keys = {
      section("optimizer").says("Which optimizer steps on the shards"),
      optimizer_type(),
      params,
      param(number, "lr")
          .fallback("0.001")
          .range(0)
          .takes_auto("5e-05")
          .of(without_adagrad)
          .in_groups()
          .also_argument("learning_rate")
          .says("Learning rate"),
      param(number, "lr")
          .fallback("0.01")
          .range(0)
          .takes_auto("5e-05")
          .of({"Adagrad"})
          .in_groups()
          .says("Learning rate"),
      param(pair, "betas")
          .fallback("[0.9, 0.999]")
          .range(0, 1)
          .below()
          .takes_auto("[0.9, 0.999]")
          .of(moments)
          .in_groups()
          .says("Decay of the two moments"),
      param(number, "eps")
          .fallback("1e-08")
          .range(0)
          .takes_auto("1e-08")
          .of({"Adam", "AdamW", "LAMB"})
          .in_groups()
          .also_argument("adam_epsilon")
          .says("Added to the denominator"),
      param(number, "eps")
          .fallback("1e-10")
          .range(0)
          .takes_auto("1e-10")
          .of({"Adagrad"})
          .in_groups()
          .says("Added to the denominator"),
      param(number, "weight_decay")
          .fallback("0.0")
          .range(0)
          .takes_auto("0.0")
          .in_groups()
          .also_argument("weight_decay")
          .says("Weight decay; decoupled for AdamW and Lion"),
  };
  append(keys, adam_keys());
  append(keys, other_optimizer_keys());
  keys.push_back(groups);
  keys.push_back(text_list("optimizer.param_groups[].match")
                     .must()
                     .says("Glob patterns (`*`, `?`) for parameter names, e.g. [\"*.bias\", \"*norm*\"]"));
  keys.push_back(
      boolean("optimizer.legacy_fusion").no_effect("the fusion of DeepSpeed's first fp16 optimizer"));
  return keys;
}

std::vector<Key> scheduler_keys() {
  Key params = section("scheduler.params").says("The schedule's parameters; which ones depends on the type");
  params.variant_of = "scheduler.type";
  std::vector<Key> keys = {
      section("scheduler").says("Learning-rate schedule, stepped once for every optimizer step"),
      word("scheduler.type", {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest",
                              "StepLR", "CosineAnnealingLR"})
          .or_null()
          .says("The schedule; null or left out: a constant learning rate"),
      params,
  };
  append(keys, warmup_keys());
  append(keys, cycle_keys());
  append(keys, torch_schedule_keys());
  return keys;
}

}  // namespace tessera::config
