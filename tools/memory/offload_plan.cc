#include "tools/memory/offload_plan.h"

#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "core/str.h"
#include "tools/common/columns.h"

namespace tessera::tools {

using zero::Tier;
using zero::Tiers;

OffloadPlan plan_of(const CountedModel& model, int stage, int64_t world, Tiers tiers,
                    const HostSpeed& speed) {
  OffloadPlan plan;
  const auto bytes = [&](Tier tier) {
    return model.bytes(stage, world, model.accumulate_dtype, tiers, tier);
  };
  plan.device = bytes(Tier::kDevice);
  plan.host = bytes(Tier::kHost);
  plan.disk = bytes(Tier::kDisk);
  const int64_t trainable = (model.num_trainable + world - 1) / world;
  const int64_t frozen = (model.num_frozen + world - 1) / world;
  const zero::Placement placement =
      zero::placement_of(zero::sharding_of(stage), /*trainable=*/true, /*one_copy_a_host=*/false, tiers);
  plan.gradients_down = trainable * size_bytes(model.accumulate_dtype);
  if (placement.gradient_sharded) plan.gradients_each_way = plan.gradients_down;
  if (placement.copies_masters_to_device()) plan.values_up = trainable * size_bytes(model.dtype);
  if (placement.on_host(placement.values))
    plan.shards_up = 2 * (trainable + frozen) * size_bytes(model.dtype);
  plan.update_s = static_cast<double>(trainable) / speed.updated_parameters;
  return plan;
}

void print_offload_plan(const CountedModel& model, int64_t world) {
  const HostSpeed speed;
  struct Column {
    const char* section;
    int stage;
    Tiers tiers;
  };
  const std::vector<Column> columns = {
      {"optimizer", 1, kOptimizerOnHost}, {"optimizer", 2, kOptimizerOnHost}, {"and param", 3, kAllOnHost}};
  std::vector<OffloadPlan> plans;
  plans.reserve(columns.size());
  for (const Column& column : columns)
    plans.push_back(plan_of(model, column.stage, world, column.tiers, speed));

  constexpr size_t kLabel = 41, kCell = 13;
  const auto row = [&](const std::string& label, const std::function<std::string(size_t)>& cell) {
    std::cout << padded_right(label, kLabel);
    for (size_t i = 0; i < columns.size(); ++i) std::cout << padded_left(cell(i), kCell);
    std::cout << '\n';
  };
  const auto bytes_row = [&](const std::string& label, const std::function<int64_t(const OffloadPlan&)>& of) {
    row(label, [&](size_t i) { return fixed(static_cast<double>(of(plans[i])) / 1e9, 1); });
  };
  const auto copy_row = [&](const std::string& label, int64_t OffloadPlan::* bytes) {
    row(label, [&](size_t i) {
      const auto moved = static_cast<double>(plans[i].*bytes);
      return moved == 0 ? "-" : str(fixed(moved / 1e9, 1), "  ", fixed(moved / speed.link_bytes, 2));
    });
  };
  std::cout << "\nA GPU's rank with state in the host's memory: computed, not measured\n\n";
  row("offload_", [&](size_t i) { return columns[i].section; });
  row("", [&](size_t i) { return str("stage ", columns[i].stage); });
  bytes_row("on the device, GB: parameters", [](const OffloadPlan& plan) { return plan.device.parameters; });
  bytes_row("  gradients", [](const OffloadPlan& plan) { return plan.device.gradients; });
  bytes_row("on the host, GB: parameters", [](const OffloadPlan& plan) { return plan.host.parameters; });
  bytes_row("  gradients", [](const OffloadPlan& plan) { return plan.host.gradients; });
  bytes_row("  masters", [](const OffloadPlan& plan) { return plan.host.master; });
  bytes_row("  optimizer states", [](const OffloadPlan& plan) { return plan.host.optimizer; });
  bytes_row("  in all", [](const OffloadPlan& plan) { return plan.host.total(); });
  std::cout << "GB, and seconds at " << fixed(speed.link_bytes / 1e9, 0) << " GB/s each way:\n";
  copy_row("  gradients down, last micro-step", &OffloadPlan::gradients_down);
  copy_row("  down, and up again, each before it", &OffloadPlan::gradients_each_way);
  copy_row("  new values up, once a step", &OffloadPlan::values_up);
  copy_row("  shards up for gathers, each micro-step", &OffloadPlan::shards_up);
  row(str("update, s, at ", fixed(speed.updated_parameters / 1e9, 1), "e9 parameters/s"),
      [&](size_t i) { return fixed(plans[i].update_s, 2); });
}

}  // namespace tessera::tools
