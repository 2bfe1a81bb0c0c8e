// The sections of monitors: DeepSpeed's, our own, and invalid ones.
#include <gtest/gtest.h>

#include "engine/config/parse.h"
#include "tests/engine/config/config_testing.h"

namespace tessera {
namespace {

TEST(MonitorKeys, DeepSpeedsSectionsWorkAsTheyAre) {
  config::ConfigReport report;
  // https://www.deepspeed.ai/docs/config-json/#monitoring-module, with monitors
  // Tessera has no client for switched off.
  const EngineConfig config = parse_keys(R"(
      "tensorboard": {"enabled": true, "output_path": "output/ds_logs/", "job_name": "train_bert"},
      "wandb": {"enabled": false, "group": "my_group", "team": "my_team", "project": "my_project"},
      "comet": {"enabled": false, "workspace": "my_workspace"},
      "csv_monitor": {"enabled": true, "output_path": "output/ds_logs/", "job_name": "train_bert"})",
                                         &report);
  const FileMonitorConfig expected{
      .enabled = true, .output_path = "output/ds_logs/", .job_name = "train_bert"};
  EXPECT_EQ(config.monitors.tensorboard, expected);
  EXPECT_EQ(config.monitors.csv, expected);
  EXPECT_TRUE(report.warnings.empty());
}

TEST(MonitorKeys, AllAreOffByDefault) {
  const EngineConfig config =
      parse_keys(R"("tensorboard": {}, "csv_monitor": {"output_path": "x", "enabled": "auto"})");
  EXPECT_FALSE(config.monitors.tensorboard.enabled || config.monitors.csv.enabled ||
               config.monitors.jsonl.enabled || config.monitors.mlflow.enabled);
}

TEST(MonitorKeys, OursAndBackAgain) {
  const EngineConfig config =
      parse_keys(R"("jsonl_monitor": {"enabled": true, "output_path": "out", "job_name": "j"}, "mlflow": {
      "enabled": true, "tracking_uri": "https://mlflow.example.org/", "experiment_name": "e", "run_name": "r"})");
  EXPECT_EQ(config.monitors.jsonl,
            (FileMonitorConfig{.enabled = true, .output_path = "out", .job_name = "j"}));
  EXPECT_EQ(config.monitors.mlflow, (MlflowConfig{.enabled = true,
                                                  .tracking_uri = "https://mlflow.example.org/",
                                                  .experiment_name = "e",
                                                  .run_name = "r"}));
  EXPECT_EQ(parse_engine_config(dump_resolved(config)), config);
}

TEST(MonitorKeys, WhatMayBeAPasswordIsRefusedAndNotShown) {
  for (const char* uri : {"https://mlflow.example.org/?token=s3cret",
                          "https://user"
                          ":s3cret@mlflow.example.org/"}) {
    const std::string error = error_for(std::string(R"("mlflow": {"tracking_uri": ")") + uri + "\"}");
    EXPECT_NE(error.find("mlflow.tracking_uri: found an address with"), std::string::npos) << error;
    EXPECT_EQ(error.find("s3cret"), std::string::npos) << error;
  }
  for (const char* uri :
       {"databricks", "databricks://a profile", "file:///a/folder", "sqlite:///a.db", "a/folder"})
    EXPECT_EQ(
        parse_keys(std::string(R"("mlflow": {"tracking_uri": ")") + uri + "\"}").monitors.mlflow.tracking_uri,
        uri);
}

}  // namespace
}  // namespace tessera
