#include "engine/config/arguments.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/config/check.h"

namespace tessera::config {
namespace {

using nlohmann::json;

/// One argument of a document, which sets keys.
class Argument {
 public:
  Argument(Document& document, std::string path, json value)
      : document_(document), path_(std::move(path)), value_(std::move(value)) {}

  const json& value() const { return value_; }
  bool flag() const {
    if (!value_.is_boolean()) refuse("true or false");
    return value_.get<bool>();
  }
  std::string choice(const std::vector<std::string>& choices) const {
    const auto* text = value_.get_ptr<const std::string*>();
    if (text == nullptr || std::find(choices.begin(), choices.end(), *text) == choices.end())
      refuse(str("one of \"", join(choices, "\", \""), "\""));
    return *text;
  }
  [[noreturn]] void refuse(const std::string& expected) const {
    document_.origins.fail(path_, str("found ", describe_value(value_), "; expected ", expected));
  }

  bool has(const std::string& key) const {
    const json* there = value_at(*document_.json, key);
    return there && !there->is_null();
  }
  const json& at(const std::string& key) const { return *value_at(*document_.json, key); }
  /// Throws KeyError when the file has another value for this key.
  void set(const std::string& key, const json& value) {
    const json* there = value_at(*document_.json, key);
    const bool both_in_file = !document_.origins.is_override(path_) && !document_.origins.is_override(key);
    if (there && !there->is_null() && *there != "auto" && *there != value && both_in_file)
      document_.origins.fail(path_, str("found ", describe_value(value_), " beside ", key, " ", *there,
                                        "; expected one of the two"));
    put(key, value);
  }
  /// Whatever value the file has for this key. The command line wins over the file.
  void put(const std::string& key, const json& value) {
    if (has(key) && document_.origins.is_override(key) && !document_.origins.is_override(path_)) return;
    make_value(document_, key, path_) = value;
    document_.origins.copy(path_, key);
  }

