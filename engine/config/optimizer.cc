#include "engine/config/optimizer.h"

#include "core/str.h"
#include "engine/config/bind.h"

namespace tessera::config {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kAdamWMode = "adam_w_mode";
constexpr const char* kTorchAdam = "torch_adam";

bool is_mode(const Key& key) { return key.name() == kAdamWMode || key.name() == kTorchAdam; }

/// The value that counts: what is written, what "auto" stands for, or the default.
json effective(const Key& key, const std::string& path, const json* written, Report* report) {
  if (!written) return json::parse(key.default_json);
  if (*written != "auto" || !key.takes_word_auto()) return *written;
  if (report) {
    bool constant = key.auto_json != "null" && key.auto_json != "\"auto\"";
    report->resolved.push_back(str(path, ": \"auto\" is ", constant ? key.auto_json : key.auto_doc));
  }
  return json::parse(key.auto_json);
}

void store(const Key& key, const json& value, std::map<std::string, double>& params) {
  if (key.type == Type::kPair) {
    params["beta1"] = value[0].get<double>();
    params["beta2"] = value[1].get<double>();
  } else {
    params[key.name()] = value.is_boolean() ? static_cast<double>(value.get<bool>()) : value.get<double>();
  }
}

/// What the single ranges cannot see.
void check_params(const Document& document, const std::string& path, std::map<std::string, double> params) {
  if (params["nesterov"] != 0 && (params["momentum"] <= 0 || params["dampening"] != 0))
    document.fail(path + ".nesterov",
                  str("found true with momentum ", params["momentum"], " and dampening ", params["dampening"],
                      "; expected a momentum above 0 and dampening 0"));
  if (params.count("max_coeff") && params["min_coeff"] > params["max_coeff"])
    document.fail(path + ".min_coeff", str("found ", params["min_coeff"], ", more than max_coeff ",
                                           params["max_coeff"], "; expected at most that"));
}

std::vector<ParamGroupConfig> read_groups(const Document& document, const KeyTable& table,
                                          const std::string& type,
                                          const std::map<std::string, double>& params, Report* report) {
  std::vector<ParamGroupConfig> groups;
  const json* list = value_at(*document.json, "optimizer.param_groups");
  if (!list) return groups;
  for (size_t i = 0; i < list->size(); ++i) {
    const json& item = (*list)[i];
    std::string path = child_path("optimizer.param_groups", i);
    ParamGroupConfig group;
    if (item["match"].is_string())
      group.match = {item["match"].get<std::string>()};
    else
      group.match = item["match"].get<std::vector<std::string>>();
    std::map<std::string, double> merged = params;
    for (const Key* key : table.children("optimizer.params", type)) {
      auto written = item.find(key->name());
      if (!key->per_group || written == item.end()) continue;
      json value = effective(*key, child_path(path, key->name()), &*written, report);
      store(*key, value, group.params);
      store(*key, value, merged);
    }
    check_params(document, path, merged);
    groups.push_back(std::move(group));
  }
  return groups;
}

/// One parameter's number for JSON: 1 is `true` for a boolean key, 5 stays an integer.
ordered_json number_for(const Key& key, double value) {
  if (key.type == Type::kBool) return value != 0;
  if (key.type == Type::kInteger) return static_cast<int64_t>(value);
  return value;
}

ordered_json write_params(const std::map<std::string, double>& params, const KeyTable& table,
                          const std::string& type, bool fill_in) {
  ordered_json out = ordered_json::object();
  std::map<std::string, double> rest = params;
  for (const Key* key : table.children("optimizer.params", type)) {
    if (key->use != Use::kUsed || is_mode(*key)) continue;
    json fallback = json::parse(key->default_json);
    if (key->type == Type::kPair) {
      if (!fill_in && !rest.count("beta1") && !rest.count("beta2")) continue;
      auto beta = [&](const char* name, size_t i) {
        return rest.count(name) ? rest[name] : fallback[i].get<double>();
      };
      out["betas"] = {beta("beta1", 0), beta("beta2", 1)};
      rest.erase("beta1");
      rest.erase("beta2");
    } else if (rest.count(key->name())) {
      out[key->name()] = number_for(*key, rest[key->name()]);
      rest.erase(key->name());
    } else if (fill_in) {
      out[key->name()] = fallback;
    }
  }
  for (const auto& [name, value] : rest)
    out[name] = value;  // unknown: the check of a config built in C++ names it
  return out;
}

}  // namespace

OptimizerConfig read_optimizer(const Document& document, const KeyTable& table, Report* report) {
  const json& root = *document.json;
  const Key& type_key = *table.find_any("optimizer.type");
  OptimizerConfig config;
  if (const json* type = value_at(root, "optimizer.type"); type && type->is_string())
    config.type = canonical_word(type_key, type->get<std::string>());
  const std::string written_type = config.type;
  bool decoupled = true, torch_adam = false;
  for (const Key* key : table.children("optimizer.params", written_type)) {
    if (key->use != Use::kUsed) continue;
    json value = effective(*key, key->path, value_at(root, key->path), report);
    if (key->name() == kAdamWMode) decoupled = value.get<bool>();
    if (key->name() == kTorchAdam) torch_adam = value.get<bool>();
    if (!is_mode(*key)) store(*key, value, config.params);
  }
  if (written_type == "Adam" && decoupled) config.type = "AdamW";
  if (config.type == "AdamW" && torch_adam && !value_at(root, "optimizer.params.weight_decay"))
    config.params["weight_decay"] = 0.01;  // torch.optim.AdamW's default
  check_params(document, "optimizer.params", config.params);
  config.param_groups = read_groups(document, table, written_type, config.params, report);
  return config;
}

