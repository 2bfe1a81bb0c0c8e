// From JSON to EngineConfig and back: values, defaults, "auto", other names, optimizers and schedulers.
#include "engine/config/parse.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/engine/config/config_testing.h"

namespace tessera {
namespace {

using nlohmann::json;
using Params = std::map<std::string, double>;

/// With every default spelled out: the tests hold the structs to them.
const AdamWOptions kAdamW{
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0, .bias_correction = true};

void expect_round_trip(const EngineConfig& config, int world_size) {
  std::string text = dump_resolved(config);
  EngineConfig again = parse_engine_config(text, {.world_size = world_size}, "resolved");
  EXPECT_EQ(again, config) << text;
  EXPECT_EQ(dump_resolved(again), text);
}

TEST(ConfigParse, DefaultsAreTheStructsOwn) {
  EngineConfig expected;
  expected.train_batch_size = 8;
  expected.train_micro_batch_size_per_gpu = 8;
  expected.optimizer.options = kAdamW;
  EXPECT_EQ(parse_keys("\"seed\": 42"), expected);
}

TEST(ConfigParse, EveryKeyReachesItsField) {
  EngineConfig config = parse_engine_config(R"({
      "train_batch_size": 64, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "communication_data_type": "bf16",
      "prescale_gradients": true, "gradient_predivide_factor": 2, "steps_per_print": null, "wall_clock_breakdown": true, "memory_breakdown": true, "seed": 7,
      "fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4,
               "consecutive_hysteresis": true, "min_loss_scale": 0.5},
      "torch_autocast": {"enabled": false, "dtype": "torch.float16"}, "data_types": {"grad_accum_dtype": "half"},
      "zero_optimization": {"stage": 3, "unit_numel": 1e6, "reduce_bucket_size": 5e7, "allgather_bucket_size": 6e7, "overlap_comm": false,
          "reduce_each_micro_step": true, "communication_buffers": 5, "stage3_prefetch_bucket_size": 1, "stage3_param_persistence_threshold": 2,
          "stage3_max_live_parameters": 3}})",
                                            {.world_size = 2});
  EXPECT_EQ(config.train_batch_size, 64);
  EXPECT_EQ(config.train_micro_batch_size_per_gpu, 8);
  EXPECT_EQ(config.gradient_accumulation_steps, 4);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_EQ(config.communication_dtype, DType::kBFloat16);
  EXPECT_TRUE(config.prescale_gradients);
  EXPECT_EQ(config.gradient_predivide_factor, 2);
  EXPECT_EQ(config.steps_per_print, 0);
  EXPECT_TRUE(config.wall_clock_breakdown);
  EXPECT_TRUE(config.memory_breakdown);
  EXPECT_EQ(config.seed, 7);
  EXPECT_EQ(config.fp16, (Fp16Config{true, false, 128, 12, 500, 4, true, 0.5}));
  EXPECT_EQ(config.autocast, (AutocastConfig{false, DType::kFloat16}));
  EXPECT_EQ(config.grad_accum_dtype, DType::kFloat16);
  EXPECT_EQ(config.zero, (ZeroConfig{3, 1'000'000, 50'000'000, 60'000'000, false, true, 5, 1, 2, 3}));
  EXPECT_EQ(config.compute_dtype(), DType::kFloat16);
  expect_round_trip(config, 2);
}

