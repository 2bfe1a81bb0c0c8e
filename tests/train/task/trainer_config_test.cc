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
       "(all 27 are in docs/configuration.md)"},
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
  for (const char* value : {"9e15", "0", "-1", "0.0001"})
    EXPECT_EQ(trainer_error(str(R"("epochs": 1}, "comm": {"timeout_s": )", value)),
              str("folder/my_run.json:1: comm.timeout_s: found ", json::parse(value).dump(),
                  " (a number); expected a number from 0.001 to 1e9"));
  EXPECT_EQ(config_error(
                [] { parse_run_config(R"({"train_batch_size": 8, "model": {"hidden": 3}})", "c.json", 1); }),
            "c.json:1: model.type: is missing; expected a string");
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

  const std::string expected =
      "; expected a list of some of \"flash\", \"efficient\", \"cudnn\", \"math\", each once, or null";
  for (const auto& [value, found] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "[] (a list), which is empty"},
           {R"(["flash", "maths"])",
            R"(["flash","maths"] (a list) with "maths" (a string) (did you mean "math"?))"},
           {R"(["flash", "FLASH_ATTENTION"])", R"(["flash","FLASH_ATTENTION"] (a list) with "flash" twice)"},
           {R"(["flash", 3])", R"(["flash",3] (a list) with 3 (a number))"},
           {R"("fash")", R"("fash" (a string) (did you mean "flash"?))"},
           {"true", "true (a boolean)"}})
    EXPECT_EQ(trainer_error("\"attention_backends\": " + value),
              "folder/my_run.json:1: trainer.attention_backends: found " + found + expected);
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
