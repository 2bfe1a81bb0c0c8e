#include "engine/config/parse.h"

#include <nlohmann/json.hpp>

#include "core/json/json_text.h"
#include "core/str.h"
#include "engine/config/keys.h"
#include "engine/config/optimizer.h"
#include "zero/plan/stage.h"

namespace tessera {
namespace config {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

GivenBatch given_batch(const EngineConfig& config) {
  const auto given = [](int64_t number) { return number != 0 ? std::optional(number) : std::nullopt; };
  return {given(config.train_batch_size), given(config.train_micro_batch_size_per_gpu),
          given(config.gradient_accumulation_steps)};
}

void set_batch(EngineConfig& config, const GivenBatch& given, int world_size, const std::string& source) {
  const Batch batch = resolve_batch(given, world_size, source);
  config.train_batch_size = batch.train;
  config.train_micro_batch_size_per_gpu = batch.micro;
  config.gradient_accumulation_steps = batch.accumulation;
}

void read_batch(const Document& document, int world_size, EngineConfig& config, ConfigReport* report) {
  GivenBatch given;
  ConfigReport open;  // the keys that say "auto"; the numbers follow once all three are known
  read_fields(fields_of(given), document, &open);
  given.any_auto = !open.resolved.empty();
  set_batch(config, given, world_size, document.origins.source());
  given = given_batch(config);
  for (const Field& field : fields_of(given)) {
    const json* written = value_at(*document.json, field.key.path);
    if (report && written && *written == "auto")
      report->resolved.push_back(str(field.key.path, ": \"auto\" is ", value_of(field)));
  }
}

/// Checks keys that contradict each other.
void check_precision(const EngineConfig& config, const Origins& origins) {
  if (config.fp16.enabled && config.bf16)
    origins.fail("bf16.enabled", "found true beside fp16.enabled true; expected one of the two");
  if (config.autocast.enabled && (config.fp16.enabled || config.bf16))
    origins.fail("torch_autocast.enabled",
                 str("found true beside ", config.bf16 ? "bf16" : "fp16",
                     ".enabled true; expected one of the two (autocast keeps the model in fp32)"));
  const DType compute = config.compute_dtype();
  if (config.grad_accum_dtype && *config.grad_accum_dtype != DType::kFloat32 &&
      *config.grad_accum_dtype != compute)
    origins.fail("data_types.grad_accum_dtype",
                 str("found \"", name_of(*config.grad_accum_dtype), "\" with a model that computes in ",
                     name_of(compute), "; expected \"fp32\"",
                     compute == DType::kFloat32 ? "" : str(" or \"", name_of(compute), "\"")));
}

void check_offload(const ZeroConfig& zero, const Origins& origins) {
  const auto check = [&](const char* name, const OffloadConfig& offload) {
    if (offload.on_disk() && offload.nvme_path.value_or("").empty())
      origins.fail(str("zero_optimization.", name, ".nvme_path"),
                   "is missing, and device \"nvme\" needs it; expected a folder on the disk to use");
  };
  check("offload_optimizer", zero.offload_optimizer);
  check("offload_param", zero.offload_param);
  if (zero.offload_param.on_disk() && !zero::sharding_of(zero.stage).parameters)
    origins.fail("zero_optimization.offload_param.device",
                 str("found \"nvme\" at stage ", zero.stage, "; expected stage 3, which shards parameters"));
}

/// Checks the keys that form groups of ranks. One rank alone is any group.
void check_groups(const ZeroConfig& zero, int world_size, const Origins& origins) {
  const bool second_copy = zero.hpz_partition_size > 1, rows = zero.mics_shard_size != -1;
  const auto check = [&](const std::string& name, int size, const OffloadConfig& offload, const char* section,
                         const char* what) {
    const std::string path = "zero_optimization." + name;
    if (!zero::sharding_of(zero.stage).parameters)
      origins.fail(path, str("found ", size, " at stage ", zero.stage,
                             "; expected stage 3, which shards parameters, or the key left out"));
    if (size < 1) origins.fail(path, str("found ", size, "; expected a number of ranks, or -1 for all"));
    if (world_size > 1 && world_size % size != 0)
      origins.fail(
          path, str("found ", size, " for ", world_size,
                    " ranks, which are no whole number of such groups; expected a divisor of ", world_size));
    if (offload.on_disk())
      origins.fail(path, str("found ", size, " beside ", section,
                             ".device \"nvme\"; expected one of the two: ", what));
  };
  if (second_copy && rows)
    origins.fail(
        "zero_optimization.mics_shard_size",
        str("found ", zero.mics_shard_size, " beside zero_hpz_partition_size ", zero.hpz_partition_size,
            "; expected one of the two: a group that has all parameters needs no second copy"));
  if (second_copy)
    check("zero_hpz_partition_size", zero.hpz_partition_size, zero.offload_param, "offload_param",
          "the second copy would be in memory");
  if (rows)
    check("mics_shard_size", zero.mics_shard_size, zero.offload_optimizer, "offload_optimizer",
          "gradients are summed over the groups in memory");
}

void check_activations(const ActivationConfig& activations, const Origins& origins) {
  if (activations.policy == "offload" && activations.nvme_path.value_or("").empty())
    origins.fail("activation_checkpointing.nvme_path",
                 "is missing, and policy \"offload\" needs it; expected a folder on the disk to use");
}

void check_tracking_uri(const std::string& uri, const Origins& origins) {
  const auto refuse = [&](const char* what, const char* instead) {
    origins.fail("mlflow.tracking_uri",
                 str("found an address with ", what, "; expected it without: ", instead));
  };
  if (uri.find('@') != uri.npos)
    refuse("a user's name", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD are for that");
  if (uri.find('?') != uri.npos) refuse("a '?'", "MLFLOW_TRACKING_TOKEN is for a token");
  if (uri == "http://" || uri == "https://")
    origins.fail("mlflow.tracking_uri", str("found ", describe_value(uri), "; expected http(s)://HOST:PORT"));
}

void check_together(const EngineConfig& config, int world_size, const Origins& origins, Problems& problems) {
  problems.collect([&] { check_together(config.optimizer, origins); });
  problems.collect(
      [&] { check_together(config.scheduler, config.optimizer.param_groups.size() + 1, origins); });
  problems.collect([&] { check_precision(config, origins); });
  problems.collect([&] { check_offload(config.zero, origins); });
  problems.collect([&] { check_groups(config.zero, world_size, origins); });
  problems.collect([&] { check_activations(config.activations, origins); });
  problems.collect([&] { check_tracking_uri(config.monitors.mlflow.tracking_uri, origins); });
  problems.collect([&] {
    if (config.memory_breakdown && config.profiler.steps > 0)
      origins.fail("profiler.steps", str("found ", config.profiler.steps,
                                         " with memory_breakdown true; expected one of the two: libtorch "
                                         "has one profiler, which both use"));
  });
}

/// "cpu_offload": true in `zero`, and its like, after the overrides.
void replace_old_offload(json& zero, const Origins& origins, ConfigReport* report) {
  for (const auto& [old_name, name] : kOldOffload) {
    const auto old = zero.find(old_name);
    if (old == zero.end() || !old->is_boolean()) continue;
    const bool is_on = old->get<bool>();
    zero.erase(old);
    const std::string section_path = child_path("zero_optimization", name);
    const std::string path = child_path("zero_optimization", old_name);
    const bool is_overruled =
        (origins.is_override(section_path) || origins.is_override(section_path + ".device")) &&
        !origins.is_override(path);
    if (!is_on || is_overruled) continue;
    json& section = zero[name];
    if (section.is_null()) section = json::object();
    if (!section.is_object()) continue;  // is refused with the other keys
    if (section.value("device", json("cpu")) != "cpu")
      origins.fail(path, str("found true beside ", name, ".device ", json_text(section["device"]),
                             ", whose old form it is; expected ", name, " alone"));
    section["device"] = "cpu";
    if (report)
      report->warnings.push_back(str(origins.where(path), ": ", path,
                                     ": true is DeepSpeed's old form; read as \"", name,
                                     "\": {\"device\": \"cpu\"}"));
  }
  const auto pin_memory = zero.find("cpu_offload_use_pin_memory");
  if (pin_memory == zero.end() || !pin_memory->is_boolean()) return;
  const json value = *pin_memory;
  zero.erase(pin_memory);
  for (const auto& [old_name, name] : kOldOffload)
    if (zero.contains(name) && zero[name].is_object() && zero[name].value("device", json()) == "cpu")
      zero[name].emplace("pin_memory", value);
}

void normalise_engine(Document& document, const KeyTable& table, Problems& problems, ConfigReport* report) {
  auto zero = document.json->find("zero_optimization");
  if (zero != document.json->end() && zero->is_boolean()) {
    const int stage = zero->get<bool>() ? 1 : 0;
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
  for (const std::string& name : options.other_sections)
    table.add({.path = name, .type = Type::kFreeSection});
  document.origins.name_overrides(options.override_source);
  prepare(document, table, options.overrides, options.report);
  Problems problems;
  const EngineConfig config = read_engine_config(document, options.world_size, problems, options.report);
  problems.raise();
  return config;
}

EngineConfig validate(EngineConfig config, int world_size) {
  Origins origins("EngineConfig");
  Problems problems;
  GivenBatch batch = given_batch(config);
  for (const Field& field : fields_of(batch))
    if (!value_of(field).is_null()) check_field(field, field.key.path, origins, problems);
  check_fields(config.optimizer, origins, problems);
  check_fields(config.scheduler, origins, problems);
  for (const Field& field : fields_of(config)) check_field(field, field.key.path, origins, problems);
  problems.raise();
  problems.collect([&] { set_batch(config, batch, world_size, origins.source()); });
  check_together(config, world_size, origins, problems);
  problems.raise();
  return config;
}

}  // namespace

void prepare(Document& document, const KeyTable& table, const std::vector<std::string>& overrides,
             ConfigReport* report) {
  Problems problems;
  normalise_engine(document, table, problems,
                   report);  // before overrides, which then find every key at its path
  apply_overrides(document, without_aliases(overrides, table));
  normalise_engine(document, table, problems, report);  // what the overrides have added
  if (const auto zero = document.json->find("zero_optimization");
      zero != document.json->end() && zero->is_object())
    problems.collect([&] { replace_old_offload(*zero, document.origins, report); });
  check(document, table, problems, report);
  problems.raise();
  if (report)
    for (const auto& [name, value] : document.json->items())
      if (!value.is_null() && value != json::object()) report->given.push_back(name);
}

EngineConfig read_engine_config(const Document& document, int world_size, Problems& problems,
                                ConfigReport* report) {
  EngineConfig config;
  problems.collect([&] { read_batch(document, world_size, config, report); });
  read_fields(fields_of(config), document, report);
  config.optimizer = read_optimizer(document, report);
  problems.collect([&] { config.scheduler = read_schedule(document, report); });
  check_together(config, world_size, document.origins, problems);
  return config;
}

ordered_json write_engine_config(const EngineConfig& config) {
  EngineConfig copy = config;
  ordered_json out;
  GivenBatch batch = given_batch(config);
  for (const Field& field : fields_of(batch))
    if (json value = value_of(field); !value.is_null()) out[field.key.path] = value;
  out["optimizer"] = write_optimizer(config.optimizer);
  out["scheduler"] = write_schedule(config.scheduler);
  write_fields(fields_of(copy), out);
  return out;
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
  return config::validate(config, world_size);
}

std::string dump_resolved(const EngineConfig& config) {
  using nlohmann::ordered_json;
  return json_text(config::write_engine_config(config), 2) + "\n";
}

}  // namespace tessera
