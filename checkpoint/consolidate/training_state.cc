#include "checkpoint/consolidate/training_state.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/python_value.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/value_tag.h"
#include "core/json/json_field.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

// [Note: what Python's engine adds] The client state of a run in Python is an object with these keys: the
// user's own, the engine's number of samples, the live options of the param groups, the user's schedule. In a
// run of the command `tessera train` all of it is the user's.
constexpr const char* kEncoding = "tessera.encoding";
constexpr const char* kSamples = "tessera.global_samples";
constexpr const char* kGroups = "tessera.param_groups";
constexpr const char* kScheduler = "tessera.lr_scheduler";
constexpr const char* kSchedulerClass = "tessera.lr_scheduler_class";
constexpr const char* kClientState = "client_state";

constexpr std::string_view kPrefix = "tessera.";

const json* find(const json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

bool is_one_of(const std::string& word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// torch's options of a class and their defaults; null: another class.
json torch_options(const std::string& optimizer) {
  if (is_one_of(optimizer, {"Adam", "AdamW"}))
    return {{"amsgrad", false},        {"maximize", false},
            {"foreach", nullptr},      {"capturable", false},
            {"differentiable", false}, {"fused", nullptr},
            {"weight_decay", 0.0},     {"decoupled_weight_decay", optimizer == "AdamW"}};
  if (optimizer == "SGD")
    return {{"momentum", 0.0},   {"dampening", 0.0},   {"weight_decay", 0.0},     {"nesterov", false},
            {"maximize", false}, {"foreach", nullptr}, {"differentiable", false}, {"fused", nullptr}};
  if (optimizer == "Adagrad")
    return {{"lr_decay", 0.0},   {"weight_decay", 0.0}, {"initial_accumulator_value", 0.0},
            {"maximize", false}, {"foreach", nullptr},  {"differentiable", false},
            {"fused", nullptr}};
  if (optimizer == "RMSprop")
    return {{"momentum", 0.0},    {"centered", false}, {"weight_decay", 0.0},    {"capturable", false},
            {"foreach", nullptr}, {"maximize", false}, {"differentiable", false}};
  return nullptr;
}

/// The options of a group by the configuration: those of the optimizer, with the group's own in their place.
json configured_group(const json& optimizer, size_t group) {
  json options = json::object();
  if (const json* params = find(optimizer, "params"); params != nullptr && params->is_object())
    options = *params;
  const json* const groups = find(optimizer, "param_groups");
  if (group > 0 && groups != nullptr && groups->is_array() && group - 1 < groups->size())
    for (const auto& [key, value] : (*groups)[group - 1].items())
      if (key != "match" && key != "parameters") options[key] = value;
  for (const char* ours : {"adam_w_mode", "torch_adam"}) options.erase(ours);
  if (json* betas = options.contains("betas") ? &options["betas"] : nullptr;
      betas != nullptr && betas->is_array())
    *betas = {{kValueTag, "tuple"}, {"value", json(*betas)}};
  return options;
}

size_t num_groups(const SavedLayout& layout) {
  int last = -1;
  for (const SavedParameter& parameter : layout.parameters) last = std::max(last, parameter.group);
  return static_cast<size_t>(last + 1);
}

/// Reads the state's parts one by one.
class Parser {
 public:
  Parser(const Manifest& manifest, const std::string& source,
         const std::function<std::vector<json>(const Manifest&)>& scheduled)
      : manifest_(manifest), where_(str(source, ": state")), scheduled_options_(scheduled) {}

  TrainingState parse() {
    const json& value = manifest_.state;
    const JsonField field = JsonField::of<CheckpointError>(value, where_);
    state_.steps.assign(manifest_.layout.parameters.size(), 0);
    if (value.contains("global_steps")) state_.global_steps = field["global_steps"].integer(0);
    if (value.contains("skipped_steps")) state_.skipped_steps = field["skipped_steps"].integer(0);
    if (const json* config = find(value, "config"); config != nullptr && config->is_object())
      state_.config = *config;
    parse_client_state();
    if (value.contains("optimizer")) parse_optimizer(field["optimizer"]);
    parse_groups();
    parse_schedule();
    const json* const fp16 = find(state_.config, "fp16");
    if (const json* scaler = find(value, "loss_scaler"); scaler != nullptr && scaler->is_object())
      if ((fp16 != nullptr && fp16->value("enabled", false)) ||
          scaler->contains("dynamic"))  // foreign_source.cc
        state_.loss_scaler = *scaler;
    return std::move(state_);
  }

 private:
  void note(std::string line) { state_.notes.push_back(std::move(line)); }

  void parse_client_state() {
    const json* const saved = find(manifest_.state, kClientState);
    if (saved == nullptr || !saved->is_object()) return;
    const bool from_python = saved->contains(kEncoding);
    const json* const users = from_python ? find(*saved, kClientState) : saved;
    if (users != nullptr && users->is_object())
      for (const auto& [key, value] : users->items()) {
        if (const std::string lacking = unwritable(value); lacking.empty())
          state_.client_state[key] = value;
        else
          note(str("client_state: ", key, " is left out: it has ", lacking));
      }
    // A run of the command has the same batch in all of its steps, as far as its configuration says.
    if (const json* batch = find(state_.config, "train_batch_size");
        !from_python && batch != nullptr && batch->is_number_integer())
      state_.global_samples = state_.global_steps * batch->get<int64_t>();
    if (!from_python) return;
    if (const json* samples = find(*saved, kSamples); samples != nullptr && samples->is_number_integer())
      state_.global_samples = samples->get<int64_t>();
    groups_ = find(*saved, kGroups);
    scheduler_ = find(*saved, kScheduler);
    for (const auto& [key, value] : saved->items())
      if (key.starts_with(kPrefix) &&
          !is_one_of(key, {kEncoding, kSamples, kGroups, kScheduler, kSchedulerClass}))
        note(str(key, " is left out: other programs have nothing for it"));
  }

  void parse_optimizer(const JsonField& optimizer) {
    state_.optimizer = optimizer["type"].text();
    const JsonField steps = optimizer["parameter_steps"];
    if (steps.list_size() != state_.steps.size())
      steps.fail(str("a list of ", state_.steps.size(), " integers"));
    size_t i = 0;
    steps.for_each([&](const JsonField& step) { state_.steps[i++] = step.integer(0); });
    if (manifest_.rank_file(0).datasets.find(blob_dataset("optimizer_state")) != nullptr)
      note(str("the states of ", state_.optimizer,
               " are left out: this optimizer keeps them itself, and only Tessera reads them"));
    if (optimizer.value().contains("by_muon"))
      note("Muon: its matrices have momentum in exp_avg, the other parameters the states of Adam");
  }

  void parse_groups() {
    const json* const optimizer = find(state_.config, "optimizer");
    const json defaults = torch_options(state_.optimizer);
    const size_t count = num_groups(manifest_.layout);
    const bool is_live = groups_ != nullptr && groups_->is_array() && groups_->size() >= count;
    std::vector<json> scheduled;
    if (!is_live && optimizer != nullptr && scheduled_options_) scheduled = scheduled_options_(manifest_);
    for (size_t group = 0; group < count; ++group) {
      const json configured = optimizer != nullptr ? configured_group(*optimizer, group) : json::object();
      json options = json::object();
      if (is_live && (*groups_)[group].is_object()) {
        for (const auto& [key, value] : (*groups_)[group].items())
          if (const std::string lacking = unwritable(value); lacking.empty())
            options[key] = value;
          else
            note(str("param group ", group, ": ", key, " is left out: it has ", lacking));
      } else {
        options = configured;
        if (group < scheduled.size()) options.update(scheduled[group]);
      }
      if (defaults.is_object())
        for (const auto& [key, value] : defaults.items())
          if (!options.contains(key)) options[key] = value;
      if (!options.contains("initial_lr")) {  // from which torch's schedules begin
        if (configured.contains("lr"))
          options["initial_lr"] = configured["lr"];
        else if (options.contains("lr"))
          options["initial_lr"] = options["lr"];
      }
      if (!options.contains("lr"))
        note(str(
            "param group ", group,
            ": the checkpoint has no options of it; the program that goes on must set lr and the others"));
      state_.groups.push_back(std::move(options));
    }
    if (!is_live && scheduled.empty() && configured_schedule() != nullptr)
      note(
          "lr is the configuration's: the checkpoint does not have the schedule's rate; set it, or let a "
          "schedule set it");
  }

  /// The type of the configuration's schedule; null: none.
  const std::string* configured_schedule() const {
    const json* const section = find(state_.config, "scheduler");
    const json* const type = section != nullptr ? find(*section, "type") : nullptr;
    return type != nullptr && type->is_string() ? type->get_ptr<const std::string*>() : nullptr;
  }

  void parse_schedule() {
    if (scheduler_ != nullptr) {
      if (const std::string lacking = unwritable(*scheduler_); lacking.empty())
        state_.lr_scheduler = *scheduler_;
      else
        note(str("the schedule's state is left out: it has ", lacking));
      return;
    }
    const std::string* const type = configured_schedule();
    if (type == nullptr) return;
    const int64_t steps = manifest_.state.value("schedule_steps", state_.global_steps - state_.skipped_steps);
    if (is_one_of(*type, {"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})) {
      state_.lr_scheduler = {{"last_batch_iteration", steps - 1}};  // DeepSpeed's count from -1
      return;
    }
    const json* const params = find(state_.config["scheduler"], "params");
    const json* const interval = params != nullptr ? find(*params, "interval") : nullptr;
    if (interval != nullptr && *interval == "epoch") {
      note(str("the place of the schedule (", *type,
               ") is left out: it counts epochs, the checkpoint updates"));
      return;
    }
    json rates = json::array();
    for (const json& group : state_.groups)
      if (group.contains("lr")) rates.push_back(group["lr"]);
    state_.lr_scheduler = {{"last_epoch", steps}, {"_step_count", steps + 1}, {"_last_lr", rates}};
  }

  const Manifest& manifest_;
  std::string where_;
  const std::function<std::vector<json>(const Manifest&)>& scheduled_options_;
  const json* groups_ = nullptr;
  const json* scheduler_ = nullptr;
  TrainingState state_;
};

}  // namespace

TrainingState training_state(const Manifest& manifest, const std::string& source,
                             const std::function<std::vector<json>(const Manifest&)>& scheduled_options) {
  return Parser(manifest, source, scheduled_options).parse();
}

bool has_state(const json& group, const std::string& state) {
  const auto is_on = [&](const char* option) {
    const json* const value = find(group, option);
    return value == nullptr ||
           (value->is_boolean() ? value->get<bool>() : !value->is_number() || value->get<double>() != 0);
  };
  if (state == "momentum_buffer") return is_on("momentum");
  if (state == "max_exp_avg_sq") return is_on("amsgrad");
  if (state == "grad_avg") return is_on("centered");
  return true;
}

bool counts_steps(const std::string& optimizer) { return optimizer != "SGD" && optimizer != "Lion"; }

}  // namespace tessera::checkpoint
