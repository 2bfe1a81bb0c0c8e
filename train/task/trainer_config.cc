#include "train/task/trainer_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/json/json_text.h"
#include "core/str.h"
#include "engine/config/keys.h"
#include "engine/config/parse.h"

namespace tessera::train {
namespace {

using config::Document;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr double kMaxCount = 9e15;

/// The keys of `trainer` with defaults of their own. Those of epochs, max_steps, name, output_dir and
/// eval_batch_size depend on other keys: see given_fields().
std::vector<config::Field> trainer_fields(TrainerConfig& c) {
  using namespace config;
  const Attribute count = between(0, kMaxCount);
  return {
      {"overwrite_output_dir", &c.overwrite_output_dir,
       "Starts from the beginning in a folder that has checkpoints of an unfinished run; false: that is an "
       "error",
       argument("overwrite_output_dir")},
      {"eval_every_epochs", &c.eval_every_epochs,
       "Epochs between two evaluations; 0: only by steps and at the end", count},
      {"eval_every_steps", &c.eval_every_steps,
       "Optimizer steps between two evaluations; 0: only by epochs and at the end", count,
       argument("eval_steps")},
      {"histograms_every_steps", &c.histograms_every_steps,
       "Optimizer steps between two histograms of each parameter and its gradient, for `tensorboard` and "
       "`jsonl_monitor`; 0: none",
       count},
      {"save_every_epochs", &c.save_every_epochs,
       "Epochs between two checkpoints in `output_dir`/checkpoints; 0: only by steps (with both 0: none at "
       "all)",
       count},
      {"save_every_steps", &c.save_every_steps, "Optimizer steps between two checkpoints; 0: only by epochs",
       count, argument("save_steps")},
      {"save_in_memory_every_steps", &c.save_in_memory_every_steps,
       "With `--max-restarts`, on one host or on several over ssh: optimizer steps between two checkpoints "
       "in memory "
       "(/dev/shm), from which a restart continues; 0: a restart continues from `output_dir`",
       count},
      {"metric_for_best", &c.metric_for_best,
       "The metric of the task by which the best checkpoint is chosen (`eval_loss` is `loss`). That "
       "checkpoint is kept in addition to those of `checkpoint.keep_last`",
       argument("metric_for_best_model")},
      {"best_is", &c.best_is,
       "Which value of the metric is best; auto: the least of a loss, error (mse, rmse, mae) or perplexity, "
       "the greatest of any other",
       choices({"auto", "greatest", "least"})},
      {"load_best_at_end", &c.load_best_at_end,
       "The final test and the exported model are of the best checkpoint; false: of the last",
       argument("load_best_model_at_end")},
      {"early_stopping_patience", &c.early_stopping_patience,
       "Evaluations in a row without a better `metric_for_best` after which training ends; 0: it never ends "
       "early",
       count, argument("early_stopping_patience")},
      {"early_stopping_threshold", &c.early_stopping_threshold,
       "How much better a value must be to count as better for `early_stopping_patience`", between(0, 1e30),
       argument("early_stopping_threshold")},
      {"export_model", &c.export_model,
       "Writes `output_dir`/model.safetensors at the end: the best checkpoint (see `load_best_at_end`), or "
       "the last if nothing is evaluated. Without checkpoints none"},
      {"device", &c.device, "Where the model runs; auto: cuda when the machine has it",
       choices({"auto", "cpu", "cuda"}, {{"gpu", "cuda"}})},
      {"num_threads", &c.num_threads,
       "CPU threads of one rank; 0: the machine's cores divided by the ranks on it", between(0, 1024)},
      {"deterministic", &c.deterministic,
       "As torch.use_deterministic_algorithms(True): operators give the same bits in every run, and one that "
       "cannot is an error",
       argument("full_determinism")},
      {"tf32", &c.tf32,
       "CUDA: fp32 matrix products and convolutions on tensor cores, which round their inputs to 10 bits of "
       "mantissa; false: as libtorch does by default (products in fp32, unless the environment has "
       "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1)",
       argument("tf32")},
      {"attention_backends", &c.attention_backends,
       "The kernels of `scaled_dot_product_attention`, the preferred first, as in "
       "torch.nn.attention.sdpa_kernel(…, set_priority=True); the others are off. Each attention uses the "
       "first kernel that supports its device, dtype, mask and head size. If none does, that is an error; "
       "math supports all. CPU ranks have flash and math, and use flash if it is on. Kernels round "
       "differently, so another kernel changes the last bits of losses and weights. null: libtorch chooses",
       choice_list({"flash", "efficient", "cudnn", "math"}, {{"flash_attention", "flash"},
                                                             {"efficient_attention", "efficient"},
                                                             {"cudnn_attention", "cudnn"}}),
       kNullable},
  };
}

std::vector<config::Field> dataloader_fields(TrainerConfig& c) {
  using namespace config;
  return {
      {"dataloader_num_workers", &c.dataloader_num_workers,
       "Threads of one rank that make the next batches while it computes; 0: batches are made when they are "
       "needed",
       between(0, 1024), argument("dataloader_num_workers"), alias("trainer.num_workers")},
      {"dataloader_prefetch_factor", &c.dataloader_prefetch_factor,
       "Batches made ahead, for each of these threads", between(1, 1024),
       argument("dataloader_prefetch_factor"), alias("trainer.prefetch_factor")},
      {"dataloader_pin_memory", &c.dataloader_pin_memory,
       "CUDA: batches go to the device through page-locked memory, without waiting",
       argument("dataloader_pin_memory"), alias("trainer.pin_memory")},
      {"dataloader_drop_last", &c.dataloader_drop_last,
       "Drops the samples after an epoch's last whole batch; false: they make a smaller step, each sample "
       "once",
       alias("trainer.drop_last"), alias("dataloader_drop_last")},
  };
}

std::vector<config::Field> comm_fields(TrainerConfig& c) {
  using namespace config;
  return {
      {"backend", &c.backend,
       "What carries the collectives. auto for CUDA: nccl, or staged if ranks have the same device or there "
       "is no NCCL. auto for CPUs: shm on one host; on several hosts hybrid (shared memory within a host, "
       "Gloo between hosts) if some ranks share a host, else gloo. staged: CUDA tensors pass through the "
       "host's memory, over the backend that auto is for CPUs; ranks may share a device. nccl and staged are "
       "refused for CPU tensors",
       choices({"auto", "shm", "hybrid", "gloo", "nccl", "staged"}), argument("ddp_backend")},
      {"timeout_s", &c.timeout_s, "Seconds after which a waiting collective fails", between(0.001, 1e9),
       argument("ddp_timeout")},
      {"rendezvous_timeout_s", &c.rendezvous_timeout_s,
       "Seconds in which all ranks must have joined. The command line's `--rendezvous-timeout` overrides it",
       between(0.001, 1e9)},
      {"verify", &c.verify,
       "Compares digests of what ranks send each other over Gloo (`gloo`, and `hybrid` between hosts) with "
       "what "
       "arrives; a difference is an error that names the ranks and the collective"},
  };
}

/// Keys whose defaults depend on other keys; unset: not given.
struct GivenTrainer {
  std::optional<std::string> name{}, output_dir{};
  std::optional<int64_t> epochs{}, max_steps{}, eval_batch_size{};
};

std::vector<config::Field> given_fields(GivenTrainer& c) {
  using namespace config;
  return {
      {"name", &c.name, "Name of the run; null: the configuration file's name", kNullable,
       argument("run_name")},
      {"output_dir", &c.output_dir,
       "Folder for logs, the resolved configuration and results; null: `runs/NAME`", kNullable,
       argument("output_dir")},
      {"epochs", &c.epochs, "Passes over the training data; null: 1. `max_steps` overrides it",
       between(1, kMaxCount), kNullable, argument("num_train_epochs")},
      {"max_steps", &c.max_steps,
       "Optimizer steps of the run, which override `epochs`; null, -1 or 0: `epochs` decides",
       between(-1, kMaxCount), kNullable, argument("max_steps")},
      {"eval_batch_size", &c.eval_batch_size,
       "Samples of one evaluation pass on one rank; null: train_micro_batch_size_per_gpu", between(1, 1e9),
       kNullable, argument("per_device_eval_batch_size")},
  };
}

/// Every field of the sections `trainer` and `comm`, in the order of the resolved configuration.
std::vector<config::Field> all_fields(GivenTrainer& given, TrainerConfig& trainer) {
  std::vector<config::Field> fields;
  for (auto& [section, rows] : {std::pair{"trainer", given_fields(given)},
                                {"trainer", trainer_fields(trainer)},
                                {"trainer", dataloader_fields(trainer)},
                                {"comm", comm_fields(trainer)}})
    for (config::Field& field : config::in_section(section, rows)) fields.push_back(std::move(field));
  return fields;
}

/// max_steps overrides epochs, as in Hugging Face's Trainer. The command line overrides the file.
void set_length(const GivenTrainer& given, const config::Origins& origins, TrainerConfig& trainer,
                config::ConfigReport* report) {
  trainer.epochs = given.epochs.value_or(trainer.epochs);
  trainer.max_steps = std::max<int64_t>(given.max_steps.value_or(0), 0);
  if (trainer.max_steps == 0) return;
  const bool use_epochs =
      given.epochs && origins.is_override("trainer.epochs") && !origins.is_override("trainer.max_steps");
  if (given.epochs && report)
    report->resolved.push_back(
        use_epochs
            ? str("trainer.epochs ", *given.epochs,
                  ", of the command line, is used and not trainer.max_steps ", *given.max_steps)
            : str("trainer.max_steps ", *given.max_steps, " is used and not trainer.epochs ", *given.epochs));
  (use_epochs ? trainer.max_steps : trainer.epochs) = 0;
}

TrainerConfig read_trainer(const Document& document, const EngineConfig& engine, config::Problems& problems,
                           config::ConfigReport* report) {
  const config::Origins& origins = document.origins;
  TrainerConfig trainer;
  GivenTrainer given;
  config::read_fields(all_fields(given, trainer), document, report);
  set_length(given, origins, trainer, report);

  trainer.name = given.name.value_or(std::filesystem::path(origins.source()).stem().string());
  problems.collect([&] {
    if (trainer.name.empty() || trainer.name.find('/') != std::string::npos || trainer.name == "." ||
        trainer.name == "..")
      origins.fail("trainer.name", str("found ", config::describe_value(trainer.name),
                                       "; expected a name that can be a folder's"));
  });
  trainer.output_dir = given.output_dir.value_or("runs/" + trainer.name);
  problems.collect([&] {
    if (trainer.output_dir.empty())
      origins.fail("trainer.output_dir", "found \"\" (a string); expected a folder");
  });

  // Hugging Face's Trainer prefixes the names of its metrics.
  if (constexpr std::string_view kPrefix = "eval_"; trainer.metric_for_best.starts_with(kPrefix))
    trainer.metric_for_best.erase(0, kPrefix.size());
  trainer.eval_batch_size = given.eval_batch_size.value_or(engine.train_micro_batch_size_per_gpu);
  return trainer;
}

RunConfig parse(Document document, int world_size, const std::vector<std::string>& overrides) {
  RunConfig run;
  config::KeyTable table = run_keys();
  config::prepare(document, table, overrides, &run.report);
  config::Problems problems;
  run.engine = config::read_engine_config(document, world_size, problems, &run.report);
  run.trainer = read_trainer(document, run.engine, problems, &run.report);
  problems.raise();
  const auto free_section = [&](const char* name) {
    const json* value = config::value_at(*document.json, name);
    return config::Section(value ? *value : json::object(), name, document.origins);
  };
  run.model = free_section("model");
  run.data = free_section("data");
  return run;
}

}  // namespace

config::KeyTable run_keys() {
  using namespace config;
  KeyTable table;
  const KeyTable engine = engine_keys();
  for (const Key& key : engine.keys())
    if (key.path != "dataloader_drop_last")
      table.add(key);  // ignored by an engine alone; an alias of trainer.dataloader_drop_last in a run
  const auto add = [&](Type type, const char* path, const char* doc, const auto&... attributes) {
    table.add(make_key(type, path, doc, attributes...));
  };
  add(Type::kFreeSection, "model", "The model; its further keys are its own and are read just as strictly");
  add(Type::kText, "model.type", "Name of a registered model", kRequired);
  add(Type::kFreeSection, "data",
      "The data; its further keys are the task's own and are read just as strictly");
  add(Type::kText, "data.type", "Name of a registered data set", kRequired);
  add(Type::kSection, "comm", "How ranks talk to each other");
  add(Type::kSection, "trainer", "How long, how often, where to");
  TrainerConfig defaults;
  GivenTrainer given;
  table.add(keys_of(all_fields(given, defaults)));
  return table;
}

RunConfig load_run_config(const std::string& file, int world_size,
                          const std::vector<std::string>& overrides) {
  return parse(config::read_document(file), world_size, overrides);
}

RunConfig parse_run_config(std::string_view json_text, const std::string& source, int world_size,
                           const std::vector<std::string>& overrides) {
  return parse(config::parse_document(json_text, source), world_size, overrides);
}

ordered_json resolved(const RunConfig& run) {
  ordered_json out;
  if (!run.model.resolved().empty()) out["model"] = run.model.resolved();
  if (!run.data.resolved().empty()) out["data"] = run.data.resolved();
  TrainerConfig trainer = run.trainer;
  const auto positive = [](int64_t number) { return number > 0 ? std::optional(number) : std::nullopt; };
  GivenTrainer given{trainer.name, trainer.output_dir, positive(trainer.epochs), positive(trainer.max_steps),
                     trainer.eval_batch_size};
  config::write_fields(all_fields(given, trainer), out);
  ordered_json engine = config::write_engine_config(run.engine);
  for (const auto& [name, value] : engine.items()) out[name] = value;
  return out;
}

std::string dump_resolved(const RunConfig& run) { return json_text(resolved(run), 2) + "\n"; }

void fill_in_schedule(ScheduleOptions& schedule, int64_t total_steps) {
  std::optional<int64_t>* total = total_num_steps_of(schedule);
  if (total && !*total) *total = total_steps;
  WarmupOptions* warmup = warmup_of(schedule);
  if (!warmup || !warmup->ratio) return;
  const int64_t steps = total ? **total : total_steps;
  warmup->num_steps = static_cast<int64_t>(std::ceil(*warmup->ratio * static_cast<double>(steps)));
  warmup->ratio.reset();
}

// PyTorch's examples step StepLR once an epoch, DeepSpeed at every optimizer step.
std::string schedule_warning(const ScheduleOptions& schedule, int64_t total_steps) {
  const auto* step_lr = std::get_if<StepLrOptions>(&schedule);
  if (!step_lr || counts_epochs(schedule)) return "";
  constexpr double kNothing = 1e-6;
  const int64_t num_decays = total_steps / step_lr->step_size;
  if (std::pow(step_lr->gamma, static_cast<double>(num_decays)) >= kNothing) return "";
  return str("scheduler.params.step_size: found ", step_lr->step_size,
             ", which counts optimizer steps: long before the last of ", format_count(total_steps),
             " the learning rate is 0; \"interval\": \"epoch\" counts epochs");
}

std::string precision_of(const EngineConfig& config) {
  std::string text(name_of(config.compute_dtype()));
  if (config.autocast.enabled) text += str(" under ", name_of(config.autocast.dtype), " autocast");
  return text;
}

}  // namespace tessera::train
