// A whole run's configuration: the trainer's section, the ready files, the schema and the documentation.
#include "train/trainer_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "core/str.h"
#include "engine/config/keys.h"
#include "engine/config/schema.h"
#include "tests/engine/config/config_testing.h"
#include "tests/support/files.h"

namespace tessera::train {
namespace {

using nlohmann::json;

RunConfig parse(const std::string& trainer, int world_size = 1) {
  return parse_run_config("{\"train_batch_size\": 8, \"trainer\": {" + trainer + "}}", "folder/my_run.json",
                          world_size);
}
std::string trainer_error(const std::string& trainer) {
  return config_error([&] { parse(trainer); });
}

TEST(TrainerConfig, Defaults) {
  TrainerConfig expected;
  expected.name = "my_run";
  expected.output_dir = "runs/my_run";
  expected.eval_batch_size = 4;
  EXPECT_EQ(parse("", 2).trainer, expected);
  EXPECT_EQ(parse_run_config("{\"train_batch_size\": 8}", "my_run.json", 2).trainer, expected);
}

TEST(TrainerConfig, EveryKeyReachesItsField) {
  TrainerConfig expected;
  expected.name = "n";
  expected.output_dir = "/tmp/o";
  expected.epochs = 0;
  expected.max_steps = 100;
  expected.eval_every_epochs = 0;
  expected.eval_every_steps = 50;
  expected.eval_batch_size = 7;
  expected.device = "cpu";
  expected.backend = "gloo";
  expected.num_threads = 2;
  expected.timeout_s = 1.5;
  expected.rendezvous_timeout_s = 2.5;
  RunConfig run = parse(
      R"("name": "n", "output_dir": "/tmp/o", "max_steps": 1e2, "eval_every_epochs": 0, "eval_every_steps": 50,
      "eval_batch_size": 7, "device": "CPU", "num_threads": 2}, "comm": {"backend": "gloo", "timeout_s": 1.5, "rendezvous_timeout_s": 2.5)");
  EXPECT_EQ(run.trainer, expected);
  const TrainerConfig data =
      parse(
          R"("num_workers": 3, "prefetch_factor": 5, "pin_memory": false}, "dataloader_drop_last": false, "comm": {)")
          .trainer;
  EXPECT_EQ(data.dataloader_num_workers, 3);
  EXPECT_EQ(data.dataloader_prefetch_factor, 5);
  EXPECT_FALSE(data.dataloader_pin_memory);
  EXPECT_FALSE(data.dataloader_drop_last) << "DeepSpeed's key";
  EXPECT_EQ(parse(R"("name": "n")").trainer.output_dir, "runs/n");
  EXPECT_EQ(parse(R"("epochs": 3)").trainer.epochs, 3);
}

TEST(TrainerConfig, Errors) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("epochs": 0)", "trainer.epochs: found 0 (a number); expected an integer from 1 to 9e15, or null"},
      {R"("device": "cudda")",
       "trainer.device: found \"cudda\" (a string); expected one of \"auto\", \"cpu\", \"cuda\" (did you "
       "mean \"cuda\"?)"},
      {R"("name": "a/b")", "trainer.name: found \"a/b\" (a string); expected a name that can be a folder's"},
      {R"("output_dir": "")", "trainer.output_dir: found \"\" (a string); expected a folder"},
      {R"("epoch": 2)",
       "trainer.epoch: unknown key (did you mean \"epochs\"?), found 2 (a number); expected one of epochs, "
       "device, eval_every_epochs, save_every_epochs, export_model, … "
       "(all 24 are in docs/configuration.md)"},
      {R"("epochs": 0, "name": "a/b", "max_steps": "x")",
       "trainer.epochs: found 0 (a number); expected an integer from 1 to 9e15, or null\n"
       "folder/my_run.json:1: trainer.max_steps: found \"x\" (a string); expected an integer from -1 to "
       "9e15, or null"},
      {R"("name": "a/b", "output_dir": "")",
       "trainer.name: found \"a/b\" (a string); expected a name that can be a folder's\n"
       "folder/my_run.json:1: trainer.output_dir: found \"\" (a string); expected a folder"},
  };
  for (const auto& [keys, message] : cases)
    EXPECT_EQ(trainer_error(keys), "folder/my_run.json:1: " + message) << keys;
  EXPECT_EQ(config_error(
                [] { parse_run_config(R"({"train_batch_size": 8, "model": {"hidden": 3}})", "c.json", 1); }),
            "c.json:1: model.type: is missing; expected a string");
}

