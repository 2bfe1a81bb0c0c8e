// The keys of the optimizers, which depend on optimizer.type.
#include <algorithm>

#include "core/str.h"
#include "engine/config/keys.h"

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
  return Field("weight_decay", &value, "Weight decay; decoupled for AdamW and Lion", at_least(0),
               kAutoIsDefault, kPerGroup, argument("weight_decay"));
}

Field bias_correction(bool& value) {
  return {"bias_correction", &value, "Corrects the moments for starting at zero", kPerGroup};
}

template <class Adam>
std::vector<Field> adam_fields(Adam& o, AdamModes* modes) {
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
  return fields;
}
std::vector<Field> fields(AdamOptions& o, AdamModes* modes) { return adam_fields(o, modes); }
std::vector<Field> fields(AdamWOptions& o, AdamModes* modes) { return adam_fields(o, modes); }

std::vector<Field> fields(SGDOptions& o, AdamModes*) {
  return {lr(o.lr),
          weight_decay(o.weight_decay),
          {"momentum", &o.momentum, "Momentum factor", between(0, 1), kPerGroup},
          {"dampening", &o.dampening, "Dampening of the momentum", between(0, 1), kPerGroup},
          {"nesterov", &o.nesterov, "Nesterov momentum; needs momentum above 0 and dampening 0", kPerGroup}};
}

std::vector<Field> fields(AdagradOptions& o, AdamModes*) {
  return {lr(o.lr),
          eps(o.eps),
          weight_decay(o.weight_decay),
          {"lr_decay", &o.lr_decay, "lr is divided by 1 + (step - 1) * lr_decay", at_least(0), kPerGroup}};
}

std::vector<Field> fields(LionOptions& o, AdamModes*) {
  return {lr(o.lr), betas(o.beta1, o.beta2), weight_decay(o.weight_decay)};
}

std::vector<Field> fields(LambOptions& o, AdamModes*) {
  return {lr(o.lr),
          betas(o.beta1, o.beta2),
          eps(o.eps),
          weight_decay(o.weight_decay),
          bias_correction(o.bias_correction),
          {"max_coeff", &o.max_coeff, "Upper bound of the trust ratio", above(0), kPerGroup},
          {"min_coeff", &o.min_coeff, "Lower bound of the trust ratio", at_least(0), kPerGroup}};
}

Key type_key() {
  Key key = make_key(Type::kChoice, "optimizer.type",
                     "The update rule, in any case, also under DeepSpeed's class names (FusedAdam, "
                     "DeepSpeedCPUAdam, …). Adam means AdamW unless `adam_w_mode` is false, as in DeepSpeed",
                     kNullable, argument("optim"));
  key.default_json = str('"', type_of(OptimizerConfig{}.options), '"');
  for (const OptimizerOptions& options : all_types<OptimizerOptions>())
    key.choices.push_back(type_of(options));
  for (const auto& [type, names] : {std::pair{"AdamW", "adamw_torch adamw_torch_fused adamw_hf"},
                                    {"Adam", "fusedadam deepspeedcpuadam cpuadam"},
                                    {"LAMB", "fusedlamb"},
                                    {"Lion", "fusedlion deepspeedcpulion"},
                                    {"Adagrad", "cpuadagrad deepspeedcpuadagrad"}})
    for (const std::string& name : split_names(names)) key.choice_aliases[name] = type;
  for (const auto& [why, names] :
       {std::pair{"the 1-bit optimizers compress what is sent", "onebitadam zerooneadam onebitlamb"},
        {"muP rescales layers by their width", "muadam muadamw musgd"},
        {"its update needs whole matrices, not flat shards", "muon"},
        {"this torch.optim update rule is not built in",
         "adadelta adafactor adamax asgd lbfgs nadam radam rmsprop rprop sparseadam"}})
    for (const std::string& name : split_names(names)) key.refused_choices[name] = why;
  return key;
}

}  // namespace

std::vector<Field> fields_of(OptimizerOptions& options, AdamModes* modes) {
  return in_section("optimizer.params", std::visit([&](auto& o) { return fields(o, modes); }, options));
}

std::vector<Key> optimizer_keys() {
  std::vector<std::pair<std::string, std::vector<Key>>> types;
  for (OptimizerOptions& options : all_types<OptimizerOptions>()) {
    AdamModes modes;
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
  std::vector<Key> keys = {make_key(Type::kSection, "optimizer", "Which optimizer steps on the shards"),
                           type_key(), params};
  std::ranges::move(merged_keys(types), std::back_inserter(keys));
  keys.push_back(groups);
  keys.push_back(make_key(Type::kTextList, "optimizer.param_groups[].match",
                          "Glob patterns (`*`, `?`) for parameter names, e.g. [\"*.bias\", \"*norm*\"]"));
  keys.push_back(make_key(Type::kTextList, "optimizer.param_groups[].parameters",
                          "Names of parameters as they are, in place of patterns or beside them"));
  return keys;
}

}  // namespace tessera::config
