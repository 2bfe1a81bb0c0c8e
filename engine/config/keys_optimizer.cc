// The section `optimizer`: its keys, which depend on optimizer.type, and how it is read, checked and written.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/str.h"
#include "engine/config/keys.h"
#include "engine/config/optimizer.h"

namespace tessera::config {
namespace {

Field lr(double& value) {
  return {"lr", &value, "Learning rate", at_least(0), auto_is("5e-05"), kPerGroup, argument("learning_rate")};
}

Field betas(double& beta1, double& beta2) {
  return Field("betas", std::array{&beta1, &beta2}, "Decay of the two moments", from_to_below(0, 1),
               kAutoIsDefault, kPerGroup);
}

Field eps(double& value) {
  return Field("eps", &value, "Added to the denominator", at_least(0), kAutoIsDefault, kPerGroup,
               argument("adam_epsilon"));
}

Field weight_decay(double& value) {
  return Field("weight_decay", &value,
               "Weight decay; decoupled for AdamW, Lion, Muon, Adafactor and AdamW8bit", at_least(0),
               kAutoIsDefault, kPerGroup, argument("weight_decay"));
}

Field bias_correction(bool& value) {
  return {"bias_correction", &value, "Corrects the moments for starting at zero", kPerGroup};
}

Field maximize(bool& value) {
  return {"maximize", &value, "Steps along the gradient, not against it", kPerGroup};
}

template <bool kDecoupled>
std::vector<Field> fields(AdamOptionsOf<kDecoupled>& o, OptimizerModes* modes) {
  std::vector<Field> fields = {lr(o.lr), betas(o.beta1, o.beta2), eps(o.eps), weight_decay(o.weight_decay)};
  if (modes != nullptr) {
    fields.emplace_back("adam_w_mode", &modes->adam_w_mode,
                        "Adam: true decouples the weight decay (AdamW), false adds it to the gradient (L2). "
                        "AdamW: always true");
    fields.emplace_back("torch_adam", &modes->torch_adam,
                        "Only changes the default weight_decay to torch.optim.AdamW's 0.01 when the decay is "
                        "decoupled, as in DeepSpeed");
  }
  fields.push_back(bias_correction(o.bias_correction));
  fields.emplace_back("amsgrad", &o.amsgrad,
                      "Divides by the largest mean square so far, which is a third state", kPerGroup);
  fields.push_back(maximize(o.maximize));
  return fields;
}

std::vector<Field> fields(SGDOptions& o, OptimizerModes*) {
  return {lr(o.lr),
          weight_decay(o.weight_decay),
          {"momentum", &o.momentum, "Momentum factor", between(0, 1), kPerGroup},
          {"dampening", &o.dampening, "Dampening of the momentum", between(0, 1), kPerGroup},
          {"nesterov", &o.nesterov, "Nesterov momentum; needs momentum above 0 and dampening 0", kPerGroup},
          maximize(o.maximize)};
}

std::vector<Field> fields(AdagradOptions& o, OptimizerModes*) {
  return {lr(o.lr),
          eps(o.eps),
          weight_decay(o.weight_decay),
          {"lr_decay", &o.lr_decay, "lr is divided by 1 + (step - 1) * lr_decay", at_least(0), kPerGroup},
          maximize(o.maximize)};
}

std::vector<Field> fields(RMSpropOptions& o, OptimizerModes*) {
  return {lr(o.lr),
          {"alpha", &o.alpha, "Decay of the mean square", between(0, 1), kPerGroup},
          eps(o.eps),
          weight_decay(o.weight_decay),
          {"momentum", &o.momentum, "Momentum factor", between(0, 1), kPerGroup},
          {"centered", &o.centered, "Divides by the standard deviation, which needs one more state"},
          maximize(o.maximize)};
}

std::vector<Field> fields(LionOptions& o, OptimizerModes*) {
  return {lr(o.lr), betas(o.beta1, o.beta2), weight_decay(o.weight_decay)};
}

std::vector<Field> fields(LambOptions& o, OptimizerModes*) {
  return {lr(o.lr),
          betas(o.beta1, o.beta2),
          eps(o.eps),
          weight_decay(o.weight_decay),
          bias_correction(o.bias_correction),
          {"max_coeff", &o.max_coeff, "Upper bound of the trust ratio", above(0), kPerGroup},
          {"min_coeff", &o.min_coeff, "Lower bound of the trust ratio", at_least(0), kPerGroup}};
}

std::vector<Field> fields(MuonOptions& o, OptimizerModes* modes) {
  std::vector<Field> fields = {
      lr(o.lr),
      {"adam_lr_ratio", &o.adam_lr_ratio,
       "The rate of the parameters that AdamW updates is lr times this. Not given: see `adam_lr`; in a group "
       "with an lr: 1",
       at_least(0), kPerGroup},
      {"momentum", &o.momentum, "Momentum factor", between(0, 1), kPerGroup},
      {"nesterov", &o.nesterov, "Nesterov momentum", kPerGroup},
      weight_decay(o.weight_decay),
      {"ns_steps", &o.ns_steps, "Newton-Schulz iterations that make a matrix orthogonal", between(1, 99)},
      {"adjust_lr_fn", &o.adjust_lr_fn, "How the rate depends on a matrix' shape, as torch.optim.Muon's",
       choices({"original", "match_rms_adamw", "spectral_unclamped"})},
      betas(o.beta1, o.beta2),
      eps(o.eps),
      {"use_muon", &o.use_muon, "false: AdamW also updates the matrices", kPerGroup}};
  if (modes != nullptr) {
    fields.emplace_back("muon_lr", &modes->muon_lr, "Replaces lr for matrices", at_least(0), kNullable);
    fields.emplace_back(
        "adam_lr", &modes->adam_lr,
        "The rate of the parameters that AdamW updates. If not given: lr if that is given, else 0.0003",
        at_least(0), kNullable);
    Field method("ns_method", &modes->ns_method, "How a matrix is made orthogonal", choices({"standard"}));
    method.key.refused_choices["gram"] =
        "the same iteration on the Gram matrix in fp16; here it is torch.optim.Muon's, in bf16";
    fields.push_back(std::move(method));
  }
  return fields;
}

std::vector<Field> fields(AdafactorOptions& o, OptimizerModes*) {
  return {lr(o.lr),
          {"beta2_decay", &o.beta2_decay, "The second moment's decay is 1 - step to this power",
           between(-10, 0), kPerGroup},
          Field("eps", std::array{&o.eps1, &o.eps2},
                "Least second moment, and least value of a parameter's root mean square, by which the rate "
                "is multiplied",
                at_least(0), kPerGroup),
          {"d", &o.d, "Clips the update at this root mean square", at_least(1), kPerGroup},
          weight_decay(o.weight_decay),
          maximize(o.maximize)};
}

std::vector<Field> fields(AdamW8bitOptions& o, OptimizerModes*) {
  return {
      lr(o.lr),
      betas(o.beta1, o.beta2),
      eps(o.eps),
      weight_decay(o.weight_decay),
      {"optim_bits", &o.optim_bits, "Bits of a moment: 8, or 32 for fp32 ones", between(8, 32), kPerGroup},
      {"min_8bit_size", &o.min_8bit_size, "A parameter with fewer elements has fp32 moments",
       between(0, int64_t{1} << 40)}};
}

Key type_key() {
  Key key =
      make_key(Type::kChoice, "optimizer.type",
               "The update rule, in upper or lower case, also under DeepSpeed's class names (FusedAdam, "
               "DeepSpeedCPUAdam, …). Adam means AdamW unless `adam_w_mode` is false, as in DeepSpeed",
               kNullable, argument("optim"));
  key.default_json = str('"', type_of(OptimizerConfig{}.options), '"');
  for (const OptimizerOptions& options : all_types<OptimizerOptions>())
    key.choices.push_back(type_of(options));
  for (const auto& [type, names] :
       {std::pair{"AdamW", "adamw_torch adamw_torch_fused adamw_hf"},
        {"Adam", "fusedadam deepspeedcpuadam cpuadam"},
        {"LAMB", "fusedlamb"},
        {"Lion", "fusedlion deepspeedcpulion"},
        {"Adagrad", "cpuadagrad deepspeedcpuadagrad"},
        {"AdamW8bit", "adamw_8bit adamw_bnb_8bit paged_adamw_8bit pagedadamw8bit"}})
    for (const std::string& name : split_names(names)) key.choice_aliases[name] = type;
  for (const auto& [why, names] :
       {std::pair{"the 1-bit optimizers compress what is sent", "onebitadam zerooneadam onebitlamb"},
        {"muP rescales layers by their width", "muadam muadamw musgd"},
        {"this torch.optim update rule is not built in",
         "adadelta adamax asgd lbfgs nadam radam rprop sparseadam"}})
    for (const std::string& name : split_names(names)) key.refused_choices[name] = why;
  return key;
}

}  // namespace

std::vector<Field> fields_of(OptimizerOptions& options, OptimizerModes* modes) {
  return in_section("optimizer.params", std::visit([&](auto& o) { return fields(o, modes); }, options));
}

std::vector<Key> optimizer_keys() {
  std::vector<std::pair<std::string, std::vector<Key>>> types;
  for (OptimizerOptions& options : all_types<OptimizerOptions>()) {
    OptimizerModes modes;
    types.emplace_back(type_of(options), keys_of(fields_of(options, &modes)));
  }
  Key params =
      make_key(Type::kSection, "optimizer.params", "Hyper-parameters; which ones depends on the type");
  params.type_key = "optimizer.type";
  Key groups = make_key(
      Type::kSectionList, "optimizer.param_groups",
      "Our own key: other hyper-parameters for parameters chosen by name. Each element has `match` or "
      "`parameters`, and any of optimizer.params' keys marked \"per group\"; the first element that has a "
      "parameter wins");
  groups.default_json = "[]";
  groups.items_like = "optimizer.params";
  std::vector<Key> keys = {make_key(Type::kSection, "optimizer", "Which optimizer updates the shards"),
                           type_key(), params};
  std::ranges::move(merged_keys(types), std::back_inserter(keys));
  keys.push_back(groups);
  keys.push_back(make_key(Type::kTextList, "optimizer.param_groups[].match",
                          "Glob patterns (`*`, `?`) for parameter names, e.g. [\"*.bias\", \"*norm*\"]"));
  keys.push_back(make_key(Type::kTextList, "optimizer.param_groups[].parameters",
                          "Exact names of parameters, alone or together with patterns"));
  return keys;
}

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kParams = "optimizer.params";
constexpr const char* kMatch = "match";  // of a group: patterns
constexpr const char* kParameters = "parameters";

std::string group_path(size_t i) { return child_path("optimizer.param_groups", i); }

/// A field's names in ParamGroupConfig::params; empty when a group cannot change it.
std::vector<std::string> names_in_group(const Field& field) {
  if (!field.key.per_group) return {};
  if (field.key.type == Type::kPair) {
    const std::string stem = field.key.name() == "betas" ? "beta" : field.key.name();
    return {stem + "1", stem + "2"};
  }
  return {field.key.name()};
}

/// Assigns the group's value to the field; false when the group does not have one.
bool apply(const ParamGroupConfig& group, const Field& field) {
  json value = value_of(field);
  bool changed = false;
  const std::vector<std::string> names = names_in_group(field);
  for (size_t i = 0; i < names.size(); ++i) {
    const auto found = group.params.find(names[i]);
    if (found == group.params.end()) continue;
    json& number = value.is_array() ? value[i] : value;
    number = number.is_boolean() ? json(found->second != 0) : json(found->second);
    changed = true;
  }
  if (changed) assign(field, value);
  return changed;
}

/// Adds the field's numbers to a group's.
void add_numbers(const Field& field, std::map<std::string, double>& params) {
  const json value = value_of(field);
  const std::vector<std::string> names = names_in_group(field);
  for (size_t i = 0; i < names.size(); ++i) {
    const json& number = value.is_array() ? value[i] : value;
    params[names[i]] = number.is_boolean() ? number.get<bool>() : number.get<double>();
  }
}

/// A string or a list of strings; empty where the item has none.
std::vector<std::string> texts_of(const json& item, const char* key) {
  const auto found = item.find(key);
  if (found == item.end()) return {};
  if (found->is_string()) return {found->get<std::string>()};
  return found->get<std::vector<std::string>>();
}

ParamGroupConfig read_group(const json& item, const std::string& path, const OptimizerOptions& defaults,
                            ConfigReport* report) {
  ParamGroupConfig group;
  group.match = texts_of(item, kMatch);
  group.parameters = texts_of(item, kParameters);
  OptimizerOptions options = defaults;
  for (const Field& field : fields_of(options)) {
    const auto written = item.find(field.key.name());
    if (written == item.end() || !field.key.per_group) continue;
    read_field(field, *written, child_path(path, field.key.name()), report);
    add_numbers(field, group.params);
  }
  return group;
}

/// Sets lr and adam_lr_ratio by all the keys that are about rates. Throws KeyError.
void settle_rates(MuonOptions& options, const OptimizerModes& modes, const Document& document) {
  const auto is_given = [&](const char* key) {
    return value_at(*document.json, child_path(kParams, key)) != nullptr;
  };
  if (!is_given("lr") && !modes.muon_lr && !modes.adam_lr) return;
  const double given = options.lr, rest = MuonOptions{}.lr * MuonOptions{}.adam_lr_ratio;
  if (modes.muon_lr) options.lr = *modes.muon_lr;
  if (is_given("adam_lr_ratio")) {
    if (!modes.adam_lr) return;
    document.origins.fail(child_path(kParams, "adam_lr"),
                          "stands beside adam_lr_ratio; expected one of the two");
  }
  const double adam = modes.adam_lr.value_or(is_given("lr") ? given : rest);
  if (options.lr == 0 && adam != 0)
    document.origins.fail(child_path(kParams, modes.muon_lr ? "muon_lr" : "lr"),
                          str("found 0 beside ", adam,
                              " for the parameters that AdamW updates, whose rate is a "
                              "multiple of it; expected a number above 0"));
  options.adam_lr_ratio = options.lr == 0 ? 1 : adam / options.lr;
}

/// Checks options that depend on each other.
void check_options(const OptimizerOptions& options, const std::string& path, const Origins& origins) {
  if (const auto* sgd = std::get_if<SGDOptions>(&options);
      sgd && sgd->nesterov && (sgd->momentum <= 0 || sgd->dampening != 0))
    origins.fail(path + ".nesterov", str("found true with momentum ", sgd->momentum, " and dampening ",
                                         sgd->dampening, "; expected a momentum above 0 and dampening 0"));
  if (const auto* adam = std::get_if<AdamW8bitOptions>(&options);
      adam && adam->optim_bits != 8 && adam->optim_bits != 32)
    origins.fail(path + ".optim_bits", str("found ", adam->optim_bits, "; expected 8 or 32"));
  if (const auto* lamb = std::get_if<LambOptions>(&options); lamb && lamb->min_coeff > lamb->max_coeff)
    origins.fail(path + ".min_coeff", str("found ", lamb->min_coeff, ", more than max_coeff ",
                                          lamb->max_coeff, "; expected at most that"));
}

}  // namespace

