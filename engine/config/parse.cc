#include "engine/config/parse.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/arguments.h"
#include "engine/config/batch.h"
#include "engine/config/bind.h"
#include "engine/config/keys.h"
#include "engine/config/keys_bound.h"
#include "engine/config/optimizer.h"

namespace tessera {
namespace config {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

void read_batch(const Document& document, int world_size, EngineConfig& config, Report* report) {
  GivenBatch given;
  std::vector<const char*> open;
  auto read = [&](const char* name, std::optional<int64_t>& field) {
    const json* value = value_at(*document.json, name);
    if (!value) return;
    if (*value == "auto") {
      given.any_auto = true;
      open.push_back(name);
    } else {
      int64_t number = 0;
      read_field(*value, number);
      field = number;
    }
  };
  read(kTrainBatchSize, given.train);
  read(kMicroBatchSize, given.micro);
  read(kAccumulationSteps, given.accumulation);
  Batch batch = resolve_batch(given, world_size, document.origins.source());
  config.train_batch_size = batch.train;
  config.train_micro_batch_size_per_gpu = batch.micro;
  config.gradient_accumulation_steps = batch.accumulation;
  for (const char* name : open) {
    int64_t value = name == kTrainBatchSize   ? batch.train
                    : name == kMicroBatchSize ? batch.micro
                                              : batch.accumulation;
    if (report) report->resolved.push_back(str(name, ": \"auto\" is ", value));
  }
}

/// Two keys that are right alone and wrong together.
void check_precision(const Document& document, const EngineConfig& config) {
  if (config.fp16.enabled && config.bf16)
    document.fail("bf16.enabled", "found true beside fp16.enabled true; expected one of the two");
  if (config.autocast.enabled && (config.fp16.enabled || config.bf16))
    document.fail("torch_autocast.enabled",
                  str("found true beside ", config.bf16 ? "bf16" : "fp16",
                      ".enabled true; expected one of the two (autocast keeps the model in fp32)"));
  DType compute = config.compute_dtype();
  if (config.grad_accum_dtype && *config.grad_accum_dtype != DType::kFloat32 &&
      *config.grad_accum_dtype != compute)
    document.fail("data_types.grad_accum_dtype",
                  str("found \"", name_of(*config.grad_accum_dtype), "\" with a model that computes in ",
                      name_of(compute), "; expected \"fp32\"",
                      compute == DType::kFloat32 ? "" : str(" or \"", name_of(compute), "\"")));
}

void check_tracking_uri(const Document& document, const std::string& uri) {
  if (uri.find('@') != uri.npos)
    document.fail("mlflow.tracking_uri",
                  "found an address with a user's name; expected it without: MLFLOW_TRACKING_USERNAME and "
                  "MLFLOW_TRACKING_PASSWORD are for that");
  if (!uri.empty() && !is_mlflow_server(uri))
    document.fail("mlflow.tracking_uri", str("found ", describe_value(uri.substr(0, uri.find('?'))),
                                             "; expected the address of a server, http://… or https://…"));
}

void normalise_engine(Document& document, const KeyTable& table, Problems& problems, Report* report) {
  auto zero = document.json->find("zero_optimization");
  if (zero != document.json->end() && zero->is_boolean()) {
    int stage = zero->get<bool>() ? 1 : 0;
    *zero = {{"stage", stage}};
    if (report)
      report->warnings.push_back(str(
          document.origins.where("zero_optimization"),
          ": zero_optimization: true and false are DeepSpeed's old form; read as {\"stage\": ", stage, "}"));
  }
  normalise(document, table, problems);
}

EngineConfig parse(Document document, const ConfigOptions& options) {
  KeyTable table = engine_keys();
  for (const std::string& name : options.other_sections) table.add(free_section(name));
  prepare(document, table, options.overrides, options.report);
  Problems problems;
  const EngineConfig config = read_engine_config(document, options.world_size, problems, options.report);
  problems.raise();
  return config;
}

}  // namespace

void prepare(Document& document, const KeyTable& table, const std::vector<std::string>& overrides,
             Report* report) {
  Problems problems;
  normalise_engine(document, table, problems, report);  // so that overrides meet keys under their own names
  apply_overrides(document, under_own_names(overrides, table));
  normalise_engine(document, table, problems, report);  // and what they have brought
  expand_arguments(document, table, problems, report);
  check(document, table, problems, report);
  problems.raise();
}

EngineConfig read_engine_config(const Document& document, int world_size, Problems& problems,
                                Report* report) {
  static const KeyTable table = engine_keys();
  EngineConfig config;
  problems.collect([&] { read_batch(document, world_size, config, report); });
  read_bindings(engine_bindings(), document, config, report);
  problems.collect([&] { config.optimizer = read_optimizer(document, table, report); });
  problems.collect([&] { config.scheduler = read_scheduler(document, table, config.optimizer, report); });
  problems.collect([&] { check_precision(document, config); });
  problems.collect([&] { check_tracking_uri(document, config.monitors.mlflow.tracking_uri); });
  return config;
}

ordered_json write_engine_config(const EngineConfig& config) {
  static const KeyTable table = engine_keys();
  ordered_json out;
  if (config.train_batch_size != 0) out[kTrainBatchSize] = config.train_batch_size;
  if (config.train_micro_batch_size_per_gpu != 0)
    out[kMicroBatchSize] = config.train_micro_batch_size_per_gpu;
  if (config.gradient_accumulation_steps != 0) out[kAccumulationSteps] = config.gradient_accumulation_steps;
  out["optimizer"] = write_optimizer(config.optimizer, table);
  out["scheduler"] = write_scheduler(config.scheduler, table);
  write_bindings(engine_bindings(), config, out);
  return out;
}

ordered_json shown_engine_config(const EngineConfig& config) {
  EngineConfig shown = config;
  std::string& uri = shown.monitors.mlflow.tracking_uri;
  uri = uri.substr(0, uri.find('?'));
  return write_engine_config(shown);
}

}  // namespace config

EngineConfig load_engine_config(const std::string& file, const ConfigOptions& options) {
  return config::parse(config::read_document(file), options);
}

EngineConfig parse_engine_config(std::string_view json_text, const ConfigOptions& options,
                                 const std::string& source) {
  return config::parse(config::parse_document(json_text, source), options);
}

EngineConfig validated(const EngineConfig& config, int world_size) {
  return parse_engine_config(config::write_engine_config(config).dump(), {.world_size = world_size},
                             "EngineConfig");
}

std::string dump_resolved(const EngineConfig& config) {
  using nlohmann::ordered_json;
  return config::shown_engine_config(config).dump(2, ' ', false, ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace tessera
