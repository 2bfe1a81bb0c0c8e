#include "checkpoint/read/foreign_view.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/convert.h"
#include "checkpoint/manifest/names.h"
#include "core/check.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

int64_t product_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

/// Where a schedule is: the number of times that its step() was called after the first, which is made with
/// it.
std::optional<int64_t> schedule_steps(const ForeignCheckpoint& source) {
  if (!source.lr_scheduler || !source.lr_scheduler->is_object()) return std::nullopt;
  const auto number = [&](const char* key) -> std::optional<int64_t> {
    const auto found = source.lr_scheduler->find(key);
    if (found == source.lr_scheduler->end() || !found->is_number_integer()) return std::nullopt;
    return found->get<int64_t>();
  };
  if (const auto last = number("last_batch_iteration"))
    return std::max<int64_t>(0, *last + 1);  // DeepSpeed's
  // torch's. ReduceLROnPlateau counts metrics.
  if (source.lr_scheduler->contains("num_bad_epochs")) return std::nullopt;
  if (const auto last = number("last_epoch")) return std::max<int64_t>(0, *last);
  return std::nullopt;
}

/// Takes counts that contradict each other for what they are.
void settle_counts(ForeignCheckpoint& source) {
  int64_t updates = 0;
  for (const ForeignParameter& parameter : source.parameters) updates = std::max(updates, parameter.steps);
  if (updates > 0)  // the optimizer's own count is taken
    std::erase_if(source.lost, [](const LostValue& one) { return one.kind == LostValue::Kind::kCount; });
  if (updates > 0 && !source.skipped_steps && source.global_steps && *source.global_steps != updates) {
    // A script's "step" may count micro-batches.
    source.not_read.push_back(str("steps: ", *source.global_steps, ", where the optimizer has counted ",
                                  updates, " updates, which are taken"));
    source.global_steps = updates;
    source.global_samples.reset();
  }
  if (source.may_count_in_epoch && updates == 0 && source.global_steps) {
    const std::optional<int64_t> steps = schedule_steps(source);
    const bool is_less = steps && *steps > *source.global_steps;
    source.not_read.push_back(
        str("steps: ", *source.global_steps, ", beside an epoch, of which alone they may be",
            is_less ? str(": the schedule has counted ", *steps, ", which are taken") : ""));
    if (is_less) source.global_steps = steps;
  }
  // The wrappers of DeepSpeed for fp16 and bf16 update once when they are made, so that the optimizer has
  // counted one more. Its own counts are those of the schedule.
  const int64_t counted = source.global_steps.value_or(0) - source.skipped_steps.value_or(0);
  const int64_t applied = updates > 0 && !source.skipped_steps ? updates : counted;
  const bool is_deepspeeds = source.lr_scheduler && source.lr_scheduler->contains("last_batch_iteration");
  if (const auto steps = schedule_steps(source);
      steps && !is_deepspeeds && applied > 0 && *steps != applied) {
    source.lose(LostValue::Kind::kSchedule, "last_epoch",
                str("lr_scheduler: it was stepped ", *steps, " times in ", applied,
                    " updates of the optimizer, and here a schedule steps with each update: its state is not "
                    "used, and the schedule of this run goes on as after ",
                    applied, " steps"));
    source.lr_scheduler.reset();
  }
}

