// The keys of the monitors: where a run's numbers go besides its own metrics.jsonl.
// tensorboard and csv_monitor are DeepSpeed's.
#include "engine/config/bind.h"
#include "engine/config/keys.h"
#include "engine/config/keys_bound.h"

namespace tessera::config {
namespace {

using Bindings = std::vector<Binding<EngineConfig>>;

/// The three keys of a monitor that writes files. `config`: the section's fields within an EngineConfig.
template <class Section>
Bindings file_monitor_bindings(const std::string& name, const std::string& what, Section config) {
  return {
      bind<EngineConfig>(boolean(name + ".enabled").says(str("Writes ", what)),
                         [config](auto& engine) -> auto& { return config(engine).enabled; }),
      bind<EngineConfig>(
          text(name + ".output_path").says(str("Folder for them; \"\": `trainer.output_dir`/", name)),
          [config](auto& engine) -> auto& { return config(engine).output_path; }),
      bind<EngineConfig>(text(name + ".job_name")
                             .says("Folder inside it; \"\": the last part of `trainer.output_dir`, or none "
                                   "where `output_path` is \"\" too"),
                         [config](auto& engine) -> auto& { return config(engine).job_name; }),
  };
}

#define TESSERA_FIELD(member) [](auto& config) -> auto& { return config.member; }

Bindings mlflow_bindings() {
  return {
      bind<EngineConfig>(boolean("mlflow.enabled")
                             .says("Our own key: sends them to an MLflow tracking server, in the background"),
                         TESSERA_FIELD(monitors.mlflow.enabled)),
      bind<EngineConfig>(text("mlflow.tracking_uri")
                             .says("Our own key: the server's address; \"\": the environment's "
                                   "MLFLOW_TRACKING_URI, else http://127.0.0.1:5000"),
                         TESSERA_FIELD(monitors.mlflow.tracking_uri)),
      bind<EngineConfig>(text("mlflow.experiment_name")
                             .says("Our own key: the experiment, made where it is absent; \"\": the "
                                   "environment's MLFLOW_EXPERIMENT_NAME, "
                                   "else Default"),
                         TESSERA_FIELD(monitors.mlflow.experiment_name)),
      bind<EngineConfig>(text("mlflow.run_name").says("Our own key: the run's name; \"\": `trainer.name`"),
                         TESSERA_FIELD(monitors.mlflow.run_name)),
  };
}

}  // namespace

std::vector<Key> monitor_sections() {
  return {
      section("tensorboard").says("TensorBoard event files"),
      section("csv_monitor").says("One CSV file a number"),
      section("jsonl_monitor").says("Our own: one file of JSON lines"),
      section("mlflow").says("Our own: an MLflow tracking server"),
  };
}

Bindings monitor_bindings() {
  Bindings bindings;
  for (const Bindings& section :
       {file_monitor_bindings("tensorboard", "TensorBoard event files", TESSERA_FIELD(monitors.tensorboard)),
        file_monitor_bindings("csv_monitor", "one CSV file for each of a run's numbers",
                              TESSERA_FIELD(monitors.csv)),
        file_monitor_bindings("jsonl_monitor", "one JSON object a line", TESSERA_FIELD(monitors.jsonl)),
        mlflow_bindings()})
    bindings.insert(bindings.end(), section.begin(), section.end());
  return bindings;
}

#undef TESSERA_FIELD

}  // namespace tessera::config
