// Names and arguments of Hugging Face's TrainingArguments and of Accelerate in a run's configuration.
#include "train/task/trainer_config.h"

#include <gtest/gtest.h>

#include "tests/engine/config/config_testing.h"

namespace tessera::train {
namespace {

/// The resolved configuration, as text, of these keys and a batch size.
std::string meaning_of(const std::string& keys, const std::vector<std::string>& overrides = {}) {
  return dump_resolved(
      parse_run_config("{\"train_micro_batch_size_per_gpu\": 8" + (keys.empty() ? "" : ", " + keys) + "}",
                       "c.json", 1, overrides));
}

TEST(TrainerConfig, TakesHuggingFacesNames) {
  const std::string names =
      R"({"run_name": "r", "num_train_epochs": 2, "per_device_eval_batch_size": 3, "eval_steps": 4, "save_steps": 5,
      "metric_for_best_model": "f1", "load_best_model_at_end": false, "full_determinism": true, "tf32": true, "dataloader_num_workers": 6})";
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
  expected.tf32 = true;
  expected.dataloader_num_workers = 6;
  EXPECT_EQ(trainer, expected);
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
    // The batch size is left out if the case has its own.
    const auto dump = [](const std::string& text) {
      const std::string batch =
          text.find("batch_size") == std::string::npos ? "\"train_micro_batch_size_per_gpu\": 8" : "";
      return dump_resolved(parse_run_config(
          "{" + batch + (batch.empty() || text.empty() ? "" : ", ") + text + "}", "c.json", 1));
    };
    EXPECT_EQ(dump(arguments), dump(keys)) << arguments;
  }
  EXPECT_EQ(meaning_of("", {"learning_rate=0.5", "bf16=true"}),
            meaning_of(R"("optimizer": {"params": {"lr": 0.5}}, "torch_autocast": {"enabled": true})"));
  EXPECT_EQ(meaning_of(R"("lr_scheduler_type": "linear", "eval_strategy": "epoch")",
                       {"lr_scheduler_type=constant", "trainer.eval_every_epochs=3"}),
            meaning_of(R"("trainer": {"eval_every_epochs": 3})"))
      << "the command line wins";
}

TEST(TrainerConfig, TakesTheTrainersArgumentsOfHuggingFace) {
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

}  // namespace
}  // namespace tessera::train