TEST(ConfigParse, OtherNamesAndOldForms) {
  config::ConfigReport report;
  EngineConfig config = parse_keys(R"("bfloat16": {"enabled": true}, "gradient_accumulation_dtype": "float32",
      "zero_optimization": {"stage": 3, "prefetch_bucket_size": 11, "param_persistence_threshold": 12, "max_live_parameters": 13})",
                                   &report);
  EXPECT_TRUE(config.bf16);
  EXPECT_EQ(config.grad_accum_dtype, DType::kFloat32);
  EXPECT_EQ(config.zero.prefetch_bucket_size, 11);
  EXPECT_EQ(config.zero.param_persistence_threshold, 12);
  EXPECT_EQ(config.zero.max_live_parameters, 13);
  EXPECT_TRUE(report.warnings.empty());
  EXPECT_EQ(parse_keys("\"zero_optimization\": true").zero.stage, 1);
  EXPECT_EQ(parse_keys("\"zero_optimization\": false").zero.stage, 0);
  config = parse_keys(R"("zero_optimization": {"stage": 3, "cpu_offload": true, "cpu_offload_param": true,
      "cpu_offload_use_pin_memory": true})");
  EXPECT_EQ(config.zero.offload_optimizer.device, "cpu");
  EXPECT_TRUE(config.zero.offload_optimizer.pin_memory);
  EXPECT_EQ(config.zero.offload_param.device, "cpu");
  EXPECT_TRUE(config.zero.offload_param.pin_memory);
  const auto offload = [](const char* zero, std::vector<std::string> overrides = {}) {
    return parse_engine_config(
               str(R"({"train_batch_size": 2, "zero_optimization": {"stage": 2, )", zero, "}}"),
               {.overrides = overrides}, "c.json")
        .zero.offload_optimizer;
  };
  EXPECT_EQ(offload(R"("cpu_offload": false, "offload_optimizer": {"device": "cpu"})").device, "cpu");
  EXPECT_EQ(offload(R"("cpu_offload": true, "offload_optimizer": null)").device, "cpu");
  EXPECT_EQ(offload(R"("cpu_offload": true, "offload_optimizer": {"buffer_count": 7})").buffer_count, 7);
  EXPECT_EQ(offload(R"("cpu_offload": true)", {"zero_optimization.cpu_offload=false"}).device, "none");
  EXPECT_EQ(offload(R"("cpu_offload": true)", {"zero_optimization.cpu_offload=true"}).device, "cpu");
  EXPECT_TRUE(
      offload(R"("cpu_offload": true)", {"zero_optimization.cpu_offload_use_pin_memory=true"}).pin_memory);
  EXPECT_TRUE(
      offload(R"("cpu_offload_use_pin_memory": true, "offload_optimizer": {"device": "cpu"})").pin_memory);
}

TEST(ConfigParse, AutoIsResolvedAndListed) {
  config::ConfigReport report;
  EngineConfig config = load_engine_config(TESSERA_SOURCE_DIR "/configs/ds_config_zero2.json",
                                           {.world_size = 4, .report = &report});
  EXPECT_EQ(config.train_batch_size, 32);
  EXPECT_EQ(config.train_micro_batch_size_per_gpu, 8);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_FALSE(config.bf16);
  EXPECT_EQ(std::get<AdamWOptions>(config.optimizer.options).lr, 5e-5);
  auto& schedule = std::get<WarmupDecayLrOptions>(config.scheduler);
  EXPECT_EQ(schedule.total_num_steps, std::nullopt);
  EXPECT_TRUE(schedule.warmup_max_lr.empty());  // the optimizer's
  EXPECT_EQ(schedule.warmup.num_steps, 0);
  EXPECT_EQ(config.zero.reduce_bucket_size, 200'000'000);
  EXPECT_EQ(report.warnings.size(), 1u);
  const std::vector<std::string> resolved = {
      "train_batch_size: \"auto\" is 32",
      "train_micro_batch_size_per_gpu: \"auto\" is 8",
      "gradient_accumulation_steps: \"auto\" is 1",
      "gradient_clipping: \"auto\" is 1.0",
      "bf16.enabled: \"auto\" is false",
      "optimizer.params.lr: \"auto\" is 5e-05",
      "optimizer.params.betas: \"auto\" is [0.9, 0.999]",
      "optimizer.params.eps: \"auto\" is 1e-08",
      "optimizer.params.weight_decay: \"auto\" is 0.0",
      "scheduler.params.total_num_steps: \"auto\" is the steps of the run",
      "scheduler.params.warmup_min_lr: \"auto\" is 0.0",
      "scheduler.params.warmup_max_lr: \"auto\" is the optimizer's lr",
      "scheduler.params.warmup_num_steps: \"auto\" is 0"};
  EXPECT_EQ(report.resolved, resolved);
  expect_round_trip(config, 4);
  schedule.total_num_steps = 500;
  expect_round_trip(config, 4);
}

