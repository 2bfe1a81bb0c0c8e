// The engine's part of activation recomputation: the configuration's policy, and what is logged of it.
#include <algorithm>
#include <string>
#include <vector>

#include "activations/checkpointing.h"
#include "activations/operator_facts.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/config/document/suggest.h"
#include "engine/config/key.h"
#include "engine/engine.h"
#include "engine/optimizer/optimizer_setup.h"

namespace tessera {
namespace {

using activations::PolicyOptions;

PolicyOptions policy_of(const ActivationConfig& config) {
  PolicyOptions options;
  options.kind = config.policy == "cheap"   ? PolicyOptions::Kind::kCheap
                 : config.policy == "block" ? PolicyOptions::Kind::kBlock
                                            : PolicyOptions::Kind::kOffload;
  if (config.policy == "offload") options.directory = config.nvme_path.value_or("");
  options.num_blocks = config.number_checkpoints.value_or(options.num_blocks);
  options.verify = config.verify;
  options.keep.insert(config.keep.begin(), config.keep.end());
  if (const std::vector<std::string> patterns = config::split_names(config.blocks); !patterns.empty())
    options.is_block = [patterns](const std::string& module) {
      return std::any_of(patterns.begin(), patterns.end(),
                         [&](const std::string& pattern) { return glob_match(pattern, module); });
    };
  return options;
}

void check_operators(const std::vector<std::string>& names) {
  if (names.empty()) return;
  const std::vector<std::string> known = activations::operator_names();
  for (const std::string& name : names)
    if (!std::binary_search(known.begin(), known.end(), name))
      throw ConfigError("activation_checkpointing.keep: found \"", name, "\"",
                        config::did_you_mean(name, known),
                        "; expected the name of an operator without its overload, as \"aten::gelu\" (the "
                        "in-place form is another operator: \"aten::gelu_\")");
}

}  // namespace

void Engine::set_up_activations() {
  const ActivationConfig& config = config_.activations;
  check_operators(config.keep);
  if (rank() == 0 && config.number_checkpoints && config.policy != "block")
    options_.log.warning(str("activation_checkpointing.number_checkpoints has no effect under the policy \"",
                             config.policy, "\": it is the number of blocks that \"block\" recomputes"));
  if (config.policy == "none") return;
  if (!config.nvme_path.value_or("").empty() && !options_.device.is_cpu())
    throw ConfigError("activation_checkpointing.nvme_path: saved tensors lie on disk on CPU ranks only; ",
                      "this one is on ", options_.device.str(), ": leave it out");
  PolicyOptions policy = policy_of(config);
  policy.owner = str("rank ", rank());
  activations_ = std::make_unique<activations::Checkpointing>(*sharded_, policy, options_.autograd_hooks);
  if (rank() == 0 && config.policy == "block" && activations_->num_blocks() == 0)
    options_.log.warning(
        "activation_checkpointing: the model has no repeated submodules, and no module matches "
        "activation_checkpointing.blocks: \"block\" is as \"cheap\" here");
}

void Engine::report_activations() {
  const activations::Counts counts = activations_->counts();
  if (rank() == 0 && config_.activations.profile && micro_steps_ <= 2)
    options_.log.info(str("activation_checkpointing: forward ", micro_steps_, " keeps ", counts.num_kept,
                          " saved tensors, ", counts.kept_bytes, " bytes; ", counts.num_dropped, ", ",
                          counts.dropped_bytes, " bytes, are made again in backward; ", counts.num_offloaded,
                          ", ", counts.offloaded_bytes, " bytes, are on disk"));
}

}  // namespace tessera