 private:
  Document& document_;
  std::string path_;
  json value_;
};

/// `dtype`: a type, or "no".
void autocast(Argument& argument, const std::string& dtype) {
  if (dtype == "no") return;
  argument.set("torch_autocast.enabled", true);
  argument.set("torch_autocast.dtype", dtype);
}

void use_cpu(Argument& argument) {
  if (argument.flag()) argument.set("trainer.device", "cpu");
}

/// "no", "steps" or "epoch", for trainer.WHAT_every_epochs and trainer.WHAT_every_steps.
void by_strategy(Argument& argument, const std::string& what) {
  const std::string choice = argument.choice({"no", "steps", "epoch"});
  const std::string epochs = str("trainer.", what, "_every_epochs"),
                    steps = str("trainer.", what, "_every_steps");
  if (choice == "steps" && !argument.has(steps)) argument.refuse(str("trainer.", what, "_steps beside it"));
  argument.set(epochs, choice == "epoch" ? 1 : 0);
  if (choice != "steps")
    argument.put(steps, 0);  // Hugging Face leaves eval_steps and save_steps unused there
}

void schedule(Argument& argument) {
  const std::string choice = argument.choice({"linear", "cosine", "constant", "constant_with_warmup"});
  if (choice == "constant") return;
  argument.set("scheduler.type", choice == "linear"   ? "WarmupDecayLR"
                                 : choice == "cosine" ? "WarmupCosineLR"
                                                      : "WarmupLR");
  argument.set("scheduler.params.warmup_type", "linear");
  if (choice == "cosine") argument.set("scheduler.params.cos_min_ratio", 0.0);
  if (choice != "cosine") {
    argument.set("scheduler.params.warmup_min_lr", 0.0);
    argument.set("scheduler.params.warmup_max_lr", "auto");
  }
  for (const char* warmup : {"warmup_steps", "trainer.warmup_steps", "warmup_ratio", "trainer.warmup_ratio",
                             "scheduler.params.warmup_num_steps", "scheduler.params.warmup_ratio"})
    if (argument.has(warmup)) return;
  argument.set("scheduler.params.warmup_num_steps", 0);
}

void warm_up(Argument& argument, const char* key) {
  if (!argument.has("scheduler.type"))
    argument.refuse("lr_scheduler_type beside it (Hugging Face's default is \"linear\"), or scheduler.type");
  argument.set(key, argument.value());
}

void report_to(Argument& argument) {
  std::vector<json> places = argument.value().is_array() ? argument.value().get<std::vector<json>>()
                                                         : std::vector<json>{argument.value()};
  for (const json& place : places) {
    if (place == "none" && places.size() == 1) return;
    if (place != "tensorboard" && place != "mlflow")
      argument.refuse("\"tensorboard\", \"mlflow\", a list of them, or \"none\" (docs/monitoring.md)");
    argument.set(place.get<std::string>() + ".enabled", true);
  }
}

void beta(Argument& argument, size_t index) {
  if (!argument.value().is_number()) argument.refuse("a number from 0 to below 1");
  json betas =
      argument.has("optimizer.params.betas") ? argument.at("optimizer.params.betas") : json{0.9, 0.999};
  if (!betas.is_array() || betas.size() != 2) betas = {0.9, 0.999};
  betas[index] = argument.value();
  argument.put("optimizer.params.betas", betas);
}

struct Rule {
  const char* name;
  const char* accepted;
  const char* keys;    // in words
  const char* target;  // the rule applies if the table has this key
  void (*apply)(Argument&);
};

// Applied in this order: a schedule before its warm-up.
const Rule kRules[] = {
    {"bf16", "true or false", "`torch_autocast.enabled`, `dtype` \"bf16\": fp32 weights under autocast",
     "torch_autocast", [](Argument& argument) { autocast(argument, argument.flag() ? "bf16" : "no"); }},
    {"fp16", "true or false", "`torch_autocast.enabled`, `dtype` \"fp16\", with its loss scaling",
     "torch_autocast", [](Argument& argument) { autocast(argument, argument.flag() ? "fp16" : "no"); }},
    {"mixed_precision", "\"no\", \"bf16\", \"fp16\"", "the same", "torch_autocast",
     [](Argument& argument) { autocast(argument, argument.choice({"no", "bf16", "fp16"})); }},
    {"lr_scheduler_type", "\"linear\", \"cosine\", \"constant\", \"constant_with_warmup\"",
     "`scheduler`: WarmupDecayLR, WarmupCosineLR, none, WarmupLR; warm-ups are linear and of no steps unless "
     "given",
     "scheduler", schedule},
    {"warmup_steps", "an integer", "`scheduler.params.warmup_num_steps`", "scheduler",
     [](Argument& argument) { warm_up(argument, "scheduler.params.warmup_num_steps"); }},
    {"warmup_ratio", "a number from 0 to 1", "`scheduler.params.warmup_ratio`", "scheduler",
     [](Argument& argument) { warm_up(argument, "scheduler.params.warmup_ratio"); }},
    {"adam_beta1", "a number", "the first of `optimizer.params.betas`", "optimizer",
     [](Argument& argument) { beta(argument, 0); }},
    {"adam_beta2", "a number", "the second of `optimizer.params.betas`", "optimizer",
     [](Argument& argument) { beta(argument, 1); }},
    {"eval_strategy", "\"no\", \"steps\", \"epoch\"",
     "`trainer.eval_every_epochs`, `trainer.eval_every_steps`", "trainer.eval_every_epochs",
     [](Argument& argument) { by_strategy(argument, "eval"); }},
    {"evaluation_strategy", "\"no\", \"steps\", \"epoch\"", "the same", "trainer.eval_every_epochs",
     [](Argument& argument) { by_strategy(argument, "eval"); }},
    {"save_strategy", "\"no\", \"steps\", \"epoch\"",
     "`trainer.save_every_epochs`, `trainer.save_every_steps`; the best is kept besides",
     "trainer.save_every_epochs", [](Argument& argument) { by_strategy(argument, "save"); }},
    {"logging_strategy", "\"no\", \"steps\"", "`steps_per_print`", "steps_per_print",
     [](Argument& argument) {
       if (argument.choice({"no", "steps"}) == "no") argument.set("steps_per_print", 0);
     }},
    {"report_to", "\"tensorboard\", \"mlflow\", a list of them, \"none\"",
     "`tensorboard.enabled`, `mlflow.enabled`", "tensorboard", report_to},
    {"greater_is_better", "true or false", "`trainer.best_is`", "trainer.best_is",
     [](Argument& argument) { argument.set("trainer.best_is", argument.flag() ? "greatest" : "least"); }},
    {"use_cpu", "true or false", "`trainer.device`", "trainer.device", use_cpu},
    {"no_cuda", "true or false", "the same", "trainer.device", use_cpu},
};

/// Arguments that a configuration does not accept.
struct OtherArgument {
  const char* names;  // separated by spaces
  const char* instead;
};

const OtherArgument kOtherArguments[] = {
    {"auto_find_batch_size",
     "there is none here: running out of memory is an error that says what to change"},
    {"data_seed", "here it is seed, which orders the data too"},
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
    {"fsdp fsdp_config fsdp_plugin",
     "here it is zero_optimization.stage: 3 shards parameters too (full_shard), 2 gradients and optimizer "
     "state (shard_grad_op)"},
    {"gpu_ids", "here CUDA_VISIBLE_DEVICES in the environment says it"},
    {"gradient_checkpointing", "`activation_checkpointing.policy` \"block\" does this, for any model"},
    {"group_by_length",
     "there is none here: texts of a batch are padded to the longest of a rank's micro-batch"},
    {"hub_model_id hub_token push_to_hub", "there is no client of the Hub here"},
    {"label_names", "here it is data.target"},
    {"label_smoothing_factor",
     "here it is model.label_smoothing, of models from Python with \"cross_entropy\""},
    {"local_rank", "here the launcher says it: --nproc on the command line, or torchrun"},
    {"log_with", "here it is report_to, or the sections tensorboard, csv_monitor, jsonl_monitor and mlflow"},
    {"logging_dir", "here it is tensorboard.output_path"},
    {"logging_first_step", "here it is steps_per_print: a line comes after so many steps"},
    {"lr_scheduler_kwargs", "here it is scheduler.params"},
    {"machine_rank main_process_ip num_machines", "here torchrun on each host says it (docs/launching.md)"},
    {"main_process_port", "here it is --master-port on the command line"},
    {"num_gpus num_processes", "here it is --nproc on the command line"},
    {"optim_args", "here it is optimizer.params"},
    {"project_dir", "here it is trainer.output_dir"},
    {"remove_unused_columns", "here data.inputs names what the model takes"},
    {"resume_from_checkpoint", "here it is --resume, or --resume TAG, on the command line"},
    {"save_only_model", "there is none here: a checkpoint has all that training needs to go on"},
    {"split_batches",
     "here train_batch_size is the batch of all ranks, train_micro_batch_size_per_gpu of one"},
    {"torch_compile torch_compile_backend", "there is none here: models run as they are"},
    {"zero_stage", "here it is zero_optimization.stage"},
};

}  // namespace

void expand_arguments(Document& document, const KeyTable& table, Problems& problems, ConfigReport* report) {
  for (const Rule& rule : kRules) {
    if (!table.find_any(rule.target)) continue;
    for (const std::string& path : {std::string(rule.name), str("trainer.", rule.name)}) {
      const json* written = value_at(*document.json, path);
      if (!written || (table.find_any(path) && !written->is_boolean())) continue;  // the section
      const json value = *written;
      json* parent = path == rule.name ? document.json.get() : value_at(*document.json, "trainer");
      parent->erase(rule.name);
      problems.collect([&] {
        Argument argument(document, path, value);
        rule.apply(argument);
        if (report && value == json(true) && table.find_any(path))  // there is a section of this name, too
          report->resolved.push_back(
              str(path, ": true, as Hugging Face's argument, is torch_autocast of ", path));
      });
    }
  }
}

std::vector<ArgumentRow> argument_rows() {
  std::vector<ArgumentRow> rows;
  for (const Rule& rule : kRules) rows.push_back({rule.name, rule.accepted, rule.keys});
  return rows;
}

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