std::vector<OptimizerOptions> group_options(const OptimizerConfig& optimizer) {
  std::vector<OptimizerOptions> groups = {optimizer.options};
  for (const ParamGroupConfig& group : optimizer.param_groups) {
    groups.push_back(optimizer.options);
    // A group's lr is that of all its parameters, as in DeepSpeed.
    if (auto* muon = std::get_if<MuonOptions>(&groups.back()); muon && group.params.contains("lr"))
      muon->adam_lr_ratio = 1;
    for (const Field& field : fields_of(groups.back())) apply(group, field);
  }
  return groups;
}

std::map<std::string, double> changed_options(OptimizerOptions base, OptimizerOptions options) {
  std::map<std::string, double> params;
  const std::vector<Field> before = fields_of(base), after = fields_of(options);
  for (size_t i = 0; i < before.size(); ++i)
    if (value_of(before[i]) != value_of(after[i])) add_numbers(after[i], params);
  return params;
}

/// Whether two numbers, or lists of them, are others; 0 and false are one, a number of fp32 is the one that
/// it rounds, and what is none differs from nothing: None is a default.
static bool differ(const json& a, const json& b) {
  if (a.is_array() && b.is_array() && a.size() == b.size()) {
    for (size_t i = 0; i < a.size(); ++i)
      if (differ(a[i], b[i])) return true;
    return false;
  }
  const auto number = [](const json& value) -> std::optional<double> {
    if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
    return value.is_number() ? std::optional(value.get<double>()) : std::nullopt;
  };
  const std::optional<double> left = number(a), right = number(b);
  return left && right && std::abs(*left - *right) > 1e-6 * std::max(std::abs(*left), std::abs(*right));
}

