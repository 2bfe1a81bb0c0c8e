#include "tools/memory/counted_model.h"

#include <memory>
#include <utility>

#include "comm/init/self.h"
#include "core/str.h"
#include "engine/config/sharding_plan.h"
#include "engine/engine.h"
#include "engine/optimizer/optimizer_setup.h"
#include "tools/common/tasks.h"
#include "train/memory_trial.h"
#include "train/task/trainer_config.h"

namespace tessera::tools {

using zero::Tier;

zero::StateBytes CountedModel::bytes(int stage, int64_t world, DType accumulate, zero::Tiers tiers, Tier tier,
                                     bool one_copy_a_host) const {
  return bytes_of({.sharding = zero::sharding_of(stage),
                   .accumulate_dtype = accumulate,
                   .one_copy_a_host = one_copy_a_host,
                   .tiers = tiers},
                  world, tier);
}

zero::StateBytes CountedModel::bytes_in_groups(int64_t world, DType accumulate) const {
  return bytes_of({.sharding = zero::sharding_of(3), .accumulate_dtype = accumulate, .groups = groups}, world,
                  Tier::kDevice);
}

int64_t CountedModel::smallest_world(int stage, zero::Tiers tiers, int64_t budget_bytes) const {
  return zero::smallest_fitting_world(num_trainable + num_frozen, [&](int64_t world) {
    return can_offload(zero::sharding_of(stage), world, tiers) &&
           bytes(stage, world, accumulate, tiers).total() <= budget_bytes;
  });
}

int num_states_of(const OptimizerConfig& config) {
  const OptimizerSetup setup = set_up_optimizer(config);
  return static_cast<int>(zero::state_names_of({.kind = setup.kind, .groups = setup.groups}).size());
}

CountedModel count_model(const std::string& config, const std::vector<std::string>& given,
                         const Logger& log) {
  std::vector<std::string> overrides = given;  // what follows is for one rank here, whatever the world is
  overrides.insert(overrides.end(), {"train_batch_size=auto", "gradient_accumulation_steps=1",
                                     "zero_optimization.stage=3", "trainer.device=cpu"});
  const train::RunConfig run = train::load_run_config(config, 1, overrides);
  constexpr int kMany = 4096;  // ranks, of which one has next to nothing
  CountedModel model;
  model.precision = train::precision_of(run.engine);
  model.optimizer = type_of(run.engine.optimizer.options);
  model.groups = plan_sharding(run.engine, kMany, false).groups;
  EngineConfig alone = run.engine;
  alone.optimizer = {.options = SGDOptions{.lr = 0}};
  alone.scheduler = ConstantLrOptions{};
  alone.checkpoint.async = false;
  alone.zero = ZeroConfig();
  alone.zero.stage = 3;
  alone.train_batch_size = 0;  // of any world
  const std::unique_ptr<train::Task> task = tasks().make(run.model, run.data);
  InitOptions options;
  options.log = log;
  options.loaded_next = [](const std::string&) { return true; };  // values are not needed here
  Engine& engine = task->initialize(
      alone, std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{.size = kMany}), options);
  static_cast<train::ModelCount&>(model) = train::count_of(engine);
  model.num_states = num_states_of(run.engine.optimizer);
  train::count_owned(run.engine.optimizer, engine.sharded_model().layout().parameters(), model);
  model.async_checkpoints = run.engine.checkpoint.async;
  if (!model.by_type.empty() && !run.engine.autocast.enabled) {
    std::vector<std::string> types;
    for (const train::ModelCount::OfType& one : model.by_type) types.emplace_back(name_of(one.dtype));
    model.precision = join(types, " and ");
  }
  return model;
}

}  // namespace tessera::tools
