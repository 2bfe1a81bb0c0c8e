#include "train/memory/state_formulas.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "engine/config/sharding_plan.h"

namespace tessera::train {
namespace {

using nlohmann::ordered_json;
using zero::StateBytes;
using zero::Tier;

ordered_json coefficients(const zero::StateModel& state, DType dtype, Tier tier) {
  const auto of_one = [&](bool whole, bool trainable) {
    return zero::state_bytes(
        {.numel = whole ? 1 : 0, .shard_numel = whole ? 0 : 1, .dtype = dtype, .trainable = trainable}, state,
        tier);
  };
  const std::array<StateBytes, 4> each = {of_one(true, true), of_one(false, true), of_one(true, false),
                                          of_one(false, false)};
  ordered_json json = ordered_json::object();
  for (const auto& [name, bytes] : {std::pair{"parameters", &StateBytes::parameters},
                                    {"gradients", &StateBytes::gradients},
                                    {"master", &StateBytes::master},
                                    {"optimizer", &StateBytes::optimizer}}) {
    ordered_json row = ordered_json::array();
    bool any = false;
    for (const StateBytes& one : each) {
      row.push_back(one.*bytes);
      any = any || one.*bytes != 0;
    }
    if (any) json[name] = std::move(row);
  }
  return json;
}

}  // namespace

ordered_json state_formulas(const ModelCount& model) {
  ordered_json json = {{"num_trainable", model.num_trainable},
                       {"num_frozen", model.num_frozen},
                       {"owned", model.owned_state_bytes},
                       {"precision", name_of(model.dtype)},
                       {"gradients", name_of(model.accumulate)}};
  for (const TierSetting& setting : kTierSettings)
    json["tiers"].push_back({{"key", setting.key}, {"name", setting.name}});
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const DType accumulate : std::set<DType>{DType::kFloat32, dtype, model.accumulate})
      for (const int stage : {0, 1, 2, 3})
        for (const TierSetting& setting : kTierSettings) {
          const zero::StateModel state = {.sharding = zero::sharding_of(stage),
                                          .accumulate_dtype = accumulate,
                                          .num_states = model.num_states,
                                          .tiers = setting.tiers};
          ordered_json row = {{"stage", stage},
                              {"tiers", setting.key},
                              {"precision", name_of(dtype)},
                              {"gradients", name_of(accumulate)}};
          row["ranks"] = can_offload(state.sharding, 2, setting.tiers)   ? "any"
                         : can_offload(state.sharding, 1, setting.tiers) ? "one"
                                                                         : "none";
          for (const auto& [place, tier] :
               {std::pair{"device", Tier::kDevice}, {"host", Tier::kHost}, {"disk", Tier::kDisk}})
            if (ordered_json bytes = coefficients(state, dtype, tier); !bytes.empty())
              row["bytes"][place] = std::move(bytes);
          json["rows"].push_back(std::move(row));
        }
  return json;
}

}  // namespace tessera::train
