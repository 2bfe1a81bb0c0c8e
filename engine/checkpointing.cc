// Engine::save_checkpoint and load_checkpoint.
#include "engine/checkpointing.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <optional>
#include <variant>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_state.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/host_folders.h"
#include "engine/checkpoint_loader.h"
#include "engine/config/optimizer.h"
#include "engine/config/parse.h"
#include "engine/engine.h"

namespace tessera {
namespace {

using nlohmann::json;

at::Generator generator_of(at::Device device) {
  return device.is_cpu() ? at::detail::getDefaultCPUGenerator()
                         : at::globalContext().defaultGenerator(device);
}

constexpr const char* kCpuGenerator = "rng_cpu";
constexpr const char* kCudaGenerator = "rng_cuda";

/// Of a Python program's checkpoint: the values of its optimizer's param groups, a list.
constexpr const char* kParamGroups = "tessera.param_groups";

/// Why the source's param groups are not this optimizer's, so that its rates and other values stay; empty:
/// they are, or nobody asks for them. Tessera's own of another number are no error: the caller, who has their
/// values in `client_state`, leaves them.
std::string other_groups(const CheckpointLoader& loader, const json& client_state,
                         const LoadOptions& options) {
  if (!loader.with_states()) return "";
  const size_t own = options.optimizer_groups.size();
  const auto filled = static_cast<size_t>(
      std::ranges::count_if(options.optimizer_groups, [](const auto& group) { return !group.empty(); }));
  if (const checkpoint::ForeignCheckpoint* const foreign = loader.checkpoint().foreign()) {
    const size_t found = foreign->groups.size();
    if (found == 0) return "";
    if (own > 0 && own != found && filled != found)  // `tessera convert` writes those with parameters
      return str("param groups: the checkpoint has ", found, ", and the optimizer ", own,
                 ", so that its rates and other values stay");
  } else if (!client_state.contains(kParamGroups) || client_state[kParamGroups].size() != filled) {
    return "";
  }
  if (loader.matched_groups()) return "";
  return "param groups: they have other parameters than the optimizer's, so that its rates and other values "
         "stay";
}

/// What a function of the caller's returns; its CheckpointError names the checkpoint.
template <class Function>
auto of_caller(const CheckpointLoader& loader, const Function& function) try {
  return function();
} catch (const CheckpointError& error) {
  throw CheckpointError(loader.checkpoint().path(), ": ", error.what());
}

/// Null in place of another program's groups without parameters, which no group of the optimizer gets.
void leave_out_empty(const checkpoint::ForeignCheckpoint& foreign, json& groups) {
  for (size_t i = 0; i < groups.size(); ++i)
    if (std::ranges::none_of(foreign.parameters,
                             [&](const auto& one) { return one.group == static_cast<int>(i); }))
      groups[i] = nullptr;
}

/// What of a checkpoint is to be loaded and cannot be taken over, a line each. Takes it out of `state`.
/// Throws CheckpointError, unless that is allowed.
std::vector<std::string> lost_of(const CheckpointLoader& loader, CheckpointState& state,
                                 const LoadOptions& options, bool has_schedule, bool has_scale) {
  using checkpoint::LostValue;
  const checkpoint::ForeignCheckpoint* const foreign = loader.checkpoint().foreign();
  std::vector<std::string> lines = loader.lost_states();
  std::vector<LostValue> lost;
  if (foreign != nullptr) lost = foreign->lost;
  if (const std::string line = other_groups(loader, state.client_state, options); !line.empty()) {
    lost.push_back({LostValue::Kind::kOption, "", line});
    state.client_state[kParamGroups] = json::array();
  } else if (foreign != nullptr && state.client_state.contains(kParamGroups)) {
    leave_out_empty(*foreign, state.client_state[kParamGroups]);
  }
  if (options.load_module_only) lost.clear();
  for (const LostValue& one : lost)
    if (one.kind == LostValue::Kind::kCount || (one.kind == LostValue::Kind::kScale && has_scale))
      lines.push_back(one.line);
  if (options.not_taken_over && !options.load_module_only) {
    const auto steps = foreign != nullptr ? std::optional(state.schedule_steps) : std::nullopt;
    for (std::string& line :
         of_caller(loader, [&] { return options.not_taken_over(state.client_state, steps, lost); }))
      lines.push_back(std::move(line));
  } else if (options.load_lr_scheduler_states && has_schedule) {
    for (const LostValue& one : lost)
      if (one.kind == LostValue::Kind::kSchedule) lines.push_back(one.line);
  }
  if (!lines.empty() && !options.allow_partial_load)
    throw CheckpointError(loader.checkpoint().path(), ": cannot be taken over: ", join(lines, "; "), "; ",
                          options.partial_advice);
  return lines;
}

}  // namespace

/// Null: there is none yet.
std::shared_ptr<comm::HostTransfer> Engine::page_locked_transfer() const {
  const ZeroConfig& zero = config_.zero;
  const bool pins = zero.offload_optimizer.pin_memory || zero.offload_param.pin_memory;
  return pins && sharded_->transfer() ? sharded_->transfer() : host_transfer_;
}

CheckpointWriter& Engine::checkpoint_writer() {
  if (!checkpoint_writer_)
    checkpoint_writer_ =
        std::make_unique<CheckpointWriter>(*sharded_, config_.zero.stage, config_.checkpoint, options_.log,
                                           CheckpointWriter::Where{.transfer = page_locked_transfer()});
  return *checkpoint_writer_;
}

// ---------------------------------------------------------------------------------------------------- save

std::string Engine::optimizer_name() const {
  if (options_.whole_optimizer) return options_.whole_optimizer->name();
  return options_.update_rule ? options_.update_rule->name() : type_of(config_.optimizer.options);
}

std::string Engine::save_checkpoint(const std::string& directory, const std::string& tag) {
  return save_checkpoint(directory, tag, json::object());
}

std::string Engine::save_checkpoint(const std::string& directory, const std::string& tag,
                                    const json& client_state) {
  return save_checkpoint(directory, tag, client_state, SaveOptions{});
}

std::string Engine::save_checkpoint(const std::string& directory, const std::string& tag,
                                    const json& client_state, const SaveOptions& options) {
  return save_with(checkpoint_writer(), directory, tag, client_state, options);
}

void Engine::save_in_memory(HostFolders& folders, const json& client_state) {
  const CheckpointConfig config{.async = false, .keep_last = 1, .fsync = false};
  CheckpointWriter writer(*sharded_, config_.zero.stage, config, options_.log, {.folders = &folders});
  save_with(writer, folders.path(), "", client_state, {});
}

/// Collective.
std::string Engine::save_with(CheckpointWriter& writer, const std::string& directory, const std::string& tag,
                              const json& client_state, const SaveOptions& options) {
  check_usable_on_all_ranks("save_checkpoint()");
  if (window_.is_complete())
    throw Error(
        "save_checkpoint() between the last backward() of a step and step(): call step() first, which "
        "updates with gradients that are not saved");
  if (window_.has_gradients() && rank() == 0)
    options_.log.info(
        str("save_checkpoint() after ", window_.micro_steps(), " of ", config_.gradient_accumulation_steps,
            " backward() calls of a step: their gradients are not saved, and a run that continues "
            "from it begins the step anew"));
  sharded_->finish_updates();
  sharded_->broadcast_buffers();
  zero::ModuleState* const module = sharded_->module_state();
  at::Tensor extra_state;
  if (module != nullptr && !module->extra_state_names().empty())
    comm::on_all_ranks<CheckpointError>(*comm_, "extra state", [&] { extra_state = module->extra_state(); });

  CheckpointState state;
  state.global_steps = global_steps_;
  state.skipped_steps = skipped_steps_;
  state.micro_steps = micro_steps_ - window_.micro_steps();
  state.schedule_steps = schedule_steps_;
  state.gradient_norm = gradient_norm_;
  state.loss_scaler = scaler_.state();
  state.optimizer = optimizer_name();
  const std::vector<zero::ParameterSpec>& parameters = sharded_->layout().parameters();
  const std::vector<bool>& by_muon = sharded_->optimizer().by_muon();
  for (size_t parameter = 0; parameter < parameters.size(); ++parameter) {
    if (!parameters[parameter].trainable && options.exclude_frozen_parameters) continue;
    state.parameter_steps.push_back(sharded_->optimizer().steps(static_cast<int>(parameter)));
    if (!by_muon.empty()) state.by_muon.push_back(by_muon[parameter]);
  }
  state.module = record_of(*sharded_);
  state.config = parse_json(dump_resolved(config_));
  state.client_state = client_state;

  CheckpointContent content;
  content.directory = directory;
  content.tag = tag.empty() ? str("global_step", global_steps_) : tag;
  for (const zero::NamedBuffer& buffer : sharded_->persistent_buffers())
    if (buffer.tensor.defined()) content.buffers.push_back({buffer.name, buffer.tensor});
  if (extra_state.defined()) content.blobs.push_back({kExtraState, extra_state});
  if (options_.whole_optimizer)
    comm::on_all_ranks<CheckpointError>(*comm_, "states of the optimizer", [&] {
      content.blobs.push_back({kOptimizerState, options_.whole_optimizer->state()});
    });
  content.blobs.push_back({kCpuGenerator, generator_of(at::kCPU).get_state()});
  if (!device().is_cpu()) content.blobs.push_back({kCudaGenerator, generator_of(device()).get_state()});
  content.state = to_json(state);
  content.save_latest = options.save_latest;
  content.exclude_frozen_parameters = options.exclude_frozen_parameters;
  return writer.save(content);
}

void Engine::finish_checkpoint() {
  if (checkpoint_writer_) checkpoint_writer_->finish();
}

zero::StateBytes Engine::measured_bytes(zero::Tier tier) const {
  zero::StateBytes bytes = sharded_->measured_bytes(tier);
  if (tier != zero::Tier::kDevice) return bytes;
  if (checkpoint_writer_) bytes.snapshot = checkpoint_writer_->snapshot_bytes();
  if (options_.whole_optimizer) bytes.optimizer += options_.whole_optimizer->bytes();
  return bytes;
}

int64_t Engine::pinned_bytes() const {
  int64_t bytes = sharded_->pinned_bytes();
  if (checkpoint_writer_ && checkpoint_writer_->transfer() &&
      checkpoint_writer_->transfer() != sharded_->transfer())
    bytes += checkpoint_writer_->transfer()->pinned_bytes();
  return bytes;
}

bool Engine::last_save_failed() { return checkpoint_writer_ && checkpoint_writer_->last_failed(); }

void Engine::keep_checkpoints(const std::vector<std::string>& tags) { checkpoint_writer().protect(tags); }

// ---------------------------------------------------------------------------------------------------- load

LoadedCheckpoint Engine::load_checkpoint(const std::string& directory, const std::string& tag) {
  return load_checkpoint(directory, tag, LoadOptions{});
}

// Loading changes everything or nothing: Every rank reads and verifies the data it needs, and
// compares them with the model; memory changes only when all ranks have succeeded. So the data are read
// twice, rather than held twice.
LoadedCheckpoint Engine::load_checkpoint(const std::string& directory, const std::string& tag,
                                         const LoadOptions& options) {
  comm::on_all_ranks<Error>(*comm_, "engine before load_checkpoint()", [&] {
    sharded_->check_replaceable(/*parameters=*/options.strict,
                                /*states=*/options.load_optimizer_states && !options.load_module_only);
  });
  last_save_failed();  // waits; a failed save does not prevent loading
  // Rank 0 chooses: `latest` may change meanwhile. Its answer is TAG NUL FOLDER: names of files need not be
  // UTF-8, so JSON can't hold them.
  const std::string encoded = comm::from_rank_0<CheckpointError>(*comm_, "checkpoint to load", [&] {
    const checkpoint::FoundCheckpoint found =
        options.folders
            ? checkpoint::FoundCheckpoint{directory, checkpoint::find_checkpoint(directory, tag).filename()}
            : checkpoint::choose_checkpoint(directory, tag);
    return found.tag + '\0' + (found.tag.empty() ? found.directory.string() : "");
  });
  const std::string chosen = encoded.substr(0, encoded.find('\0'));
  const std::string chosen_directory = chosen.empty() ? encoded.substr(1) : directory;

  std::unique_ptr<CheckpointLoader> loader;
  CheckpointState state;
  std::vector<std::string> lost;
  at::Tensor cpu_generator, cuda_generator, extra_state;
  std::vector<at::Tensor> optimizer_state;  // by rank of the checkpoint
  std::string digest;
  comm::on_all_ranks<CheckpointError>(*comm_, "opened checkpoint", [&] {
    loader = std::make_unique<CheckpointLoader>(chosen_directory, chosen, *sharded_, options);
    digest = loader->checkpoint().elements().digest();
  });
  check_same_content(*comm_, loader->checkpoint().path().string(), digest);
  if (options.folders) options.folders->bring(loader->files());
  comm::on_all_ranks<CheckpointError>(*comm_, "verified checkpoint", [&] {
    const checkpoint::Manifest& manifest = loader->checkpoint().manifest();
    state = parse_checkpoint_state(manifest.state, manifest.layout.parameters.size(),
                                   loader->checkpoint().path().string());
    loader->check({.name = state.optimizer, .by_muon = state.by_muon},
                  {.name = optimizer_name(), .by_muon = sharded_->optimizer().by_muon()});
    if (loader->checkpoint().foreign() != nullptr || options.not_taken_over)
      lost = lost_of(*loader, state, options, !std::holds_alternative<ConstantLrOptions>(config_.scheduler),
                     config_.scales_loss() && config_.fp16.loss_scale == 0);
    cpu_generator = loader->blob(kCpuGenerator);
    if (!device().is_cpu()) cuda_generator = loader->blob(kCudaGenerator);
    extra_state = loader->extra_state();
    optimizer_state = loader->whole_states();
    if (loader->checkpoint().foreign() != nullptr)
      for (const at::Tensor& states : optimizer_state)
        options_.whole_optimizer->check_state_of_another_program(states);
  });

  sharded_->begin_replacing("load_checkpoint()");
  comm::on_all_ranks<CheckpointError>(*comm_, "loaded checkpoint", [&] {
    loader->load(state.parameter_steps);
    if (!optimizer_state.empty()) {
      const zero::NamesInCheckpoint names = loader->names_of_states();
      options_.whole_optimizer->set_state(optimizer_state, &names);
    }
    if (extra_state.defined() && sharded_->module_state() != nullptr)
      of_caller(*loader, [&] { sharded_->module_state()->set_extra_state(extra_state); });
  });
  sharded_->end_replacing();

  const checkpoint::ForeignCheckpoint* const foreign = loader->checkpoint().foreign();
  if (!options.load_module_only) {
    global_steps_ = state.global_steps;
    skipped_steps_ = state.skipped_steps;
    micro_steps_ = foreign ? state.global_steps * config_.gradient_accumulation_steps : state.micro_steps;
    if (options.load_lr_scheduler_states) schedule_steps_ = state.schedule_steps;
    gradient_norm_ = state.gradient_norm;
    if (!foreign || foreign->loss_scaler) scaler_.set_state(state.loss_scaler);
    if (cpu_generator.defined()) generator_of(at::kCPU).set_state(cpu_generator);
    if (cuda_generator.defined()) generator_of(device()).set_state(cuda_generator);
  }
  if (!foreign && !loader->module_record().is_known && rank() == 0 && sharded_->module_state() != nullptr &&
      !sharded_->module_state()->extra_state_names().empty())
    options_.log.warning(str(loader->checkpoint().path(),
                             ": an older version has saved it without get_extra_state(): ",
                             join(sharded_->module_state()->extra_state_names(), ", "), " stays as it is"));
  window_.give_up();
  LoadedCheckpoint loaded;
  loaded.path = loader->checkpoint().path().string();
  loaded.tag = loader->checkpoint().manifest().tag;
  if (foreign)
    loaded.saved_by =
        foreign->version.empty() ? foreign->format : str(foreign->format, " ", foreign->version);
  loaded.client_state = state.client_state;
  loaded.saved_world_size = loader->checkpoint().manifest().world_size();
  loaded.not_loaded = loader->not_loaded();
  for (std::string& line : lost)
    if (std::ranges::find(loaded.not_loaded, line) == loaded.not_loaded.end())
      loaded.not_loaded.push_back(std::move(line));
  // Of the caller's optimizer the configuration says nothing.
  const bool is_configured = !options_.update_rule && steps_by_groups();
  if (foreign && loader->with_states() && !foreign->groups.empty()) {
    if (std::string line = other_groups(*loader, state.client_state, options); !line.empty()) {
      if (std::ranges::find(loaded.not_loaded, line) == loaded.not_loaded.end())
        loaded.not_loaded.push_back(std::move(line));
    } else if (const auto groups = loader->matched_groups(); is_configured && groups) {
      const std::vector<OptimizerOptions> options_of = config::group_options(config_.optimizer);
      for (const auto& [saved, current] : *groups)
        for (const std::string& line : config::differing_values(
                 options_of.at(static_cast<size_t>(current)), foreign->groups.at(static_cast<size_t>(saved)),
                 foreign->lr_scheduler.has_value()))
          loaded.other_values.push_back(str("param group ", saved, ": ", line));
    }
  }
  loaded.bytes_read = loader->checkpoint().elements().bytes_read();
  return loaded;
}

}  // namespace tessera
