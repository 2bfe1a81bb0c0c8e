// Exact messages for invalid configurations; keys without effect; suggestions.
#include "engine/config/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>

#include "core/str.h"
#include "engine/config/arguments.h"
#include "engine/config/document/suggest.h"
#include "engine/config/parse.h"
#include "tests/engine/config/config_testing.h"

namespace tessera {
namespace {

TEST(ConfigCheck, WrongValues) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("seed": "x")", "seed: found \"x\" (a string); expected an integer from 0 to 9e15"},
      {R"("seed": 1.5)", "seed: found 1.5 (a number); expected an integer from 0 to 9e15"},
      {R"("seed": true)", "seed: found true (a boolean); expected an integer from 0 to 9e15"},
      {R"("seed": null)", "seed: found null; expected an integer from 0 to 9e15"},
      {R"("seed": 18446744073709551615)",
       "seed: found 18446744073709551615 (a number); expected an integer from 0 to 9e15"},
      {R"("wall_clock_breakdown": 1)", "wall_clock_breakdown: found 1 (a number); expected true or false"},
      {R"("gradient_clipping": -1)",
       "gradient_clipping: found -1 (a number); expected a number of at least 0, or \"auto\""},
      {R"("gradient_predivide_factor": 0)",
       "gradient_predivide_factor: found 0 (a number); expected a number above 0"},
      {R"("zero_optimization": {"stage": 4})",
       "zero_optimization.stage: found 4 (a number); expected an integer from 0 to 3, or \"auto\""},
      {R"("zero_optimization": {"stage": "two"})",
       "zero_optimization.stage: found \"two\" (a string); expected an integer from 0 to 3, or \"auto\""},
      {R"("zero_optimization": [])", "zero_optimization: found [] (a list); expected a section {…}"},
      {R"("optimizer": "Adam")", "optimizer: found \"Adam\" (a string); expected a section {…}"},
      {R"("optimizer": {"type": "AdmW"})",
       "optimizer.type: found \"AdmW\" (a string); expected one of \"Adam\", \"AdamW\", \"SGD\", "
       "\"Adagrad\", \"RMSprop\", \"Lion\", \"LAMB\", \"Muon\", \"Adafactor\", \"AdamW8bit\", or null (did "
       "you mean \"AdamW\"?)"},
      {R"("optimizer": {"params": {"lr": 1}, "type": "OneBitAdam"})",
       "optimizer.type: found \"OneBitAdam\" (a string), which Tessera does not have: the 1-bit optimizers "
       "compress what is sent; expected one of "
       "\"Adam\", \"AdamW\", \"SGD\", \"Adagrad\", \"RMSprop\", \"Lion\", \"LAMB\", \"Muon\", \"Adafactor\", "
       "\"AdamW8bit\", or null"},
      {R"("optimizer": {"type": "Adam", "params": {"betas": [0.9]}})",
       "optimizer.params.betas: found [0.9] (a list); expected a list of two numbers, each from 0 to below "
       "1, or \"auto\""},
      {R"("optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}})",
       "optimizer.params.betas: found [0.9,1] (a list); expected a list of two numbers, each from 0 to below "
       "1, or \"auto\""},
      {R"("optimizer": {"type": "SGD", "params": {"nesterov": true}})",
       "optimizer.params.nesterov: found true with momentum 0 and dampening 0; expected a momentum above 0 "
       "and dampening 0"},
      {R"("optimizer": {"type": "LAMB", "params": {"min_coeff": 2, "max_coeff": 1}})",
       "optimizer.params.min_coeff: found 2, more than max_coeff 1; expected at most that"},
      {R"("optimizer": {"param_groups": [{"lr": 1}]})",
       "optimizer.param_groups[0].match: is missing; expected a string or a list of strings"},
      {R"("optimizer": {"param_groups": [{"match": []}]})",
       "optimizer.param_groups[0].match: found [] (a list); expected a string or a list of strings"},
      {R"("optimizer": {"param_groups": [3]})",
       "optimizer.param_groups: found [3] (a list); expected a list of sections [{…}, …]"},
      {R"("scheduler": {"type": "OneCycle"})",
       "scheduler.params.cycle_min_lr: is missing, and OneCycle needs it; expected a number of at least 0, "
       "or a list with one for every param group\n"
       "c.json:1: scheduler.params.cycle_max_lr: is missing, and OneCycle needs it; expected a number of at "
       "least 0, or a list with one for every param group"},
      {R"("scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1]}})",
       "scheduler.params.warmup_min_lr: found [0,1] (a list) with 2 values; expected one number, or 1: one "
       "for the parameters in no group, then "
       "one for each of optimizer.param_groups"},
      {R"("fp16": {"enabled": true}, "bf16": {"enabled": true})",
       "bf16.enabled: found true beside fp16.enabled true; expected one of the two"},
      {R"("torch_autocast": {"enabled": true}, "bf16": {"enabled": true})",
       "torch_autocast.enabled: found true beside bf16.enabled true; expected one of the two (autocast keeps "
       "the model in fp32)"},
      {R"("data_types": {"grad_accum_dtype": "fp16"}, "bf16": {"enabled": true})",
       "data_types.grad_accum_dtype: found \"fp16\" with a model that computes in bf16; expected \"fp32\" or "
       "\"bf16\""},
      {R"("communication_data_type": "int8")",
       "communication_data_type: found \"int8\" (a string); expected one of \"fp32\", \"bf16\", \"fp16\", or "
       "null"},
  };
  for (const auto& [keys, message] : cases) EXPECT_EQ(error_for(keys), "c.json:1: " + message) << keys;
}

