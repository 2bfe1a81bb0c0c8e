#include "engine/checkpoint_state.h"

#include <cmath>
#include <limits>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Reads the members of one object, with errors that name them.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail(object, "an object");
  }

  const json& member(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) throw CheckpointError(str(where_, ": has no \"", name, "\""));
    return *found;
  }
  int64_t integer(const char* name, int64_t least = 0) const {
    const json& value = member(name);
    if (!value.is_number_integer() || value > std::numeric_limits<int64_t>::max() || value.get<int64_t>() < least)
      Reader(where_, name).fail(value, str("an integer of at least ", least));
    return value.get<int64_t>();
  }
  double number(const char* name) const {
    const json& value = member(name);
    if (!value.is_number()) Reader(where_, name).fail(value, "a number");
    return value.get<double>();
  }
  std::string text(const char* name) const {
    const json& value = member(name);
    if (!value.is_string()) Reader(where_, name).fail(value, "a string");
    return value.get<std::string>();
  }
  [[noreturn]] void fail(const json& found, const std::string& expected) const {
    throw CheckpointError(str(where_, ": found ", found.dump().substr(0, 60), "; expected ", expected));
  }

 private:
  Reader(const std::string& where, const char* name) : object_(kNothing), where_(str(where, ".", name)) {}
  static inline const json kNothing = json::object();
  const json& object_;
  std::string where_;
};

LossScaler::State parse_loss_scaler(const json& value, const std::string& where) {
  const Reader reader(value, where);
  LossScaler::State state;
  state.scale = reader.number("cur_scale");
  if (!std::isfinite(state.scale) || state.scale <= 0) Reader(value, str(where, ".cur_scale")).fail(reader.member("cur_scale"), "a number above 0");
  state.num_updates = reader.integer("cur_iter");
  state.last_overflow = reader.integer("last_overflow_iter", -1);
  state.hysteresis = reader.integer("cur_hysteresis");
  return state;
}

}  // namespace

json to_json(const CheckpointState& state) {
  json out;
  out["global_steps"] = state.global_steps;
  out["skipped_steps"] = state.skipped_steps;
  out["micro_steps"] = state.micro_steps;
  out["gradient_norm"] = std::isfinite(state.gradient_norm) ? json(state.gradient_norm) : json(nullptr);
  const LossScaler::State& scaler = state.loss_scaler;
  out["loss_scaler"] = {{"cur_scale", scaler.scale},
                        {"cur_iter", scaler.num_updates},
                        {"last_overflow_iter", scaler.last_overflow},
                        {"cur_hysteresis", scaler.hysteresis}};
  out["optimizer"] = {{"type", state.optimizer}, {"parameter_steps", state.parameter_steps}};
  out["config"] = state.config;
  out["client_state"] = state.client_state;
  return out;
}

CheckpointState parse_checkpoint_state(const json& value, size_t num_parameters, const std::string& source) {
  const std::string where = str(source, ": state");
  const Reader reader(value, where);
  CheckpointState state;
  state.global_steps = reader.integer("global_steps");
  state.skipped_steps = reader.integer("skipped_steps");
  state.micro_steps = reader.integer("micro_steps");
  const bool norm_is_finite = !reader.member("gradient_norm").is_null();
  state.gradient_norm = norm_is_finite ? reader.number("gradient_norm") : std::numeric_limits<double>::infinity();
  state.loss_scaler = parse_loss_scaler(reader.member("loss_scaler"), where + ".loss_scaler");
  const Reader optimizer(reader.member("optimizer"), where + ".optimizer");
  state.optimizer = optimizer.text("type");
  const json& steps = optimizer.member("parameter_steps");
  if (!steps.is_array() || steps.size() != num_parameters)
    Reader(json::object(), where + ".optimizer.parameter_steps").fail(steps, str("a list of ", num_parameters, " integers"));
  for (const json& step : steps) {
    if (!step.is_number_integer() || step < 0) Reader(json::object(), where + ".optimizer.parameter_steps").fail(step, "integers of at least 0");
    state.parameter_steps.push_back(step.get<int64_t>());
  }
  state.config = reader.member("config");
  state.client_state = reader.member("client_state");
  return state;
}

}  // namespace tessera
