#include "tools/memory_estimate.h"

#include <charconv>
#include <cstdint>
#include <iostream>
#include <memory>

#include "comm/self.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/engine.h"
#include "engine/optimizer_setup.h"
#include "tools/columns.h"
#include "tools/command_line.h"
#include "tools/tasks.h"
#include "train/trainer_config.h"
#include "zero/memory_model.h"

namespace tessera::tools {
namespace {

int64_t parse_count(const std::string& text) {
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  double factor = 1;
  const std::string rest(stop, text.data() + text.size());
  if (rest == "K" || rest == "k")
    factor = 1e3;
  else if (rest == "M" || rest == "m")
    factor = 1e6;
  else if (rest == "B" || rest == "b" || rest == "G")
    factor = 1e9;
  else if (!rest.empty())
    factor = 0;
  if (error != std::errc() || !(value * factor >= 1 && value * factor <= 1e15))
    throw ConfigError(str("--params ", text.empty() ? "''" : text,
                          ": expected a number of parameters, such as 7.5e9, 7.5B or 350M"));
  return static_cast<int64_t>(value * factor);
}

DType parse_precision(const std::string& word) {
  const auto dtype = parse_dtype(word);
  if (!dtype || *dtype == DType::kFloat64)
    throw ConfigError(str("--precision ", word.empty() ? "''" : word, ": expected fp32, bf16 or fp16"));
  return *dtype;
}

/// The number of fp32 state tensors of the optimizer.
int num_states_of(const OptimizerConfig& config) {
  const OptimizerSetup setup = set_up_optimizer(config);
  return static_cast<int>(kernels::state_names(setup.kind, setup.groups.front()).size());
}

OptimizerConfig parse_optimizer(const std::string& type) {
  if (const auto options = options_named<OptimizerOptions>(type)) return {.options = *options};
  std::vector<std::string> names;
  for (const OptimizerOptions& options : all_types<OptimizerOptions>()) names.push_back(type_of(options));
  throw ConfigError(str("--optimizer ", type.empty() ? "''" : type, ": expected ", join(names, " or ")));
}

/// What an estimate is made of.
struct Estimated {
  int64_t num_trainable = 0, num_frozen = 0;
  DType dtype = DType::kFloat32;
  DType accumulate_dtype = DType::kFloat32;
  int num_states = 0;
  std::string precision, optimizer;  // in words

