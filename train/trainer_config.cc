#include "train/trainer_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/config/bind.h"
#include "engine/config/keys.h"
#include "engine/config/parse.h"

namespace tessera::train {
namespace {

using config::Binding;
using config::Document;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr double kMaxCount = 9e15;

#define TESSERA_FIELD(member) [](auto& config) -> auto& { return config.member; }

/// The keys of `trainer` that stand for themselves; epochs, max_steps, name, output_dir and eval_batch_size
/// have defaults that depend on others.
std::vector<Binding<TrainerConfig>> trainer_bindings() {
  using namespace config;
  return {
      bind<TrainerConfig>(boolean("trainer.overwrite_output_dir")
                              .also_argument("overwrite_output_dir")
                              .says("Starts anew in a folder with the checkpoints of a run that has not "
                                    "finished, in place of an error"),
                          TESSERA_FIELD(overwrite_output_dir)),
      bind<TrainerConfig>(integer("trainer.eval_every_epochs")
                              .range(0, kMaxCount)
                              .says("Epochs between two evaluations; 0: only by steps and at the end"),
                          TESSERA_FIELD(eval_every_epochs)),
      bind<TrainerConfig>(
          integer("trainer.eval_every_steps")
              .range(0, kMaxCount)
              .also_argument("eval_steps")
              .says("Optimizer steps between two evaluations; 0: only by epochs and at the end"),
          TESSERA_FIELD(eval_every_steps)),
      bind<TrainerConfig>(integer("trainer.histograms_every_steps")
                              .range(0, kMaxCount)
                              .says("Optimizer steps between two histograms of each parameter and its "
                                    "gradient, for `tensorboard` and `jsonl_monitor`; 0: none"),
                          TESSERA_FIELD(histograms_every_steps)),
      bind<TrainerConfig>(integer("trainer.save_every_epochs")
                              .range(0, kMaxCount)
                              .says("Epochs between two checkpoints in `output_dir`/checkpoints; 0: only by "
                                    "steps (with both 0: none at all)"),
                          TESSERA_FIELD(save_every_epochs)),
      bind<TrainerConfig>(integer("trainer.save_every_steps")
                              .range(0, kMaxCount)
                              .also_argument("save_steps")
                              .says("Optimizer steps between two checkpoints; 0: only by epochs"),
                          TESSERA_FIELD(save_every_steps)),
      bind<TrainerConfig>(
          text("trainer.metric_for_best")
              .also_argument("metric_for_best_model")
              .says("The metric by which the best checkpoint is chosen, one of the task's (`eval_loss` is "
                    "`loss`); the checkpoint is kept whatever `checkpoint.keep_last` says"),
          TESSERA_FIELD(metric_for_best)),
      bind<TrainerConfig>(word("trainer.best_is", {"auto", "greatest", "least"})
                              .says("Which value of the metric is best; auto: the least of a loss, error "
                                    "(mse, rmse, mae) or perplexity, the greatest of any other"),
                          TESSERA_FIELD(best_is)),
      bind<TrainerConfig>(
          boolean("trainer.load_best_at_end")
              .also_argument("load_best_model_at_end")
              .says("The final test and the exported model are of the best checkpoint; false: of the last"),
          TESSERA_FIELD(load_best_at_end)),
      bind<TrainerConfig>(integer("trainer.early_stopping_patience")
                              .range(0, kMaxCount)
                              .also_argument("early_stopping_patience")
                              .says("Evaluations in a row without a better `metric_for_best` after which "
                                    "training ends; 0: it never ends early"),
                          TESSERA_FIELD(early_stopping_patience)),
      bind<TrainerConfig>(number("trainer.early_stopping_threshold")
                              .range(0, 1e30)
                              .also_argument("early_stopping_threshold")
                              .says("By how much a better value must be better to count there"),
                          TESSERA_FIELD(early_stopping_threshold)),
      bind<TrainerConfig>(boolean("trainer.export_model")
                              .says("Writes the best checkpoint (see `load_best_at_end`; the last, where "
                                    "nothing is evaluated) as "
                                    "`output_dir`/model.safetensors at the end"),
                          TESSERA_FIELD(export_model)),
      bind<TrainerConfig>(word("trainer.device", {"auto", "cpu", "cuda"})
                              .also_word("gpu", "cuda")
                              .says("Where the model runs; auto: cuda when the machine has it"),
                          TESSERA_FIELD(device)),
      bind<TrainerConfig>(word("comm.backend", {"auto", "shm", "gloo", "nccl"})
                              .also_argument("ddp_backend")
                              .says("What carries the collectives; auto: nccl for CUDA; shared memory for "
                                    "ranks on one host's CPUs, gloo for others"),
                          TESSERA_FIELD(backend)),
      bind<TrainerConfig>(
          integer("trainer.num_threads")
              .range(0, 1024)
              .says("CPU threads of one rank; 0: the machine's cores divided by the ranks on it"),
          TESSERA_FIELD(num_threads)),
      bind<TrainerConfig>(boolean("trainer.deterministic")
                              .also_argument("full_determinism")
                              .says("As torch.use_deterministic_algorithms(True): operators give the same "
                                    "bits in every run, and one that cannot is "
                                    "an error"),
                          TESSERA_FIELD(deterministic)),
      bind<TrainerConfig>(integer("trainer.dataloader_num_workers")
                              .range(0, 1024)
                              .also_argument("dataloader_num_workers")
                              .also("trainer.num_workers")
                              .says("Threads of one rank that make the next batches while it computes; 0: "
                                    "batches are made when they are needed"),
                          TESSERA_FIELD(dataloader_num_workers)),
      bind<TrainerConfig>(integer("trainer.dataloader_prefetch_factor")
                              .range(1, 1024)
                              .also_argument("dataloader_prefetch_factor")
                              .also("trainer.prefetch_factor")
                              .says("Batches made ahead, for each of these threads"),
                          TESSERA_FIELD(dataloader_prefetch_factor)),
      bind<TrainerConfig>(
          boolean("trainer.dataloader_pin_memory")
              .also_argument("dataloader_pin_memory")
              .also("trainer.pin_memory")
              .says("CUDA: batches go to the device through page-locked memory, without waiting"),
          TESSERA_FIELD(dataloader_pin_memory)),
      bind<TrainerConfig>(boolean("trainer.dataloader_drop_last")
                              .also("trainer.drop_last")
                              .also("dataloader_drop_last")
                              .says("Drops what an epoch has over after its last whole batch; false: a "
                                    "smaller step with each of these samples once"),
                          TESSERA_FIELD(dataloader_drop_last)),
      bind<TrainerConfig>(number("comm.timeout_s")
                              .above(0)
                              .also_argument("ddp_timeout")
                              .says("Seconds after which a waiting collective fails"),
                          TESSERA_FIELD(timeout_s)),
      bind<TrainerConfig>(number("comm.rendezvous_timeout_s")
                              .above(0)
                              .says("Seconds in which all ranks are to have met: to connect, to send and to "
                                    "receive. The command line's "
                                    "`--rendezvous-timeout` comes first"),
                          TESSERA_FIELD(rendezvous_timeout_s)),
  };
}

#undef TESSERA_FIELD

std::vector<config::Key> sections() {
  using namespace config;
  return {
      free_section("model").says("The model; its further keys are its own and are read just as strictly"),
      text("model.type").must().says("Name of a registered model"),
      free_section("data").says(
          "The data; its further keys are the task's own and are read just as strictly"),
      text("data.type").must().says("Name of a registered data set"),
      section("comm").says("How ranks talk to each other"),
      section("trainer").says("How long, how often, where to"),
      text("trainer.name")
          .or_null()
          .also_argument("run_name")
          .says("Name of the run; null: the configuration file's name"),
      text("trainer.output_dir")
          .or_null()
          .also_argument("output_dir")
          .says("Folder for logs, the resolved configuration and results; null: `runs/NAME`"),
      integer("trainer.epochs")
          .range(1, kMaxCount)
          .or_null()
          .also_argument("num_train_epochs")
          .says("Passes over the training data; null: 1. `max_steps` wins over them"),
      integer("trainer.max_steps")
          .range(-1, kMaxCount)
          .or_null()
          .also_argument("max_steps")
          .says("Optimizer steps, in place of `epochs`, which they win over; null, -1 or 0: `epochs` count"),
      integer("trainer.eval_batch_size")
          .range(1, 1e9)
          .or_null()
          .also_argument("per_device_eval_batch_size")
          .says("Samples of one evaluation pass on one rank; null: train_micro_batch_size_per_gpu"),
  };
}

/// The value of a key, unless it is absent or null.
const json* given(const Document& document, const char* path) {
  const json* value = config::value_at(*document.json, path);
  return value && !value->is_null() ? value : nullptr;
}

/// max_steps win over epochs, as in Hugging Face's Trainer; what stands on the
/// command line wins over the file.
void read_length(const Document& document, TrainerConfig& trainer, config::Report* report) {
  const json* epochs = given(document, "trainer.epochs");
  const json* max_steps = given(document, "trainer.max_steps");
  if (epochs) config::read_field(*epochs, trainer.epochs);
  if (max_steps) config::read_field(*max_steps, trainer.max_steps);
  trainer.max_steps = std::max<int64_t>(trainer.max_steps, 0);
  if (trainer.max_steps == 0) return;
  const config::Origins& origins = document.origins;
  const bool epochs_win =
      epochs && origins.is_override("trainer.epochs") && !origins.is_override("trainer.max_steps");
  if (epochs && report)
    report->resolved.push_back(
        epochs_win ? str("trainer.epochs: ", *epochs,
                         " of the command line count in place of trainer.max_steps ", *max_steps)
                   : str("trainer.max_steps: ", *max_steps, " count in place of trainer.epochs ", *epochs));
  (epochs_win ? trainer.max_steps : trainer.epochs) = 0;
}

TrainerConfig read_trainer(const Document& document, const EngineConfig& engine, config::Problems& problems,
                           config::Report* report) {
  TrainerConfig trainer;
  config::read_bindings(trainer_bindings(), document, trainer, report);
  read_length(document, trainer, report);

  trainer.name = std::filesystem::path(document.origins.source()).stem().string();
  if (const json* name = given(document, "trainer.name")) trainer.name = name->get<std::string>();
  problems.collect([&] {
    if (trainer.name.empty() || trainer.name.find('/') != std::string::npos || trainer.name == "." ||
        trainer.name == "..")
      document.fail("trainer.name", str("found ", config::describe_value(trainer.name),
                                        "; expected a name that can be a folder's"));
  });
  trainer.output_dir = "runs/" + trainer.name;
  if (const json* folder = given(document, "trainer.output_dir"))
    trainer.output_dir = folder->get<std::string>();
  problems.collect([&] {
    if (trainer.output_dir.empty())
      document.fail("trainer.output_dir", "found \"\" (a string); expected a folder");
  });

  // Hugging Face's Trainer knows its metrics by this prefix.
  if (constexpr std::string_view kPrefix = "eval_"; trainer.metric_for_best.starts_with(kPrefix))
    trainer.metric_for_best.erase(0, kPrefix.size());

  trainer.eval_batch_size = engine.train_micro_batch_size_per_gpu;
  if (const json* size = given(document, "trainer.eval_batch_size"))
    config::read_field(*size, trainer.eval_batch_size);
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
  auto free_section = [&](const char* name) {
    const json* value = given(document, name);
    config::Section section(value ? *value : json::object(), name, document.origins);
    return section;
  };
  run.model = free_section("model");
  run.data = free_section("data");
  return run;
}

/// Sections "trainer" and "comm".
ordered_json write_trainer(const TrainerConfig& trainer) {
  ordered_json sections;
  ordered_json& out = sections["trainer"];
  out["name"] = trainer.name;
  out["output_dir"] = trainer.output_dir;
  out["epochs"] = trainer.epochs > 0 ? ordered_json(trainer.epochs) : ordered_json(nullptr);
  out["max_steps"] = trainer.max_steps > 0 ? ordered_json(trainer.max_steps) : ordered_json(nullptr);
  out["eval_batch_size"] = trainer.eval_batch_size;
  ordered_json bound;
  config::write_bindings(trainer_bindings(), trainer, bound);
  for (const auto& [name, value] : bound["trainer"].items()) out[name] = value;
  sections["comm"] = bound["comm"];
  return sections;
}

}  // namespace

config::KeyTable run_keys() {
  config::KeyTable table;
  const config::KeyTable engine = config::engine_keys();
  for (const config::Key& key : engine.keys())
    if (key.path != "dataloader_drop_last")
      table.add(key);  // without effect for an engine alone, which loads no data
  table.add(sections());
  for (const auto& binding : trainer_bindings()) table.add(binding.key);
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
  out.update(write_trainer(run.trainer));
  ordered_json engine = config::shown_engine_config(run.engine);
  for (const auto& [name, value] : engine.items()) out[name] = value;
  return out;
}

std::string dump_resolved(const RunConfig& run) {
  return resolved(run).dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

void fill_in_schedule(SchedulerConfig& scheduler, int64_t total_steps) {
  auto& params = scheduler.params;
  if (scheduler.type == "WarmupDecayLR" || scheduler.type == "WarmupCosineLR")
    params.try_emplace("total_num_steps", 1, static_cast<double>(total_steps));
  const auto ratio = params.find("warmup_ratio");
  if (ratio == params.end()) return;
  const auto total = params.find("total_num_steps");
  params["warmup_num_steps"] = {
      std::ceil(ratio->second.front() *
                (total == params.end() ? static_cast<double>(total_steps) : total->second.front()))};
  params.erase("warmup_ratio");
}

// PyTorch's examples step StepLR once an epoch, DeepSpeed at every optimizer step.
std::string doubt_about(const SchedulerConfig& scheduler, int64_t total_steps) {
  if (scheduler.type != "StepLR" ||
      (scheduler.words.contains("interval") && scheduler.words.at("interval") != "step"))
    return "";
  const double step_size = scheduler.params.at("step_size").front(),
               gamma = scheduler.params.at("gamma").front();
  constexpr double kNothing = 1e-6;
  if (std::pow(gamma, std::floor(static_cast<double>(total_steps) / step_size)) >= kNothing) return "";
  return str("scheduler.params.step_size: found ", step_size,
             ", which counts optimizer steps: long before the last of ", format_count(total_steps),
             " the learning rate is 0; \"interval\": \"epoch\" counts epochs");
}

std::string precision_of(const EngineConfig& config) {
  std::string text(name_of(config.compute_dtype()));
  if (config.autocast.enabled) text += str(" under ", name_of(config.autocast.dtype), " autocast");
  return text;
}

}  // namespace tessera::train