TEST(TrainerConfig, WhichMetricsAreBetterWhenTheyAreLower) {
  for (const char* metric : {"loss", "test_loss", "perplexity", "mse", "rmse", "mae"})
    EXPECT_FALSE(parse(str("\"metric_for_best\": \"", metric, "\"")).trainer.greater_is_better()) << metric;
  for (const char* metric :
       {"accuracy", "f1", "f1_macro", "precision_weighted", "recall_macro", "dice", "r2"})
    EXPECT_TRUE(parse(str("\"metric_for_best\": \"", metric, "\"")).trainer.greater_is_better()) << metric;
  EXPECT_TRUE(parse(R"("metric_for_best": "perplexity", "best_is": "greatest")").trainer.greater_is_better());
  EXPECT_FALSE(parse(R"("metric_for_best": "accuracy", "best_is": "least")").trainer.greater_is_better());
}

TEST(TrainerConfig, TakesHuggingFacesNames) {
  const std::string names =
      R"({"run_name": "r", "num_train_epochs": 2, "per_device_eval_batch_size": 3, "eval_steps": 4, "save_steps": 5,
      "metric_for_best_model": "f1", "load_best_model_at_end": false, "full_determinism": true, "dataloader_num_workers": 6})";
  const TrainerConfig trainer = parse_run_config("{\"train_batch_size\": 8, \"trainer\": " + names + "}",
                                                 "c.json", 1, {"trainer.eval_steps=7"})
                                    .trainer;
  TrainerConfig expected;
  expected.name = "r";
  expected.output_dir = "runs/r";
  expected.epochs = 2;
  expected.eval_batch_size = 3;
  expected.eval_every_steps = 7;
  expected.save_every_steps = 5;
  expected.metric_for_best = "f1";
  expected.load_best_at_end = false;
  expected.deterministic = true;
  expected.dataloader_num_workers = 6;
  EXPECT_EQ(trainer, expected);
}

TEST(TrainerConfig, MaxStepsWinOverEpochs) {
  const auto length = [](const std::string& trainer, const std::vector<std::string>& overrides = {}) {
    const TrainerConfig read =
        parse_run_config("{\"train_batch_size\": 8, \"trainer\": {" + trainer + "}}", "c.json", 1, overrides)
            .trainer;
    return std::pair(read.epochs, read.max_steps);
  };
  using Length = std::pair<int64_t, int64_t>;
  EXPECT_EQ(length(R"("epochs": 2, "max_steps": 5)"), Length(0, 5));
  EXPECT_EQ(length(R"("epochs": 2)", {"trainer.max_steps=200"}), Length(0, 200));
  EXPECT_EQ(length(R"("epochs": 2, "max_steps": -1)"), Length(2, 0)) << "off, as in TrainingArguments";
  EXPECT_EQ(length(R"("max_steps": 0)"), Length(1, 0));
  EXPECT_EQ(length(R"("max_steps": 5)", {"trainer.max_steps=-1"}), Length(1, 0));
  EXPECT_EQ(length(R"("max_steps": 5)", {"trainer.epochs=3"}), Length(3, 0))
      << "the command line wins over the file";
  EXPECT_EQ(length(R"("max_steps": 5)", {"num_train_epochs=3", "max_steps=7"}), Length(0, 7));
  const RunConfig run = parse(R"("epochs": 2, "max_steps": 5)");
  EXPECT_EQ(run.report.resolved,
            std::vector<std::string>{"trainer.max_steps: 5 count in place of trainer.epochs 2"});
  EXPECT_EQ(parse(R"("device": "gpu")").trainer.device, "cuda");
}

/// The whole configuration, as text, that a run's keys beside a batch size mean.
std::string meaning_of(const std::string& keys, const std::vector<std::string>& overrides = {}) {
  return dump_resolved(
      parse_run_config("{\"train_micro_batch_size_per_gpu\": 8" + (keys.empty() ? "" : ", " + keys) + "}",
                       "c.json", 1, overrides));
}