TEST(ConfigCheck, UnknownKeys) {
  const auto top = [](const std::string& nearest) {
    return "; expected one of " + nearest + ", … (all 29 are in docs/configuration.md)";
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("sede": 1)", "sede: unknown key (did you mean \"seed\"?), found 1 (a number)" +
                           top("seed, scheduler, prescale_gradients, steps_per_print, dump_state")},
      {R"("stage": 1)", "stage: unknown key (did you mean \"zero_optimization.stage\"?), found 1 (a number)" +
                            top("dump_state, data_types, prescale_gradients, optimizer, scheduler")},
      {R"("qqqq": [1, 2])",
       "qqqq: unknown key, found [1,2] (a list)" +
           top("train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, "
               "gradient_clipping, communication_data_type")},
      {R"("modle": {})", "modle: unknown key, found {} (a section)" +
                             top("profiler, scheduler, mlflow, flops_profiler, dump_state")},
      {R"("fp16": {"enable": true})",
       "fp16.enable: unknown key (did you mean \"enabled\"?), found true (a boolean); expected one of "
       "enabled, auto_cast, loss_scale, initial_scale_power, "
       "loss_scale_window, hysteresis, consecutive_hysteresis, min_loss_scale"},
      {R"("zero_optimization.stage": 1)",
       "zero_optimization.stage: unknown key (found 1 (a number)); nested keys are written as "
       "{\"zero_optimization\": {\"stage\": …}}"},
      {R"("optimizer": {"type": "AdamW", "params": {"momentum": 0.9}})",
       "optimizer.params.momentum: AdamW has no \"momentum\" (found 0.9 (a number)), SGD and RMSprop "
       "have; expected one of betas, torch_adam, bias_correction, eps, amsgrad, … (all 9 are in "
       "docs/configuration.md)"},
      {R"("optimizer": {"param_groups": [{"match": "a", "weight_dekay": 0}]})",
       "optimizer.param_groups[0].weight_dekay: unknown key (did you mean \"weight_decay\"?), found 0 (a "
       "number); expected one of weight_decay, betas, amsgrad, match, parameters, … (all 9 are in "
       "docs/configuration.md)"},
      {R"("scheduler": {"params": {"warmup_num_steps": 5}})",
       "scheduler.params.warmup_num_steps: found 5 (a number), but scheduler.type is not given; expected "
       "scheduler.type: one of \"WarmupLR\", "
       "\"WarmupDecayLR\", \"WarmupCosineLR\", \"OneCycle\", \"LRRangeTest\", \"StepLR\", "
       "\"CosineAnnealingLR\", or null"},
  };
  for (const auto& [keys, message] : cases) EXPECT_EQ(error_for(keys), "c.json:1: " + message) << keys;
}

