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

TEST(TrainerConfig, TakesArgumentsThatAreNamesOfKeys) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("learning_rate": 3e-4, "weight_decay": 0.1, "adam_epsilon": 1e-7)",
       R"("optimizer": {"params": {"lr": 3e-4, "weight_decay": 0.1, "eps": 1e-7}})"},
      {R"("optim": "adamw_torch")", R"("optimizer": {"type": "AdamW"})"},
      {R"("logging_steps": 50, "save_total_limit": 2, "max_grad_norm": 0.5)",
       R"("steps_per_print": 50, "checkpoint": {"keep_last": 2}, "gradient_clipping": 0.5)"},
      {R"("trainer": {"num_train_epochs": 4, "learning_rate": 1e-5, "output_dir": "o", "seed": 7})",
       R"("trainer": {"epochs": 4, "output_dir": "o"}, "seed": 7, "optimizer": {"params": {"lr": 1e-5}})"},
      {R"("trainer": {"ddp_timeout": 60, "gradient_accumulation_steps": 2})",
       R"("gradient_accumulation_steps": 2, "comm": {"timeout_s": 60})"},
  };
  for (const auto& [arguments, keys] : cases) EXPECT_EQ(meaning_of(arguments), meaning_of(keys)) << arguments;
  EXPECT_EQ(
      dump_resolved(parse_run_config(
          R"({"per_device_train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"})", "c.json", 1)),
      meaning_of(""));
  EXPECT_EQ(meaning_of("", {"learning_rate=0.5"}), meaning_of(R"("optimizer": {"params": {"lr": 0.5}})"));
}

TEST(TrainerConfig, ArgumentsThatCannotBeTaken) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("learning_rate": 1, "optimizer": {"params": {"lr": 2}})",
       R"(optimizer.params.lr: is also given under its other name "learning_rate"; expected one of the two)"},
      {R"("warmup_steps": 10)",
       "warmup_steps: found 10 (a number), an argument of Hugging Face's or Accelerate's: here it is "
       "scheduler.params.warmup_num_steps (docs/coming_from.md, Its linear schedule)"},
      {R"("trainer": {"fp16": true})",
       "trainer.fp16: found true (a boolean), an argument of Hugging Face's or Accelerate's: here it is "
       R"("torch_autocast": {"enabled": true, "dtype": "bf16"}, or "fp16", at the top; without it nothing is cast)"},
      {R"("bf16": true)",
       "bf16: found true (a boolean); expected a section {…}; as an argument of Hugging Face's: here it is "
       R"("torch_autocast": {"enabled": true, "dtype": "bf16"}, or "fp16", at the top; without it nothing is cast)"},
      {R"("scheduler": {"type": "WarmupLR", "params": {"warmup_ratio": 0.1, "warmup_num_steps": 5}})",
       "scheduler.params.warmup_ratio: found 0.1 beside warmup_num_steps; expected one of the two"},
  };
  for (const auto& [keys, message] : cases)
    EXPECT_EQ(config_error([&] { meaning_of(keys); }), "c.json:1: " + message) << keys;
  for (const char* name :
       {"adam_beta2", "deepspeed", "eval_strategy", "greater_is_better", "hub_token", "logging_strategy",
        "lr_scheduler_type", "mixed_precision", "report_to", "resume_from_checkpoint", "save_strategy",
        "torch_compile", "use_cpu", "warmup_ratio"}) {
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