/// Manifest::state, as the engine writes it (docs/checkpoint_format.md).
json state_of(const ForeignCheckpoint& source) {
  const int64_t skipped = source.skipped_steps.value_or(0);
  int64_t most_steps = 0;
  for (const ForeignParameter& parameter : source.parameters)
    most_steps = std::max(most_steps, parameter.steps);
  const int64_t global_steps = source.global_steps.value_or(most_steps + skipped);
  json parameter_steps = json::array();
  for (const ForeignParameter& parameter : source.parameters) {
    // SGD of torch counts no updates; one with a momentum has had some.
    const bool uncounted = parameter.steps == 0 && !parameter.states.empty();
    parameter_steps.push_back(uncounted ? std::max<int64_t>(1, global_steps - skipped) : parameter.steps);
  }
  // Those that have no hysteresis lower the scale at the first overflow.
  json scaler = {{"cur_scale", 65536.0},
                 {"cur_iter", 0},
                 {"last_overflow_iter", -1},
                 {"cur_hysteresis", source.loss_scaler ? 1 : 2}};
  if (source.loss_scaler && source.loss_scaler->is_object())
    for (auto& [key, value] : scaler.items())
      if (const auto found = source.loss_scaler->find(key);
          found != source.loss_scaler->end() && found->is_number())
        value = *found;
  // One that has counted no updates would keep the scale of the configuration.
  if (source.loss_scaler && scaler["cur_iter"] == 0) scaler["cur_iter"] = std::max<int64_t>(1, global_steps);
  // Says that the loss was scaled, as no configuration does here.
  if (source.loss_scaler) scaler["dynamic"] = source.loss_scaler->value("dynamic", json(true)) == json(true);
  json state;
  state["global_steps"] = global_steps;
  state["skipped_steps"] = skipped;
  state["micro_steps"] = global_steps;
  state["schedule_steps"] = schedule_steps(source).value_or(std::max<int64_t>(0, global_steps - skipped));
  state["gradient_norm"] = nullptr;
  state["loss_scaler"] = scaler;
  state["optimizer"] = {{"type", source.optimizer.empty() ? "unknown" : source.optimizer},
                        {"parameter_steps", parameter_steps}};
  state["config"] = nullptr;
  // As the Python package writes it (python/tessera/checkpoints.py).
  json& client = state["client_state"];
  client = {{"client_state", source.client_state},
            {"tessera.param_groups", source.groups},
            {"tessera.encoding", 1}};
  if (source.lr_scheduler) client["tessera.lr_scheduler"] = *source.lr_scheduler;
  if (source.global_samples) client["tessera.global_samples"] = *source.global_samples;
  return state;
}

/// The states that all trainable parameters with states have, in the order of Tessera's optimizers.
std::vector<std::string> state_names(const ForeignCheckpoint& source) {
  std::set<std::string> found;
  for (const ForeignParameter& parameter : source.parameters)
    if (parameter.trainable)
      for (const auto& [name, state] : parameter.states) found.insert(name);
  std::vector<std::string> names;
  for (const char* known :
       {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "momentum_buffer"})
    if (found.erase(known) > 0) names.emplace_back(known);
  names.insert(names.end(), found.begin(), found.end());
  return names;
}

}  // namespace

ForeignView::ForeignView(ForeignCheckpoint source) : source_(std::move(source)), files_(source_.files) {
  settle_counts(source_);
  manifest_.tag = source_.path.filename().string();
  manifest_.stage = std::max(source_.stage, 0);
  manifest_.state = state_of(source_);
  manifest_.state_names = state_names(source_);
  for (const std::string& name : manifest_.state_names)
    if (!is_state_name(name))
      throw CheckpointError(str(source_.path.string(), ": an optimizer state is named '", name,
                                "'; expected letters, digits and _"));
  SavedLayout& layout = manifest_.layout;
  std::vector<DatasetRecord> datasets;
  std::vector<std::string> rounded;
  for (const ForeignParameter& parameter : source_.parameters) {
    const int unit = layout.num_units();
    // Without states nothing tells what was trained.
    const bool trainable =
        (parameter.trainable || manifest_.state_names.empty()) && is_floating(parameter.dtype);
    const DType kept = is_floating(parameter.weights.type) ? parameter.dtype : parameter.weights.type;
    layout.units.push_back({.dtype = kept, .trainable = trainable, .numel = parameter.weights.numel()});
    layout.parameters.push_back({.name = parameter.name,
                                 .shape = parameter.weights.shape,
                                 .group = parameter.group,
                                 .aliases = parameter.aliases,
                                 .unit = unit,
                                 .offset = 0});
    const std::vector<int64_t> flat = {parameter.weights.numel()};
    add(datasets, weights_dataset(layout, unit), &parameter.weights, layout.weights_type(unit), flat);
    if (parameter.weights.type == DType::kFloat64 && layout.weights_type(unit) == DType::kFloat32)
      rounded.push_back(parameter.name);
    if (!trainable) continue;
    for (const std::string& name : manifest_.state_names) {
      const auto state = parameter.states.find(name);
      add(datasets, state_dataset(name, unit), state == parameter.states.end() ? nullptr : &state->second,
          DType::kFloat32, flat);
      if (state != parameter.states.end() && state->second.type == DType::kFloat64)
        rounded.push_back(str(name, " of ", parameter.name));
    }
  }
  for (const auto& [name, tensor] : source_.buffers) {
    manifest_.tensors.push_back({.name = name, .dataset = tensor_dataset(name)});
    add(datasets, manifest_.tensors.back().dataset, &tensor, tensor.type, tensor.shape);
  }
  if (!rounded.empty()) source_.not_read.push_back(rounded_to_fp32(rounded));
  FileRecord file{.name = source_.path.filename().string(), .bytes = 0, .block_hashes = {}, .datasets = {}};
  if (!datasets.empty()) file.bytes = datasets.back().offset + datasets.back().bytes;
  file.datasets = DatasetList(std::move(datasets));
  manifest_.files = {std::move(file)};
}

