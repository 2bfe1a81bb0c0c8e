#include "checkpoint/read/foreign_source.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/convert.h"
#include "checkpoint/sharded/manifest.h"
#include "core/check.h"
#include "core/files/temporary_name.h"
#include "core/json/json_text.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

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

/// Elements of fp32, bf16, fp16 and fp64 whose exponent has all its bits.
int64_t num_nonfinite(std::span<const std::byte> bytes, DType type) {
  const auto count = [&]<class Bits>(Bits exponent) {
    int64_t found = 0;
    for (size_t at = 0; at + sizeof(Bits) <= bytes.size(); at += sizeof(Bits)) {
      Bits bits;
      std::memcpy(&bits, bytes.data() + at, sizeof(Bits));
      found += (bits & exponent) == exponent ? 1 : 0;
    }
    return found;
  };
  switch (type) {
    case DType::kFloat32: return count(uint32_t{0x7f800000});
    case DType::kBFloat16: return count(uint16_t{0x7f80});
    case DType::kFloat16: return count(uint16_t{0x7c00});
    case DType::kFloat64: return count(uint64_t{0x7ff0000000000000});
    default: return 0;
  }
}

}  // namespace

Manifest manifest_of(ForeignCheckpoint& source) {
  settle_counts(source);
  Manifest manifest;
  manifest.tag = name_of_path(source.path);
  manifest.stage = std::max(source.stage, 0);
  manifest.state = state_of(source);
  manifest.state_names = state_names(source);
  for (const std::string& name : manifest.state_names)
    if (!is_state_name(name))
      throw CheckpointError(source.path, ": an optimizer state is named '", name,
                            "'; expected letters, digits and _");
  SavedLayout& layout = manifest.layout;
  int64_t bytes = 0;
  std::vector<std::string> rounded;
  for (const ForeignParameter& parameter : source.parameters) {
    const int unit = layout.num_units();
    const int64_t numel = parameter.weights.numel();
    // Without states nothing tells what was trained.
    const bool trainable =
        (parameter.trainable || manifest.state_names.empty()) && is_floating(parameter.dtype);
    const DType kept = is_floating(parameter.weights.type) ? parameter.dtype : parameter.weights.type;
    layout.units.push_back({.dtype = kept, .trainable = trainable, .numel = numel});
    layout.parameters.push_back({.name = parameter.name,
                                 .shape = parameter.weights.shape,
                                 .group = parameter.group,
                                 .aliases = parameter.aliases,
                                 .unit = unit,
                                 .offset = 0});
    bytes += numel * size_bytes(layout.weights_type(unit));
    if (parameter.weights.type == DType::kFloat64 && layout.weights_type(unit) == DType::kFloat32)
      rounded.push_back(parameter.name);
    if (!trainable) continue;
    bytes += numel * size_bytes(DType::kFloat32) * std::ssize(manifest.state_names);
    for (const std::string& name : manifest.state_names)
      if (const auto state = parameter.states.find(name);
          state != parameter.states.end() && state->second.type == DType::kFloat64)
        rounded.push_back(str(name, " of ", parameter.name));
  }
  for (const auto& [name, tensor] : source.buffers) {
    manifest.tensors.push_back({.name = name, .dataset = tensor_dataset(name)});
    bytes += tensor.numel() * size_bytes(tensor.type);
  }
  if (!rounded.empty()) source.not_read.push_back(rounded_to_fp32(rounded));
  manifest.files = {
      {.name = source.path.filename().string(), .bytes = bytes, .block_hashes = {}, .datasets = {}}};
  return manifest;
}

ForeignSource::ForeignSource(ForeignCheckpoint source, std::shared_ptr<const Manifest> manifest)
    : ElementSource(std::move(manifest)), source_(std::move(source)), files_(source_.files) {}

const ForeignTensor* ForeignSource::tensor(const TensorId& id) const {
  const auto index = static_cast<size_t>(id.index);
  switch (id.kind) {
    case TensorId::Kind::kWeights: return &source_.parameters[index].weights;
    case TensorId::Kind::kBuffer: return &source_.buffers[index].second;
    default: break;
  }
  const auto& states = source_.parameters[index].states;
  const auto state = states.find(id.name);
  return state == states.end() ? nullptr : &state->second;
}

std::optional<StoredTensor> ForeignSource::find_whole(const TensorId& id) const {
  if (id.kind == TensorId::Kind::kBlob) return std::nullopt;
  return StoredTensor{tensor(id)->type, tensor(id)->shape};
}