TEST(ConfigCheck, OfVeryManyMistakesTheFirstAreTold) {
  const auto lines_of = [](int num_keys) {
    std::string text = "{";
    for (int i = 0; i < num_keys; ++i) text += str(i ? ",\n" : "\n", "\"kei", i, "\": 1");
    const std::string error = config_error([&] { parse_engine_config(text + "\n}", {}, "c.json"); });
    std::vector<std::string> lines;
    std::istringstream stream(error);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  };
  EXPECT_EQ(lines_of(20).size(), 20u);
  EXPECT_EQ(lines_of(21).size(), 21u);
  EXPECT_EQ(lines_of(21).back(), "… and 1 more errors");
  const auto start = std::chrono::steady_clock::now();
  const auto lines = lines_of(99'000);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
  ASSERT_EQ(lines.size(), 21u);
  EXPECT_EQ(lines[20], "… and at least 180 more errors");
  EXPECT_THAT(lines_of(100'001).front(), ::testing::HasSubstr("more than 100000 values"));
}

TEST(ConfigCheck, TellsAllMistakesOfAFileInItsOrder) {
  const auto error = [](const std::string& text, const std::vector<std::string>& overrides = {}) {
    return config_error([&] { parse_engine_config(text, {.overrides = overrides}, "c.json"); });
  };
  const std::string stage = "found 9 (a number); expected an integer from 0 to 3, or \"auto\"";
  EXPECT_EQ(error("{\n\"zero_optimization\": {\n\"stage\": 9},\n\"pipeline\": {\"stages\": 2},\n\"bf16\": "
                  "{\n\"enabld\": true,\n\"enabled\": 1},\n\"seed\": -1}",
                  {"fp16.enabled=3"}),
            "c.json:3: zero_optimization.stage: " + stage +
                "\nc.json:4: pipeline: found {\"stages\":2} (a section), which Tessera does not do: there is "
                "no pipeline parallelism; expected it to be left out"
                "\nc.json:6: bf16.enabld: unknown key (did you mean \"enabled\"?), found true (a boolean); "
                "expected one of enabled, auto_cast"
                "\nc.json:7: bf16.enabled: found 1 (a number); expected true or false, or \"auto\""
                "\nc.json:8: seed: found -1 (a number); expected an integer from 0 to 9e15"
                "\n--set: fp16.enabled: found 3 (a number); expected true or false, or \"auto\"");
  // Keys that contradict each other are reported together, too.
  EXPECT_EQ(error("{\n\"mlflow\": {\"tracking_uri\": \"file:x\"},\n\"fp16\": {\"enabled\": true},\n\"bf16\": "
                  "{\"enabled\": true}}"),
            "c.json:2: mlflow.tracking_uri: found \"file:x\" (a string); expected the address of a server, "
            "http://… or https://…"
            "\nc.json:4: bf16.enabled: found true beside fp16.enabled true; expected one of the two"
            "\nc.json: neither train_batch_size nor train_micro_batch_size_per_gpu is given; expected at "
            "least one of them");
  // No follow-up errors: none about the parameters of an unknown optimizer.
  EXPECT_EQ(
      error_for(
          R"("optimizer": {"type": "Adan", "params": {"lr": 1}, "param_groups": [{"match": "a", "lr": 2}]})"),
      "c.json:1: optimizer.type: found \"Adan\" (a string); expected one of \"Adam\", \"AdamW\", \"SGD\", "
      "\"Adagrad\", \"RMSprop\", \"Lion\", \"LAMB\", \"Muon\", \"Adafactor\", \"AdamW8bit\", or null "
      "(did you mean \"Adam\"?)");
}

TEST(ConfigCheck, SaysWhereOthersArgumentsAreSaidHere) {
  EXPECT_EQ(error_for(R"("comm": {"backend": "gloo"})"),
            "c.json:1: comm: found {\"backend\":\"gloo\"} (a section), a section of `tessera train` that a "
            "program does not have: it gives "
            "backend and time limits to tessera.comm.init_distributed() before initialize(), in C++ to "
            "comm::init()");
  EXPECT_NE(error_for(R"("trainer": {"epochs": 2})").find("a section of `tessera train`"), std::string::npos);
  EXPECT_EQ(error_for(R"("resume_from_checkpoint": true)"),
            "c.json:1: resume_from_checkpoint: found true (a boolean), an argument of Hugging Face's or "
            "Accelerate's: here it is --resume, or --resume TAG, on "
            "the command line");
  for (const char* name :
       {"deepspeed", "do_train", "num_processes", "push_to_hub", "gradient_checkpointing", "zero_stage"}) {
    EXPECT_NE(error_for(str("\"", name, "\": 1")).find(config::instead_of_argument(name)), std::string::npos)
        << name;
    EXPECT_LT(error_for(str("\"", name, "\": 1")).size(), 260u) << name;
  }
}

TEST(ConfigCheck, RefusedByNameUnlessTheyAskForNothing) {
  EXPECT_EQ(error_for(R"("amp": {"enabled": true})"),
            "c.json:1: amp: found {\"enabled\":true} (a section), which Tessera does not do: Apex AMP; use "
            "`bf16`, `fp16` or `torch_autocast`; expected it to be left out, or {\"enabled\": false}");
  EXPECT_EQ(
      error_for(R"("sequence_parallel_size": 2)"),
      "c.json:1: sequence_parallel_size: found 2 (a number), which Tessera does not do: the sequence is "
      "not split over ranks; expected it to be left out, or 1");
  EXPECT_EQ(error_for(R"("compression_training": {"x": 1})"),
            "c.json:1: compression_training: found {\"x\":1} (a section), which Tessera does not do: the "
            "model is trained as it is; expected it to be left out");
  EXPECT_EQ(error_for(R"("amp": {"enabeld": true})"),
            "c.json:1: amp.enabeld: unknown key (did you mean \"enabled\"?), found true (a boolean)");
  const std::vector<std::string> refused = {R"("amp": {"enabled": true})",
                                            R"("elasticity": {"enabled": true})",
                                            R"("autotuning": {"enabled": true})",
                                            R"("pipeline": {"stages": 2})",
                                            R"("sparse_attention": {"mode": "fixed"})",
                                            R"("tensor_parallel": {"autotp_size": 2})",
                                            R"("compile": {"deepcompile": true})",
                                            R"("bf16": {"bf16_master_weights_and_grads": true})",
                                            R"("fp16": {"fp16_master_weights_and_grads": true})",
                                            R"("optimizer": {"type": "LAMB", "params": {"amsgrad": true}})",
                                            R"("optimizer": {"params": {"freeze_step": 3}})",
                                            R"("optimizer": {"params": {"max_grad_norm": 1.0}})"};
  for (const std::string& keys : refused)
    EXPECT_NE(error_for(keys).find("which Tessera does not do"), std::string::npos)
        << keys << error_for(keys);
  for (const char* key :
       {"zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"})
    EXPECT_NE(error_for("\"zero_optimization\": {\"" + std::string(key) + "\": true}").find(key),
              std::string::npos);

  config::ConfigReport report;
  parse_engine_config(
      R"({"train_batch_size": 8, "amp": {"enabled": false, "opt_level": "O1"}, "elasticity": {}, "wandb": null,
      "sparse_gradients": false, "gradient_allreduce_op": "mean", "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": false},
      "optimizer": {"type": "Lion", "params": {"maximize": false, "max_grad_norm": 0.0}},
      "zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1, "zenflow": null, "offload_param": {"device": "none"}, "offload_optimizer": null,
      "zero_quantized_weights": false}})",
      {.report = &report});
  EXPECT_TRUE(report.warnings.empty()) << report.warnings[0];
}

