#include "tools/memory/memory_estimate.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iostream>
#include <utility>

#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "engine/config/sharding_plan.h"
#include "tools/common/columns.h"
#include "tools/common/command_line.h"
#include "tools/memory/counted_model.h"
#include "train/memory_trial.h"
#include "train/report/report.h"
#include "zero/plan/memory_model.h"

namespace tessera::tools {
namespace {

using zero::Tier;

int64_t parse_num_params(const std::string& text) {
  std::string_view rest = text;
  const double value = take_number<double>(rest).value_or(0);
  double factor = 1;
  if (rest == "K" || rest == "k")
    factor = 1e3;
  else if (rest == "M" || rest == "m")
    factor = 1e6;
  else if (rest == "B" || rest == "b" || rest == "G")
    factor = 1e9;
  else if (!rest.empty())
    factor = 0;
  const double count = std::round(value * factor);
  if (!(count >= 1 && count <= 1e15) || std::abs(value * factor - count) > 1e-6 + 1e-15 * count)
    throw ConfigError("--params ", text.empty() ? "''" : text,
                      ": expected a number of parameters, such as 7.5e9, 7.5B or 350M");
  return static_cast<int64_t>(count);
}

DType parse_precision(const std::string& word) {
  const auto dtype = parse_dtype(word);
  if (!dtype || *dtype == DType::kFloat64)
    throw ConfigError("--precision ", word.empty() ? "''" : word, ": expected fp32, bf16 or fp16");
  return *dtype;
}

OptimizerConfig parse_optimizer(const std::string& type) {
  if (const auto options = options_named<OptimizerOptions>(type)) return {.options = *options};
  std::vector<std::string> names;
  for (const OptimizerOptions& options : all_types<OptimizerOptions>()) names.push_back(type_of(options));
  throw ConfigError("--optimizer ", type.empty() ? "''" : type, ": expected ", join(names, " or "));
}

CountedModel counted_by_flags(const EstimateFlags& flags) {
  CountedModel estimated;
  estimated.num_trainable = parse_num_params(flags.params);
  estimated.precision = flags.precision.empty() ? "bf16" : flags.precision;
  estimated.dtype = parse_precision(estimated.precision);
  estimated.optimizer = flags.optimizer.empty() ? "AdamW" : flags.optimizer;
  const OptimizerConfig optimizer = parse_optimizer(estimated.optimizer);
  if (std::holds_alternative<AdafactorOptions>(optimizer.options))
    throw ConfigError(
        "--optimizer Adafactor: its states depend on the shapes of the parameters; expected a "
        "configuration in place of --params, `tessera memory --estimate CONFIG`");
  estimated.num_states = num_states_of(optimizer);
  train::count_owned(optimizer, {{.name = "", .shape = {estimated.num_trainable}, .aliases = {}}}, estimated);
  estimated.largest_owned_bytes = 0;  // this was all of them
  estimated.groups = flags.groups;
  return estimated;
}

/// One decimal; of a small part of the unit (a share of thousands of ranks) two digits that are not 0.
std::string in_unit(int64_t bytes, double unit, size_t width) {
  const double value = static_cast<double>(bytes) / unit;
  int decimals = 1;
  if (bytes > 0 && value < 0.1)
    while (decimals < 5 && value * std::pow(10, decimals) < 10) ++decimals;
  return padded_left(fixed(value, decimals), width);
}

double unit_of(const CountedModel& estimated) {
  return estimated.bytes(0, 1, DType::kFloat32).total() >= 10'000'000'000 ? 1e9 : 1e6;
}

void print_stages(const CountedModel& estimated, int world) {
  const double unit = unit_of(estimated);
  // The paper accumulates gradients in the model's own dtype; Tessera in fp32, unless
  // data_types.grad_accum_dtype says otherwise.
  const bool two = estimated.dtype != DType::kFloat32 && estimated.accumulate != estimated.dtype;
  const int64_t snapshot = estimated.bytes(0, world, estimated.accumulate).snapshot;
  const std::string gradients = two ? str("gradients in ", name_of(estimated.dtype)) : "";
  std::cout << (unit == 1e9 ? "\nGB (10^9 bytes) a rank on " : "\nMB (10^6 bytes) a rank on ") << world
            << (world == 1 ? " rank" : " ranks")
            << (snapshot > 0 ? str("\nEach total has the copy for checkpoint.async, of CPU ranks: ",
                                   in_unit(snapshot, unit, 0))
                             : "")
            << "\n\n"
            << "          parameters  gradients  master  optimizer     total"
            << (two ? "   " + gradients : "") << '\n';
  const auto print = [&](const std::string& name, const auto& bytes_with) {
    const zero::StateBytes bytes = bytes_with(estimated.accumulate);
    std::cout << padded_right(name, 9) << in_unit(bytes.parameters, unit, 11)
              << in_unit(bytes.gradients, unit, 11) << in_unit(bytes.master, unit, 8)
              << in_unit(bytes.optimizer, unit, 11) << in_unit(bytes.total(), unit, 10);
    if (two) std::cout << in_unit(bytes_with(estimated.dtype).total(), unit, gradients.size() + 3);
    std::cout << '\n';
  };
  for (const int stage : {0, 1, 2, 3})
    print(str("stage ", stage), [&](DType accumulate) { return estimated.bytes(stage, world, accumulate); });
  if (const zero::GroupSizes& groups = estimated.groups; groups.shard + groups.secondary > 0 && world > 1)
    print(groups.shard > 0 ? str("mics ", groups.shard) : str("hpz ", groups.secondary),
          [&](DType accumulate) { return estimated.bytes_in_groups(world, accumulate); });
}

void check_groups(const zero::GroupSizes& groups, int world) {
  if (groups.shard > 0 && groups.secondary > 0)
    throw ConfigError("--mics-shard-size, --hpz-partition-size: expected one of them");
  for (const auto& [name, size] :
       {std::pair{"mics_shard_size", groups.shard}, {"zero_hpz_partition_size", groups.secondary}})
    if (size > 0 && world > 1 && world % size != 0)
      throw ConfigError("--world ", world, ": ", name, " is ", size, "; expected a multiple of it");
}

/// Of each setting: what is on the device, and what is on the tier below.
void print_tiers(const CountedModel& estimated, int world, const char* head,
                 std::initializer_list<std::pair<zero::Tiers, Tier>> settings) {
  const double unit = unit_of(estimated);
  std::cout << head;
  for (const int stage : {0, 1, 2, 3}) {
    std::cout << "stage " << stage << ' ';
    for (const auto& [tiers, below] : settings)
      for (const Tier tier : {Tier::kDevice, below}) {
        const zero::StateBytes bytes = estimated.bytes(stage, world, estimated.accumulate, tiers, tier);
        std::cout << (estimated.can_offload(zero::sharding_of(stage), world, tiers)
                          ? in_unit(bytes.total(), unit, 10)
                          : padded_left("-", 10));
      }
    std::cout << '\n';
  }
}

void print_fit(const CountedModel& estimated, const std::string& size, int given_world) {
  const int64_t budget = parse_size("--fit", size, /*bare_bytes=*/false);
  std::cout << "\nThe smallest number of ranks of which each fits into " << size
            << (estimated.async_checkpoints ? ", with the copy for checkpoint.async of CPU ranks" : "")
            << "\n\n"
            << "           in memory   optimizer on disk   parameters too\n";
  int smallest_stage = -1;
  bool any_fails = false;
  for (const int stage : {0, 1, 2, 3}) {
    std::cout << "stage " << stage;
    size_t width = 13;
    for (const zero::Tiers& tiers : {zero::Tiers{}, kOptimizerOnDisk, kAllOnDisk}) {
      const int64_t world = estimated.smallest_world(stage, tiers, budget);
      any_fails = any_fails || world == 0;
      std::cout << padded_left(world == 0 ? "-" : format_count(world), width);
      width = tiers.any_on_disk() ? 17 : 20;
      const int64_t wanted = given_world > 0 ? given_world : INT64_MAX;
      if (smallest_stage < 0 && !tiers.any_on_disk() && world > 0 && world <= wanted) smallest_stage = stage;
    }
    std::cout << '\n';
  }
  if (any_fails) std::cout << "\n-: none, because what is neither sharded nor on disk is more.\n";
  if (given_world == 0) return;
  std::cout << '\n'
            << (smallest_stage < 0
                    ? str("On ", train::counted(given_world, "rank"), " no stage fits in memory.")
                    : str("On ", train::counted(given_world, "rank"), " the smallest stage that fits is ",
                          smallest_stage, "."))
            << '\n';
}

}  // namespace

CountedModel print_memory_estimate(const std::string& config, const std::vector<std::string>& overrides,
                                   const EstimateFlags& flags, const Logger& log) {
  if (flags.params.empty() == config.empty())
    throw ConfigError("--estimate: expected either CONFIG or the size of a model, e.g. --params 7.5e9");
  if (!config.empty() && !(flags.precision.empty() && flags.optimizer.empty()))
    throw ConfigError(
        "--precision and --optimizer describe the model of --params; CONFIG has its own: expected --set for "
        "its keys");
  if (flags.world < 1 && flags.fit.empty())
    throw ConfigError("--estimate: expected --world, the number of ranks, or --fit, a size");
  if (!config.empty() && flags.groups.shard + flags.groups.secondary > 0)
    throw ConfigError(
        "--mics-shard-size and --hpz-partition-size are for --params; CONFIG has keys for them: expected "
        "--set "
        "zero_optimization.mics_shard_size=N or zero_optimization.zero_hpz_partition_size=N");
  if (!flags.fit.empty()) parse_size("--fit", flags.fit, /*bare_bytes=*/false);
  const CountedModel estimated =
      config.empty() ? counted_by_flags(flags) : count_model(config, overrides, log);
  check_groups(estimated.groups, flags.world);
  std::cout << "Model state of " << format_count(estimated.num_trainable)
            << (estimated.num_frozen > 0
                    ? str(" trainable and ", format_count(estimated.num_frozen), " frozen")
                    : "")
            << " parameters, " << estimated.precision << ", " << estimated.optimizer
            << ", by formula.\nActivations and buffers come on top: measure them (tessera memory CONFIG).\n";
  if (flags.world > 0) {
    print_stages(estimated, flags.world);
    print_tiers(estimated, flags.world,
                "\nThe same with state on disk, on CPU ranks (docs/offload.md)\n\n"
                "           optimizer on disk      parameters too\n"
                "            memory      disk    memory      disk\n",
                {{kOptimizerOnDisk, Tier::kDisk}, {kAllOnDisk, Tier::kDisk}});
    print_tiers(
        estimated, flags.world,  // a device whose memory is not the host's
        "\nThe same on GPUs, with state in the host's memory or on disk\n\n"
        "           optimizer on host      parameters too     both on disk\n"
        "            device      host    device      host    device      disk\n",
        {{kOptimizerOnHost, Tier::kHost}, {kAllOnHost, Tier::kHost}, {train::kDiskBehindHost, Tier::kDisk}});
  }
  if (!flags.fit.empty()) print_fit(estimated, flags.fit, flags.world);
  return estimated;
}

}  // namespace tessera::tools