TEST(ConfigParse, OptimizersAndTheirDefaults) {
  AdamWOptions torch_adamw = kAdamW;
  torch_adamw.weight_decay = 0.01;
  const AdamOptions adam{
      .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0, .bias_correction = true};
  const LambOptions lamb{.lr = 1e-3,
                         .beta1 = 0.9,
                         .beta2 = 0.999,
                         .eps = 1e-8,
                         .weight_decay = 0,
                         .bias_correction = true,
                         .max_coeff = 10,
                         .min_coeff = 0.01};
  const LionOptions lion{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .weight_decay = 0};
  const SGDOptions sgd{.lr = 1e-3, .weight_decay = 0, .momentum = 0, .dampening = 0, .nesterov = false};
  const AdagradOptions adagrad{.lr = 1e-2, .eps = 1e-10, .weight_decay = 0, .lr_decay = 0};
  const std::vector<std::pair<std::string, OptimizerOptions>> cases = {
      {R"({"type": "Adam"})", kAdamW},  // DeepSpeed's: adam_w_mode is true
      {R"({"type": "adam", "params": {"adam_w_mode": false}})", adam},
      {R"({"type": "FusedAdam", "params": {"adam_w_mode": false, "torch_adam": true}})", adam},
      {R"({"type": "DeepSpeedCPUAdam"})", kAdamW},
      {R"({"type": "ADAMW", "params": {"adam_w_mode": false}})", kAdamW},
      {R"({"type": "AdamW", "params": {"torch_adam": true}})", torch_adamw},
      {R"({"type": "AdamW", "params": {"torch_adam": true, "weight_decay": 0}})", kAdamW},
      {R"({"type": null})", kAdamW},
      {R"({"type": "adamw", "params": {"amsgrad": true, "maximize": true}})",
       AdamWOptions{.weight_decay = 0, .amsgrad = true, .maximize = true}},
      {R"({"type": "rmsprop"})", RMSpropOptions{}},
      {R"({"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9, "momentum": 0.5, "centered": true}})",
       RMSpropOptions{.lr = 0.1, .alpha = 0.9, .momentum = 0.5, .centered = true}},
      {R"({"type": "Lamb"})", lamb},
      {R"({"type": "lion"})", lion},
      {R"({"type": "SGD"})", sgd},
      {R"({"type": "adagrad"})", adagrad},
      {R"({"type": "muon"})", MuonOptions{}},
      {R"({"type": "Muon", "params": {"lr": 0.5, "adam_lr": 0.25, "fp32_optimizer_states": true}})",
       MuonOptions{.lr = 0.5, .adam_lr_ratio = 0.5}},
      {R"({"type": "Muon", "params": {"lr": 0.5, "muon_lr": 0.25}})",
       MuonOptions{.lr = 0.25, .adam_lr_ratio = 2}},
  };
  for (const auto& [written, options] : cases) {
    EngineConfig config = parse_keys("\"optimizer\": " + written);
    EXPECT_EQ(type_of(config.optimizer.options), type_of(options)) << written;
    EXPECT_EQ(config.optimizer.options, options) << written;
    expect_round_trip(config, 1);
  }
}

TEST(ConfigParse, ParamGroups) {
  EngineConfig config = parse_keys(R"("optimizer": {"type": "SGD", "params": {"momentum": 0.9},
      "param_groups": [{"match": "*.bias", "weight_decay": 0, "lr": "auto"}, {"match": ["a", "b*"], "nesterov": true}]})");
  ASSERT_EQ(config.optimizer.param_groups.size(), 2u);
  EXPECT_EQ(config.optimizer.param_groups[0],
            (ParamGroupConfig{{"*.bias"}, {{"weight_decay", 0}, {"lr", 5e-5}}}));
  EXPECT_EQ(config.optimizer.param_groups[1], (ParamGroupConfig{{"a", "b*"}, {{"nesterov", 1}}}));
  expect_round_trip(config, 1);
  config = parse_keys(
      R"("optimizer": {"param_groups": [{"match": "x", "betas": [0.5, 0.6]}]}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}})");
  EXPECT_EQ(config.optimizer.param_groups[0].params, (Params{{"beta1", 0.5}, {"beta2", 0.6}}));
  EXPECT_EQ(std::get<WarmupLrOptions>(config.scheduler).warmup_max_lr, (std::vector<double>{1, 2}));
  expect_round_trip(config, 1);
}