TEST(ConfigCheck, KeysWithoutEffectGiveOneWarning) {
  config::ConfigReport report;
  parse_engine_config(
      R"({"train_batch_size": 8, "zero_allow_untested_optimizer": true, "flops_profiler": {"enabled": false}, "comms_logger": {"enabled": true},
      "activation_checkpointing": {"partition_activations": true}, "wandb": {"enabled": true, "project": "p"}, "comet": {"enabled": true},
      "zero_optimization": {"contiguous_gradients": true, "sub_group_size": 1e12, "max_reuse_distance": 1e9}})",
      {.report = &report}, "c.json");
  ASSERT_EQ(report.warnings.size(), 1u);
  EXPECT_EQ(report.warnings[0],
            "c.json: these DeepSpeed keys have no effect in Tessera: comet, comms_logger, wandb, "
            "zero_allow_untested_optimizer, activation_checkpointing.partition_activations, "
            "zero_optimization.contiguous_gradients, "
            "zero_optimization.stage3_max_reuse_distance");
  EXPECT_EQ(error_for(R"("dump_state": 1)"),
            "c.json:1: dump_state: found 1 (a number); expected true or false");
}

TEST(ConfigCheck, SavedTensorsOnDiskNeedAFolder) {
  EXPECT_EQ(
      error_for(R"("activation_checkpointing": {"policy": "offload"})"),
      "c.json:1: activation_checkpointing.nvme_path: is missing, and policy \"offload\" needs it; expected "
      "a folder on the disk to use");
}

TEST(ConfigCheck, StateOnDiskNeedsAFolderAndParametersStage3) {
  EXPECT_EQ(error_for(R"("zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}})"),
            "c.json:1: zero_optimization.offload_optimizer.nvme_path: is missing, and device \"nvme\" needs "
            "it; expected a folder on the disk to use");
  EXPECT_EQ(
      error_for(
          R"("zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}})"),
      "c.json:1: zero_optimization.offload_param.device: found \"nvme\" at stage 2; expected stage 3, "
      "which shards parameters");
  EXPECT_EQ(error_for(R"("zero_optimization": {"stage": 3, "offload_param": {"device": "ssd"}})"),
            "c.json:1: zero_optimization.offload_param.device: found \"ssd\" (a string); expected one of "
            "\"none\", \"cpu\", \"nvme\", or \"auto\"");
}