TEST(TrainerConfig, TakesArgumentsOfHuggingFaceAndAccelerate) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("learning_rate": 3e-4, "weight_decay": 0.1, "adam_epsilon": 1e-7, "adam_beta2": 0.95)",
       R"("optimizer": {"params": {"lr": 3e-4, "weight_decay": 0.1, "eps": 1e-7, "betas": [0.9, 0.95]}})"},
      {R"("optim": "adamw_torch", "adam_beta1": 0.8)",
       R"("optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.999]}})"},
      {R"("per_device_train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto")",
       R"("train_micro_batch_size_per_gpu": 4)"},
      {R"("logging_steps": 50, "save_total_limit": 2, "max_grad_norm": 0.5)",
       R"("steps_per_print": 50, "checkpoint": {"keep_last": 2}, "gradient_clipping": 0.5)"},
      {R"("bf16": true)", R"("torch_autocast": {"enabled": true, "dtype": "bf16"})"},
      {R"("fp16": true)", R"("torch_autocast": {"enabled": true, "dtype": "fp16"})"},
      {R"("bf16": false, "fp16": false)", ""},
      {R"("mixed_precision": "fp16")", R"("torch_autocast": {"enabled": true, "dtype": "fp16"})"},
      {R"("mixed_precision": "no")", ""},
      {R"("report_to": "none")", ""},
      {R"("report_to": ["tensorboard", "mlflow"])",
       R"("tensorboard": {"enabled": true}, "mlflow": {"enabled": true})"},
      {R"("lr_scheduler_type": "linear", "warmup_steps": 30)",
       R"("scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_type": "linear", "warmup_num_steps": 30}})"},
      {R"("lr_scheduler_type": "cosine", "warmup_ratio": 0.1)",
       R"("scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0, "warmup_type": "linear", "warmup_ratio": 0.1}})"},
      {R"("lr_scheduler_type": "constant_with_warmup")",
       R"("scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_type": "linear", "warmup_num_steps": 0}})"},
      {R"("lr_scheduler_type": "constant")", ""},
      {R"("logging_strategy": "no")", R"("steps_per_print": 0)"},
  };
  for (const auto& [arguments, keys] : cases) {
    // In the file's own micro-batch's place where the case has one.
    const auto dump = [](const std::string& text) {
      const std::string batch =
          text.find("batch_size") == std::string::npos ? "\"train_micro_batch_size_per_gpu\": 8" : "";
      return dump_resolved(parse_run_config(
          "{" + batch + (batch.empty() || text.empty() ? "" : ", ") + text + "}", "c.json", 1));
    };
    EXPECT_EQ(dump(arguments), dump(keys)) << arguments;
  }
  const std::vector<std::pair<std::string, std::string>> in_trainer = {
      {R"("num_train_epochs": 4, "learning_rate": 1e-5, "output_dir": "o", "seed": 7)",
       R"("epochs": 4, "output_dir": "o"}, "seed": 7, "optimizer": {"params": {"lr": 1e-5})"},
      {R"("eval_strategy": "no", "eval_steps": 10)", R"("eval_every_epochs": 0)"},
      {R"("eval_strategy": "steps", "eval_steps": 10)", R"("eval_every_epochs": 0, "eval_every_steps": 10)"},
      {R"("eval_strategy": "epoch", "save_strategy": "epoch")", ""},
      {R"("save_strategy": "steps", "save_steps": 20, "greater_is_better": true)",
       R"("save_every_epochs": 0, "save_every_steps": 20, "best_is": "greatest")"},
      {R"("save_strategy": "no", "use_cpu": true)", R"("save_every_epochs": 0, "device": "cpu")"},
      {R"("bf16": true, "ddp_timeout": 60, "gradient_accumulation_steps": 2)",
       R"("name": null}, "gradient_accumulation_steps": 2, "torch_autocast": {"enabled": true}, "comm": {"timeout_s": 60)"},
  };
  for (const auto& [arguments, keys] : in_trainer)
    EXPECT_EQ(meaning_of("\"trainer\": {" + arguments + "}"), meaning_of("\"trainer\": {" + keys + "}"))
        << arguments;
  EXPECT_EQ(meaning_of("", {"learning_rate=0.5", "bf16=true"}),
            meaning_of(R"("optimizer": {"params": {"lr": 0.5}}, "torch_autocast": {"enabled": true})"));
  EXPECT_EQ(meaning_of(R"("lr_scheduler_type": "linear", "eval_strategy": "epoch")",
                       {"lr_scheduler_type=constant", "trainer.eval_every_epochs=3"}),
            meaning_of(R"("trainer": {"eval_every_epochs": 3})"))
      << "the command line wins";
}

