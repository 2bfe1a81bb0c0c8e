// The table of coefficients, evaluated as the page does it, beside the functions that it is made of.
#include "train/memory/state_formulas.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "core/str.h"
#include "engine/config/sharding_plan.h"

namespace tessera::train {
namespace {

using nlohmann::ordered_json;

int64_t evaluate(const ordered_json& row, const char* place, const char* part, const ModelCount& model,
                 int64_t world) {
  const ordered_json bytes = row.value("bytes", ordered_json::object()).value(place, ordered_json::object());
  if (!bytes.contains(part)) return 0;
  const auto shard = [&](int64_t count) { return (count + world - 1) / world; };
  const ordered_json& each = bytes.at(part);
  return each[0].get<int64_t>() * model.num_trainable + each[1].get<int64_t>() * shard(model.num_trainable) +
         each[2].get<int64_t>() * model.num_frozen + each[3].get<int64_t>() * shard(model.num_frozen);
}

TEST(StateFormulas, GiveTheBytesOfTheMemoryModelInEverySetting) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 20; ++i) {
    const ModelCount model{.num_trainable = static_cast<int64_t>(random() % 2'000'000'000),
                           .num_frozen = i % 2 == 0 ? 0 : static_cast<int64_t>(random() % 1'000'000'000),
                           .num_states = static_cast<int>(random() % 4),
                           .owned_state_bytes = 7 * i,
                           .dtype = DType::kBFloat16,
                           .accumulate = i % 3 == 0 ? DType::kBFloat16 : DType::kFloat32,
                           .async_checkpoints = i % 2 == 1};
    const auto world = static_cast<int64_t>(1 + random() % 5000);
    const ordered_json table = state_formulas(model);
    EXPECT_EQ(table.at("owned"), 7 * i);
    EXPECT_EQ(table.at("rows").size(), size_t{4} * 6 * (i % 3 == 0 ? 7 : 5));
    for (const ordered_json& row : table.at("rows")) {
      SCOPED_TRACE(str(row.dump(), " on ", world));
      const int stage = row.at("stage");
      const auto setting = std::find_if(kTierSettings.begin(), kTierSettings.end(),
                                        [&](const TierSetting& one) { return one.key == row.at("tiers"); });
      ASSERT_NE(setting, kTierSettings.end());
      const zero::StateModel state{.sharding = zero::sharding_of(stage),
                                   .accumulate_dtype = *parse_dtype(row.at("gradients").get<std::string>()),
                                   .num_states = model.num_states,
                                   .async_checkpoints = i % 2 == 1 && !setting->tiers.any_below_device(),
                                   .tiers = setting->tiers};
      const DType dtype = *parse_dtype(row.at("precision").get<std::string>());
      // The host updates no shards of an optimizer whose states have owners.
      const bool is_refused = i > 0 && setting->tiers.device_memory_is_separate;
      EXPECT_EQ(row.at("ranks") != "none", !is_refused && can_offload(state.sharding, 1, setting->tiers));
      EXPECT_EQ(row.at("ranks") == "any",
                !is_refused && can_offload(state.sharding, world + 1, setting->tiers));
      for (const auto& [place, tier] : {std::pair{"device", zero::Tier::kDevice},
                                        {"host", zero::Tier::kHost},
                                        {"disk", zero::Tier::kDisk}}) {
        zero::StateBytes bytes =
            zero::estimate_state_bytes(model.num_trainable, static_cast<int>(world), dtype, state, tier);
        bytes += zero::state_bytes(zero::elements_of(model.num_frozen, world, dtype, false, {}), state, tier);
        EXPECT_EQ(evaluate(row, place, "parameters", model, world), bytes.parameters);
        EXPECT_EQ(evaluate(row, place, "gradients", model, world), bytes.gradients);
        EXPECT_EQ(evaluate(row, place, "master", model, world), bytes.master);
        EXPECT_EQ(evaluate(row, place, "optimizer", model, world), bytes.optimizer);
        EXPECT_EQ(evaluate(row, place, "snapshot", model, world), bytes.snapshot);
      }
    }
  }
}

TEST(StateFormulas, CountParametersInTheTypesThatTheyKeep) {
  // Adapters of 10 elements in fp32 on a frozen base of 1000 in bf16 and 500 in int8, with Adam.
  const ModelCount model{
      .num_trainable = 10,
      .num_frozen = 1500,
      .num_states = 2,
      .by_type = {{DType::kFloat32, 10, 0}, {DType::kBFloat16, 0, 1000}, {DType::kInt8, 0, 500}}};
  const zero::StateBytes whole = model.bytes_of({}, 2, zero::Tier::kDevice);
  EXPECT_EQ(whole.parameters, 10 * 4 + 1000 * 2 + 500);
  EXPECT_EQ(whole.total() - whole.parameters, 10 * (4 + 8));
  EXPECT_EQ(model.bytes_of({.sharding = zero::sharding_of(3)}, 2, zero::Tier::kDevice).total(),
            whole.total() / 2);
  const ordered_json table = state_formulas(model);
  EXPECT_EQ(table.at("by_type").size(), 3u);
  for (const ordered_json& one : table.at("by_type"))  // each has what the page looks up
    for (const char* const gradients : {"fp32", "bf16"})
      EXPECT_EQ(std::count_if(table.at("rows").begin(), table.at("rows").end(),
                              [&](const ordered_json& row) {
                                return row.at("precision") == one.at("precision") &&
                                       row.at("gradients") == gradients;
                              }),
                one.at("precision") == "fp32" && gradients == std::string("bf16") ? 0 : 4 * 6);
}

TEST(StateFormulas, AnOwnerHasTheStateOfTheLargestParameter) {
  const ModelCount model{.num_trainable = 100, .owned_state_bytes = 200, .largest_owned_bytes = 60};
  EXPECT_EQ(model.bytes_of({}, 2, zero::Tier::kDevice).optimizer, 100);
  EXPECT_EQ(model.bytes_of({}, 50, zero::Tier::kDevice).optimizer, 60);
  EXPECT_EQ(model.bytes_of({}, 50, zero::Tier::kDisk).optimizer, 0);
}

}  // namespace
}  // namespace tessera::train
