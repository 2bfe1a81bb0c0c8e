// CheckpointState to JSON and back, and errors for damaged ones.
#include "engine/checkpoint/checkpoint_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "checkpoint/checkpoint_error.h"

namespace tessera {
namespace {

CheckpointState sample() {
  CheckpointState state;
  state.global_steps = 7;
  state.skipped_steps = 1;
  state.micro_steps = 28;
  state.schedule_steps = 4;
  state.gradient_norm = 0.1;
  state.loss_scaler = {.scale = 65536, .num_updates = 8, .last_overflow = -1, .hysteresis = 2};
  state.optimizer = "AdamW";
  state.parameter_steps = {6, 0, 7};
  state.client_state = {{"epoch", 3}};
  return state;
}

TEST(CheckpointState, ThereAndBack) {
  CheckpointState state = sample();
  EXPECT_EQ(to_json(parse_checkpoint_state(to_json(state), 3, "c/a")), to_json(state));
  nlohmann::json older = to_json(state);
  older.erase("schedule_steps");
  EXPECT_EQ(parse_checkpoint_state(older, 3, "c/a").schedule_steps, 6) << "the steps that updated";
  state.gradient_norm = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(parse_checkpoint_state(to_json(state), 3, "c/a").gradient_norm));
}

TEST(CheckpointState, SaysWhatIsWrongAndWhere) {
  struct Case {
    std::function<void(nlohmann::json&)> damage;
    const char* expected;
  };
  const Case cases[] = {
      {[](auto& j) { j = 1; }, "c/a: state: found 1; expected an object"},
      {[](auto& j) { j.erase("micro_steps"); }, "c/a: state: \"micro_steps\" is missing"},
      {[](auto& j) { j["global_steps"] = -1; },
       "c/a: state: global_steps: found -1; expected an integer from 0"},
      {[](auto& j) { j["gradient_norm"] = "x"; },
       "c/a: state: gradient_norm: found \"x\"; expected a number"},
      {[](auto& j) { j["loss_scaler"] = nullptr; },
       "c/a: state: loss_scaler: found null; expected an object"},
      {[](auto& j) { j["loss_scaler"]["cur_scale"] = 0; },
       "c/a: state: loss_scaler.cur_scale: found 0; expected a number above 0"},
      {[](auto& j) { j["optimizer"]["type"] = 5; }, "c/a: state: optimizer.type: found 5; expected a string"},
      {[](auto& j) { j["optimizer"]["parameter_steps"] = {1, 2}; },
       "c/a: state: optimizer.parameter_steps: found a list of 2; expected a list of 3 integers"},
      {[](auto& j) { j["optimizer"]["parameter_steps"][1] = 0.5; },
       "c/a: state: optimizer.parameter_steps[1]: found 0.5; expected an integer from 0"},
      {[](auto& j) { j["optimizer"]["parameter_steps"][2] = std::numeric_limits<uint64_t>::max(); },
       "c/a: state: optimizer.parameter_steps[2]: found 18446744073709551615; expected an integer from 0"},
  };
  for (const Case& one : cases) {
    nlohmann::json json = to_json(sample());
    one.damage(json);
    try {
      parse_checkpoint_state(json, 3, "c/a");
      ADD_FAILURE() << "accepted; expected " << one.expected;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith(one.expected));
    }
  }
}

}  // namespace
}  // namespace tessera