TEST(ConfigParse, SchedulersAndTheirDefaults) {
  const WarmupOptions warmup{.num_steps = 1000, .ratio = std::nullopt, .type = "log"};
  const std::vector<std::pair<std::string, ScheduleOptions>> cases = {
      {R"({"type": "WarmupLR"})",
       WarmupLrOptions{.warmup_min_lr = {0}, .warmup_max_lr = {}, .warmup = warmup}},
      {R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 5e3}})",
       WarmupDecayLrOptions{
           .total_num_steps = 5000, .warmup_min_lr = {0}, .warmup_max_lr = {1e-3}, .warmup = warmup}},
      {R"({"type": "warmupcosinelr"})",
       WarmupCosineLrOptions{
           .total_num_steps = std::nullopt, .warmup_min_ratio = 0, .cos_min_ratio = 1e-4, .warmup = warmup}},
      {R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}})",
       OneCycleOptions{.cycle_min_lr = {0.1},
                       .cycle_max_lr = {1},
                       .decay_lr_rate = 0,
                       .cycle_first_step_size = 2000,
                       .cycle_second_step_size = std::nullopt,
                       .cycle_first_stair_count = 0,
                       .cycle_second_stair_count = std::nullopt,
                       .decay_step_size = 0,
                       .cycle_momentum = true,
                       .cycle_min_mom = {0.8},
                       .cycle_max_mom = {0.9},
                       .decay_mom_rate = 0}},
      {R"({"type": "LRRangeTest", "params": {"last_batch_iteration": -1}})",
       LrRangeTestOptions{.lr_range_test_min_lr = {1e-3},
                          .lr_range_test_step_size = 2000,
                          .lr_range_test_step_rate = 1,
                          .lr_range_test_staircase = false}},
      {R"({"type": "StepLR", "params": {"step_size": 3, "interval": "step"}})",
       StepLrOptions{.interval = "step", .step_size = 3, .gamma = 0.1}},
      {R"({"type": "CosineAnnealingLR", "params": {"T_max": 10}})",
       CosineAnnealingLrOptions{.interval = "step", .T_max = 10, .eta_min = 0}},
  };
  for (const auto& [written, schedule] : cases) {
    EngineConfig config = parse_keys("\"scheduler\": " + written);
    EXPECT_EQ(type_of(config.scheduler), type_of(schedule)) << written;
    EXPECT_EQ(config.scheduler, schedule) << written;
    expect_round_trip(config, 1);
  }
  EXPECT_EQ(
      std::get<WarmupLrOptions>(
          parse_keys(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_type": "LINEAR"}})").scheduler)
          .warmup.type,
      "linear");
  EXPECT_EQ(std::get<StepLrOptions>(
                parse_keys(R"("scheduler": {"type": "StepLR", "params": {"step_size": 3}})").scheduler)
                .interval,
            "step");
  EXPECT_EQ(parse_keys(R"("scheduler": {"type": null})").scheduler, ScheduleOptions(ConstantLrOptions{}));
}

TEST(ConfigParse, SectionsOfTheCallersOwn) {
  EXPECT_EQ(config_error([] {
              parse_engine_config(R"({"train_batch_size": 8, "mine": {"x": [1]}})",
                                  {.other_sections = {"mine"}});
            }),
            "");
  EXPECT_NE(config_error([] {
              parse_engine_config(R"({"train_batch_size": 8, "mine": 3})", {.other_sections = {"mine"}});
            }),
            "");
}

}  // namespace
}  // namespace tessera
