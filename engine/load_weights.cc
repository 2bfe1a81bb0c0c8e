// Engine::load_weights: a model's parameters and buffers from safetensors, without the rest of a checkpoint.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/safetensors_reader.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/checkpoint_types.h"
#include "engine/engine.h"
#include "engine/optimizer_setup.h"
#include "zero/operator_listener.h"

namespace tessera {
namespace {

using checkpoint::SafetensorsModel;
using checkpoint::SafetensorsTensor;

/// A tensor of the file and what takes it.
struct Taken {
  const SafetensorsTensor* tensor;
  int parameter = -1;  // -1: a buffer
  at::Tensor buffer;
};

struct Match {
  std::vector<Taken> taken;
  std::vector<std::string> missing;  // those that may be
};

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) { return glob_match(pattern, name); });
}

/// The names, and behind them those without the prefix.
std::vector<std::string> with_base_names(std::vector<std::string> names, const std::string& prefix) {
  if (prefix.empty()) return names;
  for (size_t i = 0, num = names.size(); i < num; ++i)
    if (names[i].starts_with(prefix)) names.push_back(names[i].substr(prefix.size()));
  return names;
}

/// Every parameter and buffer of the model with its tensor, by name or one of its aliases. Throws CheckpointError naming those without,
/// those of another shape, and tensors the model has no place for.
Match match(const SafetensorsModel& file, const std::string& path, zero::ShardedModel& model, const LoadWeightsOptions& options) {
  std::vector<std::string> problems;
  std::vector<std::string> known;
  Match found;
  std::vector<Taken>& taken = found.taken;
  const auto take = [&](const std::vector<std::string>& model_names, const std::vector<int64_t>& shape, Taken place) {
    const std::vector<std::string> names = with_base_names(model_names, options.base_model_prefix);
    known.insert(known.end(), names.begin(), names.end());
    for (const std::string& name : names)
      if (const SafetensorsTensor* tensor = file.find(name)) {
        if (tensor->shape != shape)
          problems.push_back(str(name, ": ", describe_shape(tensor->shape), " in the file, ", describe_shape(shape), " in the model"));
        place.tensor = tensor;
        return taken.push_back(place);
      }
    if (matches_any(options.ignore_missing, names.front())) return found.missing.push_back(names.front());
    problems.push_back(names.front() + ": not in the file");
  };
  const auto& parameters = model.layout().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::vector<std::string> names{parameters[i].name};
    names.insert(names.end(), parameters[i].aliases.begin(), parameters[i].aliases.end());
    take(names, parameters[i].shape, {nullptr, static_cast<int>(i), {}});
  }
  for (const zero::NamedTensor& buffer : model.buffers()) take({buffer.name}, buffer.tensor.sizes().vec(), {nullptr, -1, buffer.tensor});
  std::sort(known.begin(), known.end());
  for (const std::string& name : file.names())
    if (!std::binary_search(known.begin(), known.end(), name) && !matches_any(options.ignore_unexpected, name))
      problems.push_back(name + ": not in the model");
  if (problems.empty()) return found;
  const size_t shown = std::min<size_t>(problems.size(), 5);
  std::string line = join(std::vector<std::string>(problems.begin(), problems.begin() + shown), "; ");
  if (shown < problems.size()) line += str("; and ", problems.size() - shown, " more");
  throw CheckpointError(str(path, ": does not fit the model: ", line));
}

at::Tensor read(const SafetensorsModel& file, const SafetensorsTensor& tensor, int64_t begin, int64_t numel) {
  const at::Tensor elements = at::empty({numel}, to_torch(tensor.type));
  file.read(tensor.name, begin * size_bytes(tensor.type), bytes_of(elements));
  return elements;
}

}  // namespace

void Engine::load_weights(const std::string& path, const LoadWeightsOptions& options) {
  check_usable();
  if (micro_steps_in_window_ != 0) throw Error("load_weights() between backward() and the step() that updates");
  std::optional<SafetensorsModel> file;
  Match found;
  on_all_ranks(*comm_, "weights to load", [&] {
    file.emplace(path);
    found = match(*file, path, *sharded_, options);
  });
  failure_ = std::make_exception_ptr(Error("load_weights() failed half-way, and the parameters are neither old nor new"));
  sharded_->begin_replacing();
  on_all_ranks(*comm_, "loaded weights", [&] {
    const zero::Unheard our_own_operators;
    const at::NoGradGuard no_grad;
    for (const Taken& one : found.taken) {
      if (one.parameter < 0) {
        at::Tensor buffer = one.buffer;
        buffer.copy_(read(*file, *one.tensor, 0, buffer.numel()).view(buffer.sizes()));
        continue;
      }
      const zero::Slot& slot = sharded_->layout().slot(one.parameter);
      const zero::ShardedModel::Held held = sharded_->held(slot.unit);
      const zero::Range mine = zero::intersect(slot.range(), held.range);
      if (mine.numel() == 0) continue;
      held.weights.narrow(0, mine.begin - held.range.begin, mine.numel())
          .copy_(read(*file, *one.tensor, mine.begin - slot.offset, mine.numel()));
    }
  });
  sharded_->end_replacing();
  if (training_) sharded_->begin_pass(zero::Pass::kTrain);
  failure_ = nullptr;
  if (!found.missing.empty() && rank() == 0)
    options_.log.warning(str(path, ": has no ", join(found.missing, ", "), ", which keep their initial values and have to be trained"));
}

}  // namespace tessera
