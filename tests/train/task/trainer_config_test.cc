// A run's configuration: the trainer's section, and the sections passed on.
#include "train/task/trainer_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/str.h"
#include "tests/engine/config/config_testing.h"

namespace tessera::train {
namespace {

using nlohmann::json;

RunConfig parse(const std::string& trainer, int world_size = 1) {
  return parse_run_config("{\"train_batch_size\": 8, \"trainer\": {" + trainer + "}}", "folder/my_run.json",
                          world_size);
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
  expected.verify = true;
  RunConfig run = parse(
      R"("name": "n", "output_dir": "/tmp/o", "max_steps": 1e2, "eval_every_epochs": 0, "eval_every_steps": 50,
      "eval_batch_size": 7, "device": "CPU", "num_threads": 2}, "comm": {"backend": "gloo", "timeout_s": 1.5, "rendezvous_timeout_s": 2.5, "verify": true)");
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

TEST(TrainerConfig, AttentionBackendsAreAListInOrder) {
  using Names = std::vector<std::string>;
  const auto read = [](const std::string& value) {
    return parse("\"attention_backends\": " + value).trainer.attention_backends;
  };
  EXPECT_EQ(read("null"), Names());
  EXPECT_EQ(read(R"(["math", "flash"])"), (Names{"math", "flash"}));
  EXPECT_EQ(read(R"(["cudnn_attention", "FLASH_ATTENTION", "efficient_attention", "MATH"])"),
            (Names{"cudnn", "flash", "efficient", "math"}))
      << "the names of torch.nn.attention.SDPBackend";
  EXPECT_EQ(read(R"("flash")"), Names{"flash"});
  const RunConfig run = parse(R"("attention_backends": ["flash_attention", "math"])");
  EXPECT_EQ(resolved(run).at("trainer").at("attention_backends"), (json{"flash", "math"}));
  EXPECT_TRUE(resolved(parse("")).at("trainer").at("attention_backends").is_null());
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
            std::vector<std::string>{"trainer.max_steps 5 is used and not trainer.epochs 2"});
  EXPECT_EQ(parse(R"("device": "gpu")").trainer.device, "cuda");
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
  EXPECT_EQ(json::parse(dump_resolved(run))["model"]["hidden"], 64);  // keys that were read are filled in
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

}  // namespace
}  // namespace tessera::train