TEST(TrainerConfig, ArgumentsThatCannotBeTaken) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("report_to": "wandb")",
       R"(report_to: found "wandb" (a string); expected "tensorboard", "mlflow", a list of them, or "none" (docs/monitoring.md))"},
      {R"("warmup_steps": 10)",
       R"(warmup_steps: found 10 (a number); expected lr_scheduler_type beside it (Hugging Face's default is "linear"), or scheduler.type)"},
      {R"("lr_scheduler_type": "polynomial")",
       R"(lr_scheduler_type: found "polynomial" (a string); expected one of "linear", "cosine", "constant", "constant_with_warmup")"},
      {R"("trainer": {"eval_strategy": "steps"})",
       R"(trainer.eval_strategy: found "steps" (a string); expected trainer.eval_steps beside it)"},
      {R"("trainer": {"eval_strategy": "epoch", "eval_every_epochs": 2})",
       R"(trainer.eval_strategy: found "epoch" (a string) beside trainer.eval_every_epochs 2; expected one of the two)"},
      {R"("learning_rate": 1, "optimizer": {"params": {"lr": 2}})",
       R"(optimizer.params.lr: is also given under its other name "learning_rate"; expected one of the two)"},
      {R"("trainer": {"fp16": "yes"})", R"(trainer.fp16: found "yes" (a string); expected true or false)"},
      {R"("trainer": {"bf16": true, "fp16": true})",
       R"(trainer.fp16: found true (a boolean) beside torch_autocast.dtype "bf16"; expected one of the two)"},
      {R"("scheduler": {"type": "WarmupLR", "params": {"warmup_ratio": 0.1, "warmup_num_steps": 5}})",
       "scheduler.params.warmup_ratio: found 0.1 beside warmup_num_steps; expected one of the two"},
  };
  for (const auto& [keys, message] : cases)
    EXPECT_EQ(config_error([&] { meaning_of(keys); }), "c.json:1: " + message) << keys;
  for (const char* name : {"deepspeed", "resume_from_checkpoint", "torch_compile", "hub_token"}) {
    const std::string error =
        config_error([&] { meaning_of(std::string("\"trainer\": {\"") + name + "\": 1}"); });
    EXPECT_NE(error.find("an argument of Hugging Face's or Accelerate's: "), std::string::npos) << error;
  }
}

TEST(TrainerConfig, WarmupRatioIsOfTheRunsSteps) {
  const auto steps = [](const std::string& params, int64_t total) {
    ScheduleOptions schedule =
        parse_run_config("{\"train_batch_size\": 8, \"scheduler\": {\"type\": " + params + "}}", "c.json", 1)
            .engine.scheduler;
    fill_in_schedule(schedule, total);
    EXPECT_FALSE(warmup_of(schedule)->ratio);
    return warmup_of(schedule)->num_steps;
  };
  EXPECT_EQ(steps(R"("WarmupLR", "params": {"warmup_ratio": 0.06})", 1001), 61)
      << "rounded up, as in TrainingArguments.get_warmup_steps";
  EXPECT_EQ(steps(R"("WarmupCosineLR", "params": {"warmup_ratio": 0.5})", 10), 5);
  EXPECT_EQ(steps(R"("WarmupDecayLR", "params": {"warmup_ratio": 0.1, "total_num_steps": 200})", 50), 20)
      << "of the schedule's length";
  EXPECT_EQ(steps(R"("WarmupLR")", 50), 1000);
  const std::string text =
      meaning_of(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_ratio": 0.25}})");
  EXPECT_EQ(dump_resolved(parse_run_config(text, "c.json", 1)), text)
      << "not resolved yet, and the same when read again";
}

TEST(TrainerConfig, ModelAndDataAreHandedOn) {
  RunConfig run = parse_run_config(
      "{\"train_batch_size\": 8,\n\"model\": {\"type\": \"mlp\",\n\"hiden\": 3}, \"data\": {\"type\": \"d\", "
      "\"a.b\": 1}}",
      "c.json", 1);
  EXPECT_EQ(run.model.required_text("type"), "mlp");
  run.model.integer("hidden", 64, 1, 100);
  EXPECT_EQ(config_error([&] { run.model.finish(); }),
            "c.json:3: model.hiden: unknown key (did you mean \"hidden\"?), found 3 (a number); expected one "
            "of hidden, type");
  EXPECT_EQ(run.data.json()["a.b"], 1);
  EXPECT_EQ(json::parse(dump_resolved(run))["model"]["hidden"], 64);  // what was read is filled in
}