std::vector<std::string> differing_values(OptimizerOptions options, const json& saved, bool has_schedule) {
  std::vector<std::string> lines;
  const auto compare = [&](const std::string& name, const json& was, const json& is) {
    if (differ(was, is)) lines.push_back(str(name, ": it was ", was.dump(), ", and is ", is.dump()));
  };
  bool decays = false;
  for (const Field& field : fields_of(options)) {
    const std::string name = field.key.name();
    decays = decays || (name == "weight_decay" && value_of(field) != json(0.0));
    const char* const saved_name = name == "lr" && saved.contains("initial_lr") ? "initial_lr" : name.c_str();
    if (name == "lr" && has_schedule && !saved.contains("initial_lr")) continue;
    if (const auto was = saved.find(saved_name); was != saved.end()) compare(name, *was, value_of(field));
  }
  const bool is_adam_w = std::holds_alternative<AdamWOptions>(options);
  if (const auto was = saved.find("decoupled_weight_decay");
      was != saved.end() && decays && (is_adam_w || std::holds_alternative<AdamOptions>(options)))
    compare("decoupled_weight_decay", *was, is_adam_w);
  return lines;
}

OptimizerConfig read_optimizer(const Document& document, ConfigReport* report) {
  OptimizerConfig config;
  if (const json* type = value_at(*document.json, "optimizer.type"); type && type->is_string())
    config.options = *options_named<OptimizerOptions>(type->get<std::string>());
  const OptimizerOptions defaults = config.options;
  OptimizerModes modes;
  read_fields(fields_of(config.options, &modes), document, report);
  if (const auto* adam = std::get_if<AdamOptions>(&config.options); adam && modes.adam_w_mode)
    config.options = AdamWOptions{adam->lr,           adam->beta1,           adam->beta2,   adam->eps,
                                  adam->weight_decay, adam->bias_correction, adam->amsgrad, adam->maximize};
  if (auto* adam_w = std::get_if<AdamWOptions>(&config.options);
      adam_w && modes.torch_adam && !value_at(*document.json, str(kParams, ".weight_decay")))
    adam_w->weight_decay = 0.01;  // torch.optim.AdamW's default
  if (auto* muon = std::get_if<MuonOptions>(&config.options)) settle_rates(*muon, modes, document);
  if (const json* list = value_at(*document.json, "optimizer.param_groups"))
    for (size_t i = 0; i < list->size(); ++i)
      config.param_groups.push_back(read_group((*list)[i], group_path(i), defaults, report));
  return config;
}