  zero::StateBytes bytes(int stage, int64_t world, DType accumulate) const {
    const zero::StateModel model{
        .sharding = zero::sharding_of(stage), .accumulate_dtype = accumulate, .num_states = num_states};
    zero::StateBytes sum = zero::estimate_state_bytes(num_trainable, static_cast<int>(world), dtype, model);
    return sum += zero::state_bytes({num_frozen, (num_frozen + world - 1) / world, dtype, false}, model);
  }
  /// As zero::smallest_world.
  int64_t smallest_world(int stage, int64_t budget_bytes) const {
    return zero::smallest_fitting_world(num_trainable + num_frozen, [&](int64_t world) {
      return bytes(stage, world, accumulate_dtype).total() <= budget_bytes;
    });
  }
};

Estimated estimated_of_flags(const EstimateFlags& flags) {
  Estimated estimated;
  estimated.num_trainable = parse_count(flags.params);
  estimated.precision = flags.precision.empty() ? "bf16" : flags.precision;
  estimated.dtype = parse_precision(estimated.precision);
  estimated.optimizer = flags.optimizer.empty() ? "AdamW" : flags.optimizer;
  estimated.num_states = num_states_of(parse_optimizer(estimated.optimizer));
  return estimated;
}

/// Makes the configuration's model, in this process and on the CPU, to count it; nothing is trained.
Estimated estimated_of_config(const std::string& config, const std::vector<std::string>& given,
                              const Logger& log) {
  std::vector<std::string> overrides = {"train_batch_size=auto",
                                        "gradient_accumulation_steps=1"};  // for any world
  overrides.insert(overrides.end(), given.begin(), given.end());
  overrides.insert(overrides.end(), {"zero_optimization.stage=0", "trainer.device=cpu"});
  const train::RunConfig run = train::load_run_config(config, 1, overrides);
  Estimated estimated;
  estimated.dtype = run.engine.compute_dtype();
  estimated.accumulate_dtype = run.engine.grad_accum_dtype.value_or(DType::kFloat32);
  estimated.precision = train::precision_of(run.engine);
  estimated.optimizer = type_of(run.engine.optimizer.options);
  estimated.num_states = num_states_of(run.engine.optimizer);
  EngineConfig alone = run.engine;
  alone.optimizer = {.options = SGDOptions{.lr = 0}};
  alone.scheduler = ConstantLrOptions{};
  alone.checkpoint.async = false;
  const std::unique_ptr<train::Task> task = tasks().make(run.model, run.data);
  InitOptions options;
  options.log = log;
  options.loaded_next = [](const std::string&) { return true; };  // values are not needed here
  Engine& engine =
      task->initialize(alone, std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{}), options);
  const zero::Layout& layout = engine.sharded_model().layout();
  for (int i = 0; i < static_cast<int>(layout.parameters().size()); ++i)
    (layout.units()[layout.slice(i).unit].trainable ? estimated.num_trainable : estimated.num_frozen) +=
        layout.parameters()[i].numel();
  return estimated;
}

std::string in_unit(int64_t bytes, double unit, size_t width) {
  return padded_left(fixed(static_cast<double>(bytes) / unit, 1), width);
}

void print_stages(const Estimated& estimated, int world) {
  const double unit = estimated.bytes(0, 1, DType::kFloat32).total() >= 10'000'000'000 ? 1e9 : 1e6;
  // The paper accumulates gradients in the model's own dtype; Tessera in fp32, unless
  // data_types.grad_accum_dtype says otherwise.
  const bool two = estimated.dtype != DType::kFloat32 && estimated.accumulate_dtype != estimated.dtype;
  const std::string gradients = two ? str("gradients in ", name_of(estimated.dtype)) : "";
  std::cout << (unit == 1e9 ? "\nGB (10^9 bytes) a rank on " : "\nMB (10^6 bytes) a rank on ") << world
            << (world == 1 ? " rank" : " ranks") << "\n\n"
            << "          parameters  gradients  master  optimizer     total"
            << (two ? "   " + gradients : "") << '\n';
  for (const int stage : {0, 1, 2, 3}) {
    const zero::StateBytes bytes = estimated.bytes(stage, world, estimated.accumulate_dtype);
    std::cout << "stage " << stage << "  " << in_unit(bytes.parameters, unit, 11)
              << in_unit(bytes.gradients, unit, 11) << in_unit(bytes.master, unit, 8)
              << in_unit(bytes.optimizer, unit, 11) << in_unit(bytes.total(), unit, 10);
    if (two)
      std::cout << in_unit(estimated.bytes(stage, world, estimated.dtype).total(), unit,
                           gradients.size() + 3);
    std::cout << '\n';
  }
}

void print_fit(const Estimated& estimated, const std::string& size, int given_world) {
  const int64_t budget = parse_size("--fit", size, /*bare_bytes=*/false);
  std::cout << "\nTo fit into " << size << " a rank\n\n";
  int smallest_stage = -1;
  for (const int stage : {0, 1, 2, 3}) {
    const int64_t world = estimated.smallest_world(stage, budget);
    std::cout << "stage " << stage << "  "
              << (world == 0 ? "at no number of ranks: what it does not shard is larger alone"
                             : str("from ", format_count(world), world == 1 ? " rank on" : " ranks on"))
              << '\n';
    const int64_t wanted = given_world > 0 ? given_world : INT64_MAX;
    if (smallest_stage < 0 && world > 0 && world <= wanted) smallest_stage = stage;
  }
  if (given_world == 0) return;
  std::cout << '\n'
            << (smallest_stage < 0
                    ? str("On ", given_world, " ranks no stage fits.")
                    : str("On ", given_world, " ranks the smallest stage that fits is ", smallest_stage, "."))
            << '\n';
}

}  // namespace

void print_memory_estimate(const std::string& config, const std::vector<std::string>& overrides,
                           const EstimateFlags& flags, const Logger& log) {
  if (flags.params.empty() == config.empty())
    throw ConfigError("--estimate: expected either CONFIG or the size of a model, e.g. --params 7.5e9");
  if (!config.empty() && !(flags.precision.empty() && flags.optimizer.empty()))
    throw ConfigError(
        "--precision and --optimizer describe the model of --params; CONFIG has its own: expected --set for "
        "its keys");
  if (flags.world < 1 && flags.fit.empty())
    throw ConfigError("--estimate: expected --world, the number of ranks, or --fit, a size");
  if (!flags.fit.empty()) parse_size("--fit", flags.fit, /*bare_bytes=*/false);
  const Estimated estimated =
      config.empty() ? estimated_of_flags(flags) : estimated_of_config(config, overrides, log);
  std::cout << "Model state of " << format_count(estimated.num_trainable)
            << (estimated.num_frozen > 0
                    ? str(" trainable and ", format_count(estimated.num_frozen), " frozen")
                    : "")
            << " parameters, " << estimated.precision << ", " << estimated.optimizer
            << ", by formula.\nActivations and buffers come on top: measure them (tessera memory CONFIG).\n";
  if (flags.world > 0) print_stages(estimated, flags.world);
  if (!flags.fit.empty()) print_fit(estimated, flags.fit, flags.world);
}

}  // namespace tessera::tools
