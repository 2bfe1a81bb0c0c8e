#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/value_tag.h"
#include "core/error.h"
#include "core/log.h"
#include "core/str.h"
#include "engine/config/optimizer.h"
#include "engine/config/parse.h"
#include "engine/optimizer/lr_schedule.h"
#include "tools/commands.h"
#include "tools/common/checkpoint_pass.h"
#include "tools/common/command_line.h"
#include "train/run/run_path.h"

namespace tessera::tools {
namespace {

using checkpoint::ConvertTarget;
using nlohmann::json;

struct ConvertFlags {
  std::string source;
  std::string output;
  std::string target;
  std::string tag;
  std::string dtype;
};

ConvertTarget parse_target(const std::string& word) {
  if (const auto target = checkpoint::parse_convert_target(word)) return *target;
  throw ConfigError("--to ", word.empty() ? "''" : word,
                    ": expected tessera, universal, dcp, pt, safetensors or h5");
}

DType output_dtype_of(const std::string& word, ConvertTarget target) {
  if (target == ConvertTarget::kTessera || target == ConvertTarget::kUniversal)
    throw ConfigError("--dtype with --to ", name_of(target),
                      ": its weights are fp32 masters; expected --to dcp, pt, safetensors or h5");
  return parse_output_dtype(word);
}

/// The rates, and the betas of OneCycle, that the schedule of the checkpoint's configuration has for the next
/// step.
std::vector<json> scheduled_options(const checkpoint::Manifest& manifest) {
  try {
    const json& state = manifest.state;
    const EngineConfig config = parse_engine_config(
        state.at("config").dump(), {.world_size = manifest.world_size()}, "the checkpoint's config");
    std::vector<double> base_lrs;
    for (const OptimizerOptions& group : config::group_options(config.optimizer))
      base_lrs.push_back(std::visit([](const auto& options) { return options.lr; }, group));
    const LrSchedule schedule(config.scheduler, base_lrs);
    const auto steps = state.at("schedule_steps").get<int64_t>();
    std::vector<json> options;
    for (size_t group = 0; group < schedule.num_groups(); ++group) {
      json& of_group = options.emplace_back(json::object());
      of_group["lr"] = schedule.lr(steps, group);
      if (const auto betas = schedule.betas(steps, group))
        of_group["betas"] = {{checkpoint::kValueTag, "tuple"}, {"value", {betas->beta1, betas->beta2}}};
    }
    return options;
  } catch (const ConfigError&) {  // of another version, or it needs the number of steps of an epoch
    return {};
  } catch (const json::exception&) {
    return {};
  }
}

void run(const ConvertFlags& flags) {
  if (flags.source.empty()) throw ConfigError("SRC is empty; expected the folder of a checkpoint");
  if (flags.output.empty()) throw ConfigError("DST is empty; expected the name of a file or folder");
  checkpoint::ConvertOptions options;
  options.target = parse_target(flags.target);
  if (!flags.dtype.empty()) options.dtype = output_dtype_of(flags.dtype, options.target);
  const train::RunPath path = train::find_run(flags.source, flags.tag);
  options.output = flags.output;
  options.scheduled_options = scheduled_options;
  if (options.target == ConvertTarget::kSafetensors && options.output.extension() != ".safetensors")
    options.max_shard_bytes = kDefaultShardBytes;  // a folder
  if (is_weights_alone(options.target)) check_output("DST", flags.output, "");

  const Logger log{LogOptions{}};
  checkpoint::ConvertResult result = convert_with_bar("convert", path, options);
  std::cout << result.output.string() << ": " << flags.target << ", " << result.num_tensors
            << " tensors of the model, " << format_count(result.numel) << " elements, from "
            << result.checkpoint.string() << std::endl;
  if (is_weights_alone(options.target))
    result.notes.insert(result.notes.begin(),
                        str(flags.target, " has the model's tensors alone: no optimizer states, no counts"));
  if (!result.extra_state.empty())
    result.notes.push_back(str("what get_extra_state() gave is left out: ", join(result.extra_state, ", ")));
  print_notes(result);
  warn_of_overflow(result, result.output.string(), options.dtype, "", log);
}

}  // namespace

void add_convert_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "convert", "Write a checkpoint as another program's, which goes on from it: DeepSpeed, FSDP2");
  const auto flags = std::make_shared<ConvertFlags>();
  command->add_option("SRC", flags->source, "Folder of a run, of its checkpoints, or of one of them")
      ->required();
  command
      ->add_option(
          "DST", flags->output,
          "Folder of checkpoints (tessera, universal), a checkpoint's folder (dcp), or a model's file or "
          "folder (pt, safetensors, h5)")
      ->required();
  command
      ->add_option("--to", flags->target,
                   "universal: DeepSpeed's, for \"checkpoint\": {\"load_universal\": true}; dcp: "
                   "torch.distributed.checkpoint, for FSDP2; tessera; pt, safetensors, h5: the weights alone")
      ->required()
      ->type_name("FORMAT");
  command->add_option("-t,--tag", flags->tag, "The checkpoint (default: the one SRC/latest names)")
      ->type_name("TAG");
  command
      ->add_option("--dtype", flags->dtype,
                   "fp32, bf16 or fp16: of the model in dcp, pt, safetensors and h5 (default: fp32, the "
                   "master weights)")
      ->type_name("TYPE");
  command->callback([flags] { run(*flags); });
}

}  // namespace tessera::tools