ordered_json write_optimizer(const OptimizerConfig& optimizer) {
  ordered_json out;
  std::vector<OptimizerOptions> groups = group_options(optimizer);
  out["type"] = type_of(optimizer.options);
  for (const Field& field : fields_of(groups[0])) out["params"][field.key.name()] = value_of(field);
  const bool is_adam_w = std::holds_alternative<AdamWOptions>(optimizer.options);
  if (is_adam_w || std::holds_alternative<AdamOptions>(optimizer.options)) {
    out["params"]["adam_w_mode"] = is_adam_w;
    out["params"]["torch_adam"] = false;
  }
  out["param_groups"] = ordered_json::array();
  for (size_t i = 0; i < optimizer.param_groups.size(); ++i) {
    ordered_json item;
    const ParamGroupConfig& group = optimizer.param_groups[i];
    if (!group.match.empty() || group.parameters.empty()) item[kMatch] = group.match;
    if (!group.parameters.empty()) item[kParameters] = group.parameters;
    for (const Field& field : fields_of(groups[i + 1]))
      if (apply(optimizer.param_groups[i], field)) item[field.key.name()] = value_of(field);
    out["param_groups"].push_back(std::move(item));
  }
  return out;
}

void check_fields(OptimizerConfig& optimizer, Origins& origins, Problems& problems) {
  for (const Field& field : fields_of(optimizer.options))
    check_field(field, field.key.path, origins, problems);
  for (size_t i = 0; i < optimizer.param_groups.size(); ++i) {
    const ParamGroupConfig& group = optimizer.param_groups[i];
    const std::string path = group_path(i);
    origins.set_line(path, 1);
    const Key match{.type = Type::kTextList};
    problems.collect([&] {
      if (group.match.empty() && !group.parameters.empty()) return;
      if (const std::string wrong = mismatch(match, group.match); !wrong.empty())
        origins.fail(child_path(path, kMatch), wrong);
    });
    OptimizerOptions options = optimizer.options;
    std::vector<std::string> known = {kMatch, kParameters};
    std::map<std::string, double> unknown = group.params;
    for (const Field& field : fields_of(options)) {
      if (apply(group, field)) check_field(field, child_path(path, field.key.name()), origins, problems);
      for (const std::string& name : names_in_group(field)) unknown.erase(name);
      if (field.key.per_group) known.push_back(field.key.name());
    }
    for (const auto& [name, value] : unknown)
      problems.collect([&] { origins.fail(child_path(path, name), unknown_key(name, value, known)); });
  }
}

void check_together(const OptimizerConfig& optimizer, const Origins& origins) {
  for (size_t i = 0; i < optimizer.param_groups.size(); ++i)
    if (optimizer.param_groups[i].match.empty() && optimizer.param_groups[i].parameters.empty())
      origins.fail(child_path(group_path(i), kMatch), "is missing; expected a string or a list of strings");
  const std::vector<OptimizerOptions> groups = group_options(optimizer);
  for (size_t i = 0; i < groups.size(); ++i)
    check_options(groups[i], i == 0 ? kParams : group_path(i - 1), origins);
}

}  // namespace tessera::config
