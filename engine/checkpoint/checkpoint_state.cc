#include "engine/checkpoint/checkpoint_state.h"

#include <cmath>
#include <limits>

#include "checkpoint/checkpoint_error.h"
#include "core/json/json_field.h"
#include "core/str.h"

namespace tessera {
namespace {

using nlohmann::json;

LossScaler::State parse_loss_scaler(const JsonField& field) {
  LossScaler::State state;
  state.scale = field["cur_scale"].number();
  if (!std::isfinite(state.scale) || state.scale <= 0) field["cur_scale"].fail("a number above 0");
  state.num_updates = field["cur_iter"].integer(0);
  state.last_overflow = field["last_overflow_iter"].integer(-1);
  state.hysteresis = field["cur_hysteresis"].integer(0);
  return state;
}

}  // namespace

json to_json(const CheckpointState& state) {
  json out;
  out["global_steps"] = state.global_steps;
  out["skipped_steps"] = state.skipped_steps;
  out["micro_steps"] = state.micro_steps;
  out["schedule_steps"] = state.schedule_steps;
  out["gradient_norm"] = std::isfinite(state.gradient_norm) ? json(state.gradient_norm) : json(nullptr);
  const LossScaler::State& scaler = state.loss_scaler;
  out["loss_scaler"] = {{"cur_scale", scaler.scale},
                        {"cur_iter", scaler.num_updates},
                        {"last_overflow_iter", scaler.last_overflow},
                        {"cur_hysteresis", scaler.hysteresis}};
  out["optimizer"] = {{"type", state.optimizer}, {"parameter_steps", state.parameter_steps}};
  if (!state.by_muon.empty()) out["optimizer"]["by_muon"] = state.by_muon;
  out["module"] = to_json(state.module);
  out["config"] = state.config;
  out["client_state"] = state.client_state;
  return out;
}

CheckpointState parse_checkpoint_state(const json& value, size_t num_parameters, const std::string& source) {
  const std::string where = str(source, ": state");
  const JsonField field = JsonField::of<CheckpointError>(value, where);
  CheckpointState state;
  state.global_steps = field["global_steps"].integer(0);
  state.skipped_steps = field["skipped_steps"].integer(0);
  state.micro_steps = field["micro_steps"].integer(0);
  state.schedule_steps = value.contains("schedule_steps") ? field["schedule_steps"].integer(0)
                                                          : state.global_steps - state.skipped_steps;
  const bool norm_is_finite = !field["gradient_norm"].value().is_null();
  state.gradient_norm =
      norm_is_finite ? field["gradient_norm"].number() : std::numeric_limits<double>::infinity();
  state.loss_scaler = parse_loss_scaler(field["loss_scaler"]);
  const JsonField optimizer = field["optimizer"];
  state.optimizer = optimizer["type"].text();
  const JsonField steps = optimizer["parameter_steps"];
  if (steps.list_size() != num_parameters) steps.fail(str("a list of ", num_parameters, " integers"));
  steps.for_each([&](const JsonField& step) { state.parameter_steps.push_back(step.integer(0)); });
  if (optimizer.value().contains("by_muon")) {
    const JsonField by_muon = optimizer["by_muon"];
    if (by_muon.list_size() != num_parameters)
      by_muon.fail(str("a list of ", num_parameters, " of true or false"));
    by_muon.for_each([&](const JsonField& one) { state.by_muon.push_back(one.boolean()); });
  }
  state.config = field["config"].value();
  state.client_state = field["client_state"].value();
  return state;
}

}  // namespace tessera