SchedulerConfig read_scheduler(const Document& document, const KeyTable& table,
                               const OptimizerConfig& optimizer, Report* report) {
  const json& root = *document.json;
  SchedulerConfig config;
  const json* type = value_at(root, "scheduler.type");
  if (!type || !type->is_string()) return config;
  config.type = type->get<std::string>();
  for (const Key* key : table.children("scheduler.params", config.type)) {
    if (key->use != Use::kUsed) continue;
    json value = effective(*key, key->path, value_at(root, key->path), report);
    if (value.is_null() || value == "auto") continue;  // decided later, from the optimizer or the trainer
    if (key->type == Type::kWord) {
      config.words[key->name()] = canonical_word(*key, value.get<std::string>());
    } else if (value.is_array()) {
      config.params[key->name()] = value.get<std::vector<double>>();
      size_t num_groups = optimizer.param_groups.size() + 1;
      if (value.size() != num_groups)
        document.fail(
            key->path,
            str("found ", describe_value(value), " with ", value.size(), " values; expected one number, or ",
                num_groups,
                ": one for the parameters in no group, then one for each of optimizer.param_groups"));
    } else {
      config.params[key->name()] = {value.is_boolean() ? static_cast<double>(value.get<bool>())
                                                       : value.get<double>()};
    }
  }
  if (config.params.contains("warmup_ratio")) {
    if (value_at(root, "scheduler.params.warmup_num_steps"))
      document.fail("scheduler.params.warmup_ratio",
                    str("found ", config.params["warmup_ratio"][0],
                        " beside warmup_num_steps; expected one of the two"));
    config.params.erase("warmup_num_steps");
  }
  auto total = config.params.find("total_num_steps"), warmup = config.params.find("warmup_num_steps");
  if (report && total != config.params.end() && warmup != config.params.end() &&
      total->second[0] < warmup->second[0])
    report->warnings.push_back(str(document.origins.where("scheduler.params.total_num_steps"),
                                   ": scheduler.params.total_num_steps ", total->second[0],
                                   " is less than warmup_num_steps ", warmup->second[0],
                                   ": the run ends before the warm-up does"));
  // DeepSpeed's default, and a trap for who knows other schedules: those scale the optimizer's lr.
  const json* lr = value_at(root, "optimizer.params.lr");
  if (report && config.type == "WarmupDecayLR" && lr && lr->is_number() && *lr != 0.001 &&
      !value_at(root, "scheduler.params.warmup_max_lr"))
    report->warnings.push_back(str(document.origins.where("optimizer.params.lr"), ": optimizer.params.lr ",
                                   lr->get<double>(),
                                   " is not used: WarmupDecayLR rises to scheduler.params.warmup_max_lr, "
                                   "which is 0.001 where it is not given; ",
                                   "\"auto\" there takes the optimizer's"));
  return config;
}

ordered_json write_optimizer(const OptimizerConfig& optimizer, const KeyTable& table) {
  std::string type = canonical_word(*table.find_any("optimizer.type"), optimizer.type);
  ordered_json out;
  out["type"] = type.empty() ? optimizer.type : type;
  out["params"] = write_params(optimizer.params, table, type, /*fill_in=*/true);
  if (type == "Adam" || type == "AdamW") {
    out["params"][kAdamWMode] = type == "AdamW";
    out["params"][kTorchAdam] = false;
  }
  out["param_groups"] = ordered_json::array();
  for (const ParamGroupConfig& group : optimizer.param_groups) {
    ordered_json item;
    item["match"] = group.match;
    ordered_json params = write_params(group.params, table, type, /*fill_in=*/false);
    for (const auto& [name, value] : params.items()) item[name] = value;
    out["param_groups"].push_back(std::move(item));
  }
  return out;
}

ordered_json write_scheduler(const SchedulerConfig& scheduler, const KeyTable& table) {
  ordered_json out;
  if (scheduler.type.empty()) {
    out["type"] = nullptr;
    return out;
  }
  std::string type = canonical_word(*table.find_any("scheduler.type"), scheduler.type);
  out["type"] = type.empty() ? scheduler.type : type;
  ordered_json params = ordered_json::object();
  auto rest = scheduler.params;
  for (const Key* key : table.children("scheduler.params", type)) {
    if (key->use != Use::kUsed) continue;
    auto found = rest.find(key->name());
    if (key->name() == "warmup_num_steps" && rest.contains("warmup_ratio") && found == rest.end()) continue;
    if (auto word = scheduler.words.find(key->name()); word != scheduler.words.end()) {
      params[key->name()] = word->second;
    } else if (found == rest.end() || found->second.empty()) {
      // Absent means "as the other" for what may be null, and the default for a config built in C++.
      if (!key->required)
        params[key->name()] = key->nullable ? ordered_json(nullptr) : ordered_json::parse(key->default_json);
    } else if (found->second.size() == 1) {
      params[key->name()] = number_for(*key, found->second[0]);
    } else {
      params[key->name()] = found->second;
    }
    if (found != rest.end()) rest.erase(found);
  }
  for (const auto& [name, values] : rest) params[name] = values;  // unknown: the check names it
  out["params"] = std::move(params);
  return out;
}

}  // namespace tessera::config