TEST(TrainerConfig, ResolvedConfigurationReadsTheSame) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/configs")) {
    if (entry.path().filename() == "schema.json") continue;
    SCOPED_TRACE(names.insert(entry.path().filename().string()).first->c_str());
    RunConfig run = load_run_config(entry.path().string(), 2, {"trainer.max_steps=null"});
    std::string text = dump_resolved(run);
    RunConfig again = parse_run_config(text, "resolved.json", 2);
    EXPECT_EQ(again.engine, run.engine);
    EXPECT_EQ(again.trainer, run.trainer);
    EXPECT_EQ(again.model.json(), run.model.resolved());
    EXPECT_EQ(dump_resolved(again), text);
    EXPECT_TRUE(again.report.warnings.empty());
  }
  for (const char* name : {"ds_config_zero2.json", "fashion_mnist.json", "gpt_110m.json", "gpt_33m.json",
                           "minimal.json", "segmentation.json", "text_classification.json"})
    EXPECT_TRUE(names.count(name)) << name;
}

TEST(TrainerConfig, ResolvedConfigurationHasEveryUsedKey) {
  json resolved =
      json::parse(dump_resolved(load_run_config(TESSERA_SOURCE_DIR "/configs/fashion_mnist.json", 2)));
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) {
    if (key.use != config::Use::kUsed || !key.for_types.empty() || key.path.find("[]") != std::string::npos)
      continue;
    std::string pointer = "/" + key.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    EXPECT_TRUE(resolved.contains(json::json_pointer(pointer))) << key.path;
  }
}

TEST(TrainerConfig, FashionMnistIsStageTwo) {
  RunConfig run = load_run_config(TESSERA_SOURCE_DIR "/configs/fashion_mnist.json", 2);
  EXPECT_TRUE(run.report.warnings.empty());
  EXPECT_EQ(run.engine.zero.stage, 2);
  EXPECT_EQ(run.engine.train_micro_batch_size_per_gpu * 2, run.engine.train_batch_size);
  EXPECT_EQ(run.trainer.name, "fashion_mnist");
  EXPECT_EQ(
      load_run_config(TESSERA_SOURCE_DIR "/configs/fashion_mnist.json", 1, {"zero_optimization.stage=3"})
          .engine.zero.stage,
      3);
}

TEST(TrainerConfig, WarnsOfAScheduleThatEndsAtNothing) {
  const auto warning = [](int64_t step_size, double gamma, const char* interval) {
    return schedule_warning(StepLrOptions{.interval = interval, .step_size = step_size, .gamma = gamma},
                            1000);
  };
  EXPECT_EQ(warning(1, 0.5, "step"),
            "scheduler.params.step_size: found 1, which counts optimizer steps: long before the last of "
            "1,000 the learning rate is 0; "
            "\"interval\": \"epoch\" counts epochs");
  EXPECT_EQ(warning(1, 0.5, "epoch"), "");
  EXPECT_EQ(warning(100, 0.5, "step"), "");
  EXPECT_EQ(warning(1, 0.999, "step"), "");
  EXPECT_EQ(schedule_warning(WarmupLrOptions{}, 1000), "");
}

TEST(TrainerConfig, SchemaIsTheTables) {
  std::string expected = config::schema_text(run_keys());
  const std::string fresh = TESSERA_BUILD_DIR "/schema.json";
  if (read_text(TESSERA_SOURCE_DIR "/configs/schema.json") != expected) {
    std::ofstream(fresh) << expected;
    FAIL() << "configs/schema.json is not what the key tables say; the right one is in " << fresh;
  }
  json schema = json::parse(expected);
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) {
    if (key.path.find("[]") != std::string::npos) continue;
    const json* at = &schema;
    for (std::stringstream path(key.path); path.good();) {
      std::string part;
      std::getline(path, part, '.');
      ASSERT_TRUE(at->at("properties").contains(part)) << key.path;
      at = &at->at("properties").at(part);
    }
    EXPECT_TRUE(at->contains("description")) << key.path;
  }
}

TEST(TrainerConfig, DocumentationIsTheTables) {
  std::set<std::string> rows;
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) rows.insert(config::doc_row(key));
  // What an engine alone takes and does nothing with, and a run gives a meaning.
  const config::KeyTable engine = config::engine_keys();
  rows.insert(config::doc_row(*engine.find_any("dataloader_drop_last")));
  std::set<std::string> documented;
  std::ifstream in(TESSERA_SOURCE_DIR "/docs/configuration.md");
  ASSERT_TRUE(in);
  for (std::string line; std::getline(in, line);)
    if (line.rfind("| `", 0) == 0) {
      EXPECT_TRUE(rows.count(line)) << "no key of the tables is documented as\n" << line;
      EXPECT_TRUE(documented.insert(line).second) << "documented twice:\n" << line;
    }
  for (const std::string& row : rows)
    EXPECT_TRUE(documented.count(row)) << "docs/configuration.md lacks\n" << row;
}

}  // namespace
}  // namespace tessera::train
