// A whole run's configuration: the trainer's section, the ready files, the schema and the documentation.
#include "train/trainer_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "engine/config/keys.h"
#include "engine/config/schema.h"
#include "tests/engine/config/errors.h"
#include "tests/support/files.h"

namespace tessera::train {
namespace {

using nlohmann::json;

RunConfig parse(const std::string& trainer, int world_size = 1) {
  return parse_run_config("{\"train_batch_size\": 8, \"trainer\": {" + trainer + "}}", "folder/my_run.json", world_size);
}
std::string error_for(const std::string& trainer) {
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
  RunConfig run = parse(R"("name": "n", "output_dir": "/tmp/o", "max_steps": 1e2, "eval_every_epochs": 0, "eval_every_steps": 50,
      "eval_batch_size": 7, "device": "CPU", "num_threads": 2}, "comm": {"backend": "gloo", "timeout_s": 1.5, "rendezvous_timeout_s": 2.5)");
  EXPECT_EQ(run.trainer, expected);
  const TrainerConfig data = parse(R"("num_workers": 3, "prefetch_factor": 5, "pin_memory": false}, "dataloader_drop_last": false, "comm": {)").trainer;
  EXPECT_EQ(data.dataloader_num_workers, 3);
  EXPECT_EQ(data.dataloader_prefetch_factor, 5);
  EXPECT_FALSE(data.dataloader_pin_memory);
  EXPECT_FALSE(data.dataloader_drop_last) << "DeepSpeed's key";
  EXPECT_EQ(parse(R"("name": "n")").trainer.output_dir, "runs/n");
  EXPECT_EQ(parse(R"("epochs": 3)").trainer.epochs, 3);
}

TEST(TrainerConfig, Errors) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("epochs": 2, "max_steps": 5)", "trainer.max_steps: found 5 beside trainer.epochs 2; expected one of the two"},
      {R"("epochs": 0)", "trainer.epochs: found 0 (a number); expected an integer from 1 to 9e15, or null"},
      {R"("device": "gpu")", "trainer.device: found \"gpu\" (a string); expected one of \"auto\", \"cpu\", \"cuda\" (did you mean \"cpu\"?)"},
      {R"("name": "a/b")", "trainer.name: found \"a/b\" (a string); expected a name that can be a folder's"},
      {R"("output_dir": "")", "trainer.output_dir: found \"\" (a string); expected a folder"},
      {R"("epoch": 2)",
       "trainer.epoch: unknown key (did you mean \"epochs\"?), found 2 (a number); expected one of name, output_dir, epochs, max_steps, "
       "eval_batch_size, overwrite_output_dir, eval_every_epochs, eval_every_steps, histograms_every_steps, save_every_epochs, save_every_steps, metric_for_best, best_is, load_best_at_end, early_stopping_patience, early_stopping_threshold, export_model, device, num_threads, deterministic, "
       "dataloader_num_workers, dataloader_prefetch_factor, dataloader_pin_memory, dataloader_drop_last"},
  };
  for (const auto& [keys, message] : cases) EXPECT_EQ(error_for(keys), "folder/my_run.json:1: " + message) << keys;
  EXPECT_EQ(config_error([] { parse_run_config(R"({"train_batch_size": 8, "model": {"hidden": 3}})", "c.json", 1); }),
            "c.json:1: model.type: is missing; expected a string");
}

TEST(TrainerConfig, TakesHuggingFacesNames) {
  const std::string names = R"({"run_name": "r", "num_train_epochs": 2, "per_device_eval_batch_size": 3, "eval_steps": 4, "save_steps": 5,
      "metric_for_best_model": "f1", "load_best_model_at_end": false, "full_determinism": true, "dataloader_num_workers": 6})";
  const TrainerConfig trainer = parse_run_config("{\"train_batch_size\": 8, \"trainer\": " + names + "}", "c.json", 1, {"trainer.eval_steps=7"}).trainer;
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

TEST(TrainerConfig, ModelAndDataAreHandedOn) {
  RunConfig run = parse_run_config("{\"train_batch_size\": 8,\n\"model\": {\"type\": \"mlp\",\n\"hiden\": 3}, \"data\": {\"type\": \"d\", \"a.b\": 1}}", "c.json", 1);
  EXPECT_EQ(run.model.required_text("type"), "mlp");
  run.model.integer("hidden", 64, 1, 100);
  EXPECT_EQ(config_error([&] { run.model.finish(); }),
            "c.json:3: model.hiden: unknown key (did you mean \"hidden\"?), found 3 (a number); expected one of hidden, type");
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
  for (const char* name : {"ds_config_zero2.json", "fashion_mnist.json", "gpt_110m.json", "gpt_33m.json", "minimal.json", "segmentation.json",
                           "text_classification.json"})
    EXPECT_TRUE(names.count(name)) << name;
}

TEST(TrainerConfig, ResolvedConfigurationHasEveryUsedKey) {
  json resolved = json::parse(dump_resolved(load_run_config(TESSERA_SOURCE_DIR "/configs/fashion_mnist.json", 2)));
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) {
    if (key.use != config::Use::kUsed || !key.variants.empty() || key.path.find("[]") != std::string::npos) continue;
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
  EXPECT_EQ(load_run_config(TESSERA_SOURCE_DIR "/configs/fashion_mnist.json", 1, {"zero_optimization.stage=3"}).engine.zero.stage, 3);
}

TEST(TrainerConfig, DoubtsAScheduleThatEndsAtNothing) {
  const auto doubt = [](double step_size, double gamma, const char* interval) {
    return doubt_about({.type = "StepLR", .params = {{"step_size", {step_size}}, {"gamma", {gamma}}}, .words = {{"interval", interval}}}, 1000);
  };
  EXPECT_EQ(doubt(1, 0.5, "step"),
            "scheduler.params.step_size: found 1, which counts optimizer steps: long before the last of 1,000 the learning rate is 0; "
            "\"interval\": \"epoch\" counts epochs");
  EXPECT_EQ(doubt(1, 0.5, "epoch"), "");
  EXPECT_EQ(doubt(100, 0.5, "step"), "");
  EXPECT_EQ(doubt(1, 0.999, "step"), "");
  EXPECT_EQ(doubt_about({.type = "WarmupLR", .params = {}, .words = {}}, 1000), "");
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
  for (const std::string& row : rows) EXPECT_TRUE(documented.count(row)) << "docs/configuration.md lacks\n" << row;
}

}  // namespace
}  // namespace tessera::train