/// Datasets follow each other in a file that is not there.
void ForeignView::add(std::vector<DatasetRecord>& datasets, const std::string& name,
                      const ForeignTensor* tensor, DType type, const std::vector<int64_t>& shape) {
  if (!tensors_.emplace(name, tensor).second)
    throw CheckpointError(str(source_.path.string(), ": has two tensors for ", name));
  const int64_t offset = datasets.empty() ? 0 : datasets.back().offset + datasets.back().bytes;
  datasets.push_back({.name = name,
                      .type = type,
                      .shape = shape,
                      .offset = offset,
                      .bytes = product_of(shape) * size_bytes(type)});
}

void ForeignView::read(const DatasetRecord& dataset, int64_t begin, std::span<std::byte> destination) const {
  TESSERA_CHECK(begin >= 0 && static_cast<int64_t>(destination.size()) <= dataset.bytes - begin,
                dataset.name);
  const ForeignTensor* const tensor = tensors_.find(dataset.name)->second;
  if (tensor == nullptr) {
    std::memset(destination.data(), 0, destination.size());
    return;
  }
  const int64_t size = size_bytes(dataset.type);
  const int64_t first = begin / size,
                end = (begin + static_cast<int64_t>(destination.size()) + size - 1) / size;
  const bool whole_elements = begin % size == 0 && static_cast<int64_t>(destination.size()) % size == 0;
  if (whole_elements && tensor->type == dataset.type) return files_.read(*tensor, first, destination);
  // Converted in pieces; of a piece that begins or ends within an element, the part that is asked for is
  // copied.
  constexpr int64_t kPiece = int64_t{1} << 16;
  std::vector<std::byte> source, converted;
  for (int64_t at = first; at < end; at += kPiece) {
    const int64_t numel = std::min(kPiece, end - at);
    source.resize(static_cast<size_t>(numel * size_bytes(tensor->type)));
    files_.read(*tensor, at, source);
    if (tensor->type != dataset.type) {
      converted.resize(static_cast<size_t>(numel * size));
      if (const int64_t count = convert(source, tensor->type, converted, dataset.type); count > 0)
        throw CheckpointError(str(source_.path.string(), ": ", dataset.name, ": ", count, " elements of ",
                                  name_of(tensor->type), " are too large for ", name_of(dataset.type),
                                  "; expected a model whose weights and states fit into it"));
    }
    const std::vector<std::byte>& elements = tensor->type == dataset.type ? source : converted;
    const int64_t from = std::max(begin, at * size),
                  to = std::min(begin + static_cast<int64_t>(destination.size()), (at + numel) * size);
    std::memcpy(destination.data() + (from - begin), elements.data() + (from - at * size),
                static_cast<size_t>(to - from));
  }
}

}  // namespace tessera::checkpoint
