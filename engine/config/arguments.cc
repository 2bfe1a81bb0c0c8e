#include "engine/config/arguments.h"

#include "engine/config/key.h"

namespace tessera::config {
namespace {

struct OtherArgument {
  const char* names;  // separated by spaces
  const char* instead;
};

const OtherArgument kOtherArguments[] = {
    {"adam_beta1 adam_beta2", "here it is optimizer.params.betas, a list of the two"},
    {"auto_find_batch_size",
     "there is none here: running out of memory is an error that says what to change"},
    {"bf16 fp16 mixed_precision",
     R"(here it is "torch_autocast": {"enabled": true, "dtype": "bf16"}, or "fp16", at the top; without it nothing is cast)"},
    {"data_seed", "here it is seed, which orders the data too"},
    {"dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_timeout "
     "early_stopping_patience early_stopping_threshold eval_steps full_determinism load_best_model_at_end "
     "max_steps metric_for_best_model num_train_epochs output_dir overwrite_output_dir "
     "per_device_eval_batch_size run_name save_steps tf32",
     "`tessera train` takes it; a program has its own loop, data and folders"},
    {"ddp_broadcast_buffers ddp_find_unused_parameters save_safetensors", "it is not needed here"},
    {"ddp_bucket_cap_mb", "here it is zero_optimization.unit_numel, in elements"},
    {"deepspeed deepspeed_config deepspeed_config_file deepspeed_plugin",
     "here DeepSpeed's keys stand in this file itself"},
    {"disable_tqdm", "here bars are drawn on terminals alone"},
    {"distributed_type",
     "here zero_optimization.stage says what is sharded, and --nproc on the command line how many ranks "
     "there are"},
    {"do_eval do_predict do_train",
     "here these are commands: tessera train, which evaluates too, tessera eval, tessera predict"},
    {"eval_strategy evaluation_strategy",
     "here it is trainer.eval_every_epochs or trainer.eval_every_steps; 0 is never"},
    {"fsdp fsdp_config fsdp_plugin",
     "here it is zero_optimization.stage: 3 shards parameters too (full_shard), 2 gradients and optimizer "
     "state (shard_grad_op)"},
    {"gpu_ids", "here CUDA_VISIBLE_DEVICES in the environment says it"},
    {"gradient_checkpointing", "`activation_checkpointing.policy` \"block\" does this, for any model"},
    {"greater_is_better", R"(here it is trainer.best_is: "greatest" or "least")"},
    {"group_by_length",
     "there is none here: texts of a batch are padded to the longest of a rank's micro-batch"},
    {"hub_model_id hub_token push_to_hub", "there is no client of the Hub here"},
    {"label_names", "here it is data.target"},
    {"label_smoothing_factor",
     "here it is model.label_smoothing, of models from Python with \"cross_entropy\""},
    {"local_rank", "here the launcher says it: --nproc on the command line, or torchrun"},
    {"log_with", "here these are the sections tensorboard, csv_monitor, jsonl_monitor and mlflow"},
    {"logging_dir", "here it is tensorboard.output_path"},
    {"logging_first_step", "here it is steps_per_print: a line comes after so many steps"},
    {"logging_strategy", "here it is steps_per_print: 0 prints none"},
    {"lr_scheduler_kwargs", "here it is scheduler.params"},
    {"lr_scheduler_type",
     R"(here it is the section scheduler, none for "constant": docs/coming_from.md has those of "linear" and "cosine", Its linear schedule)"},
    {"machine_rank main_process_ip num_machines", "here torchrun on each host says it (docs/launching.md)"},
    {"main_process_port", "here it is --master-port on the command line"},
    {"num_gpus num_processes", "here it is --nproc on the command line"},
    {"no_cuda use_cpu", R"(here it is trainer.device: "cpu", or "auto")"},
    {"optim_args", "here it is optimizer.params"},
    {"project_dir", "here it is trainer.output_dir"},
    {"remove_unused_columns", "here data.inputs names what the model takes"},
    {"report_to",
     R"(here it is "tensorboard": {"enabled": true}, or csv_monitor, jsonl_monitor, mlflow, at the top; without them nothing is reported)"},
    {"resume_from_checkpoint", "here it is --resume, or --resume TAG, on the command line"},
    {"save_only_model", "there is none here: a checkpoint has all that training needs to go on"},
    {"save_strategy", "here it is trainer.save_every_epochs or trainer.save_every_steps; 0 is never"},
    {"split_batches",
     "here train_batch_size is the batch of all ranks, train_micro_batch_size_per_gpu of one"},
    {"torch_compile torch_compile_backend", "there is none here: models run as they are"},
    {"warmup_ratio", "here it is scheduler.params.warmup_ratio, beside scheduler.type"},
    {"warmup_steps",
     "here it is scheduler.params.warmup_num_steps (docs/coming_from.md, Its linear schedule)"},
    {"zero_stage", "here it is zero_optimization.stage"},
};

}  // namespace

std::string_view instead_of_section(std::string_view name) {
  if (name == "comm")
    return "it gives backend and time limits to tessera.comm.init_distributed() before initialize(), in C++ "
           "to "
           "comm::init()";
  if (name == "data" || name == "model" || name == "trainer")
    return "it gives its own model and data to initialize(), and has its own loop";
  return "";
}

std::string_view instead_of_argument(std::string_view name) {
  for (const OtherArgument& argument : kOtherArguments)
    for (const std::string& known : split_names(argument.names))
      if (known == name) return argument.instead;
  return "";
}

}  // namespace tessera::config
