#include "train/memory/memory_advice.h"

#include <algorithm>

#include "core/str.h"
#include "engine/config/sharding_plan.h"
#include "zero/plan/gradient_slots.h"

namespace tessera::train {
namespace {

using zero::Tier;

/// Looks for settings with which model state is small enough.
class StateAdvice {
 public:
  StateAdvice(const Shortage& shortage, const EngineConfig& config, const zero::Layout& layout,
              const zero::StateModel& model)
      : config_(config),
        layout_(layout),
        model_(model),
        now_(held(model, layout.world_size())),
        limit_(now_ - shortage.missing()) {
    // Where ranks of a host share memory, they do at every stage that shards the optimizer.
    model_.one_copy_a_host |= model_.ranks_a_host > 1;
  }

  std::vector<std::string> all() const {
    std::vector<std::string> advice;
    if (limit_ <= 0) return advice;
    for (const std::string& change : {stage_or_world(), offload()})
      if (!change.empty()) advice.push_back(change);
    return advice;
  }

 private:
  int64_t held(const zero::StateModel& model, int64_t world) const {
    return held_bytes(layout_, model, config_, world);
  }

  /// Returns what is held with another configuration.
  int64_t held_with(const EngineConfig& config, int64_t world) const {
    const ShardingPlan plan =
        plan_sharding(config, static_cast<int>(world), model_.tiers.device_memory_is_separate);
    zero::StateModel model = model_;
    model.sharding = plan.sharding;
    model.tiers = plan.tiers;
    return held_bytes(layout_, model, config, world);
  }

  std::string with(const std::string& change, int64_t bytes) const {
    return str(change, " (model state of a rank ", megabytes(bytes), ", now ", megabytes(now_), ")");
  }

  /// Returns the words that a change which needs sharded parameters is followed by.
  const char* at_stage_3() const {
    return zero::sharding_of(config_.zero.stage).parameters ? "" : " at stage 3";
  }

  std::string stage_or_world() const {
    const int world = layout_.world_size();
    for (int higher = config_.zero.stage + 1; higher <= zero::kMaxStage && world > 1; ++higher)
      if (const int64_t bytes = held_with(at_stage(config_, higher, world), world); bytes <= limit_)
        return with(str("zero_optimization.stage ", higher), bytes);
    if (model_.groups.shard > 0) return "";  // a group's ranks hold a copy, however many groups there are
    int64_t numel = 0;
    for (const zero::UnitSpec& unit : layout_.units()) numel += unit.numel;
    const EngineConfig most = at_stage(config_, zero::kMaxStage, world);
    const int64_t ranks =
        zero::smallest_fitting_world(numel, [&](int64_t size) { return held_with(most, size) <= limit_; });
    return ranks <= world ? "" : with(str(ranks, " ranks", at_stage_3()), held_with(most, ranks));
  }

  std::string offload() const {
    const int world = layout_.world_size();
    const std::string device = model_.tiers.device_memory_is_separate ? "cpu" : "nvme";
    const Tier below = model_.tiers.device_memory_is_separate ? Tier::kHost : Tier::kDisk;
    if (!can_offload(zero::sharding_of(config_.zero.stage), world, {.optimizer = below}) ||
        model_.groups.shard > 0)
      return "";
    EngineConfig config = config_;
    if (model_.tiers.optimizer == Tier::kDevice) {
      config.zero.offload_optimizer.device = device;
      if (const int64_t bytes = held_with(config, world); bytes <= limit_)
        return with(str("zero_optimization.offload_optimizer.device \"", device, "\""), bytes);
    }
    if (model_.tiers.parameters != Tier::kDevice || model_.groups.secondary > 0) return "";
    config = at_stage(config, zero::kMaxStage, world);
    config.zero.offload_param.device = device;
    const int64_t bytes = held_with(config, world);
    return bytes > limit_ ? ""
                          : with(str("zero_optimization.offload_optimizer.device and offload_param.device \"",
                                     device, "\"", at_stage_3()),
                                 bytes);
  }

