#include "train/memory/state_formulas.h"

#include <algorithm>
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
    return zero::state_bytes({.numel = whole ? 1 : 0,
                              .shard_numel = whole ? 0 : 1,
                              .piece_numel = whole ? 0 : 1,
                              .dtype = dtype,
                              .trainable = trainable},
                             state, tier);
  };
  const std::array<StateBytes, 4> each = {of_one(true, true), of_one(false, true), of_one(true, false),
                                          of_one(false, false)};
  ordered_json json = ordered_json::object();
  for (const auto& [name, bytes] : {std::pair{"parameters", &StateBytes::parameters},
                                    {"gradients", &StateBytes::gradients},
                                    {"master", &StateBytes::master},
                                    {"optimizer", &StateBytes::optimizer},
                                    {"snapshot", &StateBytes::snapshot}}) {
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

/// As ShardedModel::state_model().
bool has_snapshot(const ModelCount& model, const zero::Tiers& tiers) {
  return model.async_checkpoints && !tiers.any_below_device();
}

}  // namespace

StateBytes ModelCount::bytes_of(zero::StateModel state, int64_t world, Tier tier) const {
  state.num_states = num_states;
  state.async_checkpoints = has_snapshot(*this, state.tiers);
  StateBytes sum;
  for (const OfType& one :
       by_type.empty() ? std::vector<OfType>{{dtype, num_trainable, num_frozen}} : by_type)
    for (const auto& [numel, trainable] : {std::pair{one.num_trainable, true}, {one.num_frozen, false}})
      sum +=
          zero::state_bytes(zero::elements_of(numel, world, one.dtype, trainable, state.groups), state, tier);
  if (tier == Tier::kDevice)
    sum.optimizer += std::max(largest_owned_bytes, (owned_state_bytes + world - 1) / world);
  return sum;
}

bool ModelCount::can_offload(zero::Sharding sharding, int64_t world, zero::Tiers tiers) const {
  return tessera::can_offload(sharding, world, tiers) &&
         !(owned_state_bytes > 0 && tiers.device_memory_is_separate && tiers.any_below_device());
}

ordered_json state_formulas(const ModelCount& model) {
  ordered_json json = {{"num_trainable", model.num_trainable},  {"num_frozen", model.num_frozen},
                       {"owned", model.owned_state_bytes},      {"largest_owned", model.largest_owned_bytes},
                       {"snapshot", model.async_checkpoints},   {"precision", name_of(model.dtype)},
                       {"gradients", name_of(model.accumulate)}};
  json["by_type"] = ordered_json::array();
  std::set<DType> types = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const ModelCount::OfType& one : model.by_type) {
    types.insert(one.dtype);
    json["by_type"].push_back({{"precision", name_of(one.dtype)},
                               {"num_trainable", one.num_trainable},
                               {"num_frozen", one.num_frozen}});
  }
  for (const TierSetting& setting : kTierSettings)
    json["tiers"].push_back({{"key", setting.key}, {"name", setting.name}});
  for (const DType dtype : types)
    for (const DType accumulate : is_compute_type(dtype)
                                      ? std::set{DType::kFloat32, dtype, model.accumulate}
                                      : std::set{DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      for (const int stage : {0, 1, 2, 3})
        for (const TierSetting& setting : kTierSettings) {
          const zero::StateModel state = {.sharding = zero::sharding_of(stage),
                                          .accumulate_dtype = accumulate,
                                          .num_states = model.num_states,
                                          .async_checkpoints = has_snapshot(model, setting.tiers),
                                          .tiers = setting.tiers};
          ordered_json row = {{"stage", stage},
                              {"tiers", setting.key},
                              {"precision", name_of(dtype)},
                              {"gradients", name_of(accumulate)}};
          row["ranks"] = model.can_offload(state.sharding, 2, setting.tiers)   ? "any"
                         : model.can_offload(state.sharding, 1, setting.tiers) ? "one"
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