void ForeignSource::read(const TensorId& id, int64_t first, std::span<std::byte> destination) const {
  bytes_read_ += std::ssize(destination);
  const ForeignTensor* const saved = tensor(id);
  if (saved == nullptr) {
    std::memset(destination.data(), 0, destination.size());
    return;
  }
  const DType type = find(id)->type;
  TESSERA_CHECK(std::ssize(destination) % size_bytes(type) == 0, "a part of an element of ", describe(id));
  if (saved->type == type) return files_.read(*saved, first, destination);
  constexpr int64_t kPiece = int64_t{1} << 16;
  const int64_t size = size_bytes(type);
  std::vector<std::byte> elements;
  while (!destination.empty()) {
    const int64_t numel = std::min(kPiece, std::ssize(destination) / size);
    const auto part = destination.first(static_cast<size_t>(numel * size));
    elements.resize(static_cast<size_t>(numel * size_bytes(saved->type)));
    files_.read(*saved, first, elements);
    if (const int64_t count = convert(elements, saved->type, part, type); count > 0)
      throw CheckpointError(source_.path, ": ", describe(id), ": ", count, " elements of ",
                            name_of(saved->type), " are too large for ", name_of(type),
                            "; expected a model whose weights and states fit into it");
    destination = destination.subspan(part.size());
    first += numel;
  }
}

std::string ForeignSource::digest() const {
  std::vector<std::pair<std::string, const ForeignTensor*>> tensors;
  for (const ForeignParameter& parameter : source_.parameters) {
    tensors.emplace_back(parameter.name, &parameter.weights);
    for (const auto& [name, state] : parameter.states) tensors.emplace_back(name, &state);
  }
  for (const auto& [name, tensor] : source_.buffers) tensors.emplace_back(name, &tensor);
  return text_digest(json_text(manifest_->state) + content_digest(tensors, files_));
}

void ForeignSource::check(const TensorId& id, int64_t first, int64_t numel) const {
  constexpr int64_t kPiece = int64_t{1} << 18;
  const int64_t size = size_bytes(find(id)->type);
  std::vector<std::byte> scratch;
  for (const int64_t end = first + numel; first < end; first += kPiece) {
    scratch.resize(static_cast<size_t>(std::min(kPiece, end - first) * size));
    read(id, first, scratch);
  }
}

/// Their places were checked when it was opened.
VerifyReport ForeignSource::verify() const {
  VerifyReport report;
  for (size_t i = 0; i < source_.archives.size(); ++i) try {
      report.num_archives += check_archives(source_, i, source_.archives.size());
    } catch (const Error& error) {
      report.problems.emplace_back(error.what());
    }
  std::vector<std::byte> buffer;
  const auto verify_tensor = [&](const TensorId& id) {
    const StoredTensor stored = find(id).value();
    constexpr int64_t kPiece = int64_t{1} << 20;
    ++report.num_blocks;
    try {
      for (int64_t first = 0, numel = stored.numel(); first < numel; first += kPiece) {
        buffer.resize(static_cast<size_t>(std::min(kPiece, numel - first) * size_bytes(stored.type)));
        read(id, first, buffer);
        report.bytes += std::ssize(buffer);
        report.num_nonfinite += num_nonfinite(buffer, stored.type);
      }
    } catch (const Error& error) {
      report.problems.push_back(str(describe(id), ": ", error.what()));
    }
  };
  const SavedLayout& layout = manifest_->layout;
  for (int i = 0; i < static_cast<int>(layout.parameters.size()); ++i) {
    verify_tensor(TensorId::weights(i));
    if (layout.is_trainable(layout.parameters[static_cast<size_t>(i)]))
      for (const std::string& state : manifest_->state_names) verify_tensor(TensorId::state(i, state));
  }
  for (size_t i = 0; i < source_.buffers.size(); ++i) verify_tensor(TensorId::buffer(i));
  report.by_file.push_back(report.ok() ? "" : report.problems[0]);
  return report;
}

std::string ForeignSource::describe(const TensorId& id) const {
  const auto index = static_cast<size_t>(id.index);
  if (id.kind == TensorId::Kind::kBuffer) return str("buffer ", source_.buffers[index].first);
  const std::string& name = source_.parameters[index].name;
  return id.kind == TensorId::Kind::kState ? str(id.name, " of ", name) : name;
}

}  // namespace tessera::checkpoint