  const EngineConfig& config_;
  const zero::Layout& layout_;
  zero::StateModel model_;
  const int64_t now_;
  const int64_t limit_;  ///< what model state may be
};

/// The largest batch whose activations leave room; 0: none does, or it is not known what there were.
int64_t fitting_batch(const Shortage& shortage) {
  if (!shortage.activations) return 0;
  const auto held = static_cast<double>(*shortage.activations);
  const double all = held + static_cast<double>(shortage.for_activations ? shortage.wanted : 0);
  const double room = all - static_cast<double>(shortage.missing());
  if (all <= 0 || room <= 0) return 0;
  return std::min(static_cast<int64_t>(static_cast<double>(shortage.batch) * room / all), shortage.batch - 1);
}

void add_batch(const Shortage& shortage, const EngineConfig& config, std::vector<std::string>& advice) {
  const int64_t batch = shortage.batch_key.empty() ? 0 : fitting_batch(shortage);
  if (batch == 0) return;
  advice.push_back(str(shortage.batch_key, " of at most about ", batch, " (now ", shortage.batch, ")",
                       shortage.trains ? str(" with more gradient_accumulation_steps (now ",
                                             config.gradient_accumulation_steps, ")")
                                       : ""));
}

/// How much recomputation frees is not known before it is tried: at most all that was in use.
void add_recomputation(const Shortage& shortage, const EngineConfig& config,
                       std::vector<std::string>& advice) {
  if (!shortage.trains || config.activations.policy != "none") return;
  if (shortage.activations.value_or(0) < shortage.missing()) return;
  advice.push_back(str("activation_checkpointing.policy \"block\" (activations were ",
                       megabytes(*shortage.activations), ")"));
}

}  // namespace

std::string megabytes(int64_t bytes) { return printed("%.1f MB", static_cast<double>(bytes) / 1e6); }

/// Elements of the gradient slots.
static int64_t slots_numel(const zero::Layout& layout, const zero::StateModel& model,
                           const EngineConfig& config, int64_t world) {
  const zero::Placement placement =
      zero::placement_of(model.sharding, true, model.one_copy_a_host, model.tiers);
  const zero::ReductionMode mode = zero::reduction_mode(
      placement, config.zero.reduce_each_micro_step,
      config.communication_dtype.value_or(model.accumulate_dtype) == model.accumulate_dtype,
      world == 1 && (config.prescale_gradients || config.gradient_predivide_factor == 1));
  std::vector<int64_t> numels;
  for (const zero::UnitSpec& unit : layout.units())
    if (unit.trainable) numels.push_back(unit.numel);
  if (!zero::through_slots(mode) || numels.empty()) return 0;
  return zero::gradient_buffer_numel(numels, static_cast<int>(config.zero.communication_buffers));
}

int64_t held_bytes(const zero::Layout& layout, const zero::StateModel& model, const EngineConfig& config,
                   int64_t world) {
  const ZeroConfig& zero = config.zero;
  int64_t bytes = slots_numel(layout, model, config, world) *
                  size_bytes(config.communication_dtype.value_or(model.accumulate_dtype));
  int64_t largest_unit = 0, largest_part = 0;  // the latter in fp32
  for (const zero::UnitSpec& unit : layout.units()) {
    const zero::StateElements elements =
        zero::elements_of(unit.numel, world, unit.dtype, unit.trainable, model.groups);
    bytes += zero::state_bytes(elements, model).total();
    largest_unit = std::max(largest_unit, unit.numel * size_bytes(unit.dtype));
    largest_part = std::max(largest_part, elements.shard_numel * size_bytes(DType::kFloat32));
  }
  const bool one_copy = model.one_copy_a_host && model.tiers.parameters == Tier::kDevice;
  if (model.sharding.parameters && !one_copy)
    bytes += std::min<int64_t>(zero.communication_buffers, layout.num_units()) * largest_unit;
  if (model.tiers.optimizer == Tier::kDisk && !model.tiers.device_memory_is_separate)
    bytes += largest_part * 2 * zero.offload_optimizer.buffer_count;
  if (model.tiers.parameters == Tier::kDisk && !model.tiers.device_memory_is_separate)
    bytes += largest_part * zero.offload_param.buffer_count;
  return bytes;
}

std::vector<std::string> memory_advice(const Shortage& shortage, const EngineConfig& config,
                                       const zero::Layout& layout, const zero::StateModel& model) {
  std::vector<std::string> advice = StateAdvice(shortage, config, layout, model).all();
  add_batch(shortage, config, advice);
  add_recomputation(shortage, config, advice);
  return advice;
}

}  // namespace tessera::train