// As in files of LLaMA-Factory, LLaVA, trlx and others.
TEST(ConfigCheck, CommentsAndOldKeysAreTakenWithTheSameWarning) {
  config::ConfigReport report;
  parse_engine_config(
      R"({"train_batch_size": 8, "_comment": "from the wiki", "monitor_config": {"enabled": true}, "comms_config": {"verbose": false},
      "cuda_visible_devices": "0,1", "disable_python_gc": true, "compute_grad_norm": false, "parameter_alignment": 128,
      "fp16": {"enabled": true, "opt_level": "O2", "fp16_scale_tolerance": 0.25, "_why": 1},
      "data_types": {"keep_in_fp32_modules": ["norm"]}})",
      {.report = &report}, "c.json");
  ASSERT_EQ(report.warnings.size(), 1u);
  for (const char* key : {"_comment", "monitor_config", "comms_config", "cuda_visible_devices",
                          "disable_python_gc", "compute_grad_norm", "parameter_alignment", "fp16.opt_level",
                          "fp16.fp16_scale_tolerance", "fp16._why", "data_types.keep_in_fp32_modules"})
    EXPECT_NE(report.warnings[0].find(key), std::string::npos) << key;
}

TEST(ConfigCheck, DevicesMayBeNumbersTextsOrAListOfThem) {
  for (const char* value : {"0", "\"0,1\"", "[0, 1]", "[\"GPU-8f\", 1]"}) {
    config::ConfigReport report;
    parse_engine_config(str(R"({"train_batch_size": 8, "cuda_visible_devices": )", value, "}"),
                        {.report = &report}, "c.json");
    ASSERT_EQ(report.warnings.size(), 1u) << value;
    EXPECT_NE(report.warnings[0].find("cuda_visible_devices"), std::string::npos) << value;
  }
  EXPECT_EQ(
      error_for(R"("cuda_visible_devices": {"a": 1})"),
      R"(c.json:1: cuda_visible_devices: found {"a":1} (a section); expected a number, a string, or a list of them, or null)");
  EXPECT_NE(error_for(R"("cuda_visible_devices": [true])").find("expected a number, a string, or a list"),
            std::string::npos);
}

TEST(ConfigCheck, LinesAndOverridesAreNamed) {
  auto error = [](const std::vector<std::string>& overrides) {
    return config_error([&] {
      parse_engine_config("{\n\"train_batch_size\": 8,\n\"zero_optimization\": {\n\"stage\": 9}}",
                          {.overrides = overrides}, "c.json");
    });
  };
  EXPECT_EQ(
      error({}),
      "c.json:4: zero_optimization.stage: found 9 (a number); expected an integer from 0 to 3, or \"auto\"");
  EXPECT_EQ(
      error({"zero_optimization.stage=7"}),
      "--set: zero_optimization.stage: found 7 (a number); expected an integer from 0 to 3, or \"auto\"");
  EXPECT_EQ(error({"zero_optimization.stage=3"}), "");
  EXPECT_EQ(error({"zero_optimization.stage=3", "fp16.enabeld=true"}),
            "--set: fp16.enabeld: unknown key (did you mean \"enabled\"?), found true (a boolean); expected "
            "one of enabled, auto_cast, loss_scale, "
            "initial_scale_power, loss_scale_window, hysteresis, consecutive_hysteresis, min_loss_scale");
}

TEST(ConfigCheck, ErrorsStayOnOneLine) {
  std::string error = error_for(R"("a\nb": "x\ny")");
  EXPECT_EQ(error.find('\n'), std::string::npos);
  EXPECT_EQ(error.rfind("c.json:1: a\\x0ab: unknown key, found \"x\\ny\" (a string); expected one of ", 0),
            0u)
      << error;
}

TEST(ConfigCheck, EditDistance) {
  EXPECT_EQ(config::edit_distance("stage", "stage"), 0);
  EXPECT_EQ(config::edit_distance("stgae", "stage"), 1);  // a swap
  EXPECT_EQ(config::edit_distance("Stage", "stage"), 0);
  EXPECT_EQ(config::edit_distance("", "abc"), 3);
  EXPECT_EQ(config::edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(config::nearest_name("lr_rate", {"momentum", "betas"}), "");
  EXPECT_EQ(config::nearest_name("micro_batch", {"seed", "train_micro_batch_size_per_gpu"}),
            "train_micro_batch_size_per_gpu");
  EXPECT_EQ(config::nearest_name(std::string(100'000, 'a'), {"seed"}), "");
}

}  // namespace
}  // namespace tessera
