// Engine::load_weights: a model's parameters and buffers from a file, without the rest of a checkpoint.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/sharded/catalog.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "engine/checkpoint_loader.h"
#include "engine/engine.h"
#include "engine/optimizer/optimizer_setup.h"
#include "zero/memory/pause_listening.h"

namespace tessera {
namespace {

/// A tensor of the file.
struct FileTensor {
  std::string name;
  const checkpoint::ForeignTensor* elements;
};

/// The weights of a file or folder of any format that is read; what has checksums is verified.
class WeightsFile {
 public:
  WeightsFile(const std::string& path, const zero::ShardedModel& model) {
    std::optional<checkpoint::ForeignCheckpoint> found = checkpoint::read_weights(path, order_of(model));
    if (!found && is_folder(path) &&
        (checkpoint::is_tesseras(path) || !checkpoint::list_folders(path).empty()))
      throw CheckpointError(path,
                            ": is Tessera's own checkpoint; expected a file of weights, which tessera "
                            "consolidate makes of it, or load_checkpoint() with load_module_only");
    if (!found)
      throw CheckpointError(
          path,
          ": has no weights that are read; expected a .safetensors file, what torch.save has written, a "
          "folder with model.safetensors or pytorch_model.bin, or another program's checkpoint");
    source_ = *std::move(found);
    checkpoint::check_archives(source_);
    files_.emplace(source_.files);
    const auto add = [&](const std::string& name, const checkpoint::ForeignTensor& tensor) {
      tensors_.try_emplace(name, FileTensor{name, &tensor});
    };
    for (const checkpoint::ForeignParameter& parameter : source_.parameters) {
      add(parameter.name, parameter.weights);
      for (const std::string& alias : parameter.aliases) add(alias, parameter.weights);
    }
    for (const auto& [name, tensor] : source_.buffers) add(name, tensor);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }
  const FileTensor* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  std::string digest(
      const std::vector<std::pair<std::string, const checkpoint::ForeignTensor*>>& tensors) const {
    return checkpoint::content_digest(tensors, *files_);
  }
  at::Tensor read(const FileTensor& tensor, int64_t begin, int64_t numel) const {
    const at::Tensor elements = at::empty({numel}, to_torch(tensor.elements->type));
    files_->read(*tensor.elements, begin, bytes_of(elements));
    return elements;
  }

 private:
  checkpoint::ForeignCheckpoint source_;
  std::optional<checkpoint::ForeignFiles> files_;
  std::map<std::string, FileTensor> tensors_;
};

/// A tensor of the file and its destination.
struct Taken {
  const FileTensor* tensor;
  int parameter = -1;  // -1: a buffer
  at::Tensor buffer;
  std::string extra_state;  // its name; empty: a parameter or a buffer
};

struct Match {
  std::vector<Taken> taken;
  std::vector<std::string> missing;  // those that may be, and why
};

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return glob_match(pattern, name); });
}

constexpr size_t kMostShown = 5;

std::string first_of(const std::vector<std::string>& lines, const char* separator) {
  const size_t shown = std::min(lines.size(), kMostShown);
  std::string text = join(
      std::vector<std::string>(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(shown)), separator);
  return shown < lines.size() ? str(text, separator, "and ", lines.size() - shown, " more") : text;
}

/// Every name in the model.
std::set<std::string> names_of(zero::ShardedModel& model) {
  std::set<std::string> names;
  for (const auto& parameter : model.layout().parameters()) {
    names.insert(parameter.name);
    names.insert(parameter.aliases.begin(), parameter.aliases.end());
  }
  for (const zero::NamedBuffer& buffer : model.persistent_buffers())
    if (buffer.tensor.defined()) names.insert(buffer.name);
  return names;
}

/// Persistent buffers, a shared one once with all its names.
std::vector<std::pair<at::Tensor, std::vector<std::string>>> names_of_buffers(
    const zero::ShardedModel& model) {
  std::vector<std::pair<at::Tensor, std::vector<std::string>>> buffers;
  for (const zero::NamedBuffer& buffer : model.persistent_buffers()) {
    if (!buffer.tensor.defined()) continue;
    const auto known = std::find_if(buffers.begin(), buffers.end(),
                                    [&](const auto& one) { return one.first.is_same(buffer.tensor); });
    if (known != buffers.end())
      known->second.push_back(buffer.name);
    else
      buffers.push_back({buffer.tensor, {buffer.name}});
  }
  return buffers;
}

/// The file's tensors by the names that the model would have for them.
class NamedInFile {
 public:
  NamedInFile(const WeightsFile& file, const LoadWeightsOptions& options, std::vector<std::string>& problems)
      : file_(file) {
    for (const std::string& name : file.names()) {
      const auto [other, is_new] = names_.try_emplace(renamed(name, options), name);
      if (!is_new)
        problems.push_back(str(name, ": is ", other->first, " in the model, as ", other->second, " is"));
    }
  }

  const FileTensor* find(const std::string& name) const {
    const auto found = names_.find(name);
    return found == names_.end() ? nullptr : file_.find(found->second);
  }
  const std::map<std::string, std::string>& names() const { return names_; }  // to the file's own

 private:
  static std::string renamed(const std::string& name, const LoadWeightsOptions& options) {
    for (const auto& [from, to] : options.renamed_prefixes)
      if (name.starts_with(from)) return to + name.substr(from.size());
    return name;
  }

  const WeightsFile& file_;
  std::map<std::string, std::string> names_;
};

/// The elements of the tensor that this rank takes.
zero::Range part_of(const Taken& one, const zero::ShardedModel& model) {
  if (one.parameter < 0) return {0, c10::multiply_integers(one.tensor->elements->shape)};
  const zero::UnitSlice& slice = model.layout().slice(one.parameter);
  const zero::Range mine = zero::intersect(slice.range(), model.unit(slice.unit).local_range());
  return {mine.begin - slice.offset, mine.begin - slice.offset + mine.numel()};
}

/// Reads what this rank takes, before anything changes. Throws CheckpointError for what cannot be read, or
/// is too large for the model's type.
void check_elements(const WeightsFile& file, const std::string& path, const std::vector<Taken>& taken,
                    const zero::ShardedModel& model) {
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  for (const Taken& one : taken) {
    const zero::Range part = part_of(one, model);
    if (part.numel() == 0) continue;
    const at::Tensor read = file.read(*one.tensor, part.begin, part.numel());
    const at::ScalarType type =
        one.parameter >= 0
            ? model.unit(model.layout().slice(one.parameter).unit).local_state().weights.scalar_type()
        : one.buffer.defined() ? one.buffer.scalar_type()
                               : read.scalar_type();
    if (one.parameter >= 0 && !zero::converts(read.scalar_type(), type))
      throw CheckpointError(path, ": ", one.tensor->name, ": ", name_of(one.tensor->elements->type),
                            " in the file, ", name_of(from_torch(type)),
                            " in the model; expected a type that it holds");
    if (type == read.scalar_type() || !read.is_floating_point() || !at::isFloatingType(type)) continue;
    if (const int64_t count =
            (read.isfinite() & read.to(type).isfinite().logical_not_()).sum().item<int64_t>();
        count > 0)
      throw CheckpointError(path, ": ", one.tensor->name, ": ", count, " elements of ",
                            name_of(one.tensor->elements->type), " are too large for ",
                            name_of(from_torch(type)), "; expected a model whose weights fit into it");
  }
}

/// The prefix that nearly all names of one side have on the other side only.
std::string prefix_between(const std::vector<std::string>& without, const std::set<std::string>& with) {
  if (without.empty()) return "";
  for (const std::string& name : with) {
    if (!name.ends_with("." + without.front())) continue;
    const std::string prefix = name.substr(0, name.size() - without.front().size());
    const auto num = std::count_if(without.begin(), without.end(),
                                   [&](const std::string& one) { return with.contains(prefix + one); });
    if (2 * static_cast<size_t>(num) > without.size()) return prefix;
  }
  return "";
}

/// The names that both sides have, and the prefix by which they differ.
std::string describe_names(const WeightsFile& file, const std::set<std::string>& model_names,
                           const LoadWeightsOptions& options) {
  const std::vector<std::string> in_file = file.names(), in_model(model_names.begin(), model_names.end());
  std::string text =
      str("; the file holds ", format_count(static_cast<int64_t>(in_file.size())), " tensors (",
          first_of(in_file, ", "), "), the model ", format_count(static_cast<int64_t>(in_model.size())), " (",
          first_of(in_model, ", "), ")");
  if (const std::string prefix = prefix_between(in_model, {in_file.begin(), in_file.end()}); !prefix.empty())
    text += str("; the file's begin with \"", prefix, "\", the model's don't");
  else if (const std::string other = prefix_between(in_file, model_names); !other.empty())
    text += str("; the model's begin with \"", other, "\", the file's don't");
  return text + (options.advice.empty() ? "" : "; " + options.advice);
}

/// Every parameter and buffer of the model with its tensor, by name or one of its aliases. Throws
/// CheckpointError naming those that the file lacks, those of another shape, and tensors that the model
/// lacks.
Match match(const WeightsFile& file, const std::string& path, zero::ShardedModel& model,
            const LoadWeightsOptions& options) {
  const std::set<std::string> model_names = names_of(model);
  std::vector<std::string> problems;
  const NamedInFile in_file(file, options, problems);
  bool names_differ = !problems.empty();
  std::set<std::string> known = model_names;  // names of the file that the model has
  Match found;
  std::vector<Taken>& taken = found.taken;
  // Takes the tensor that has one of these names, or, in a file of the base model, one of them without the
  // prefix.
  const auto take = [&](const std::vector<std::string>& own_names, const std::vector<int64_t>& shape,
                        Taken place) {
    std::vector<std::string> names = own_names;
    if (const std::string& prefix = options.base_model_prefix; !prefix.empty())
      for (const std::string& name : own_names)
        if (name.starts_with(prefix) && !model_names.contains(name.substr(prefix.size())))
          names.push_back(name.substr(prefix.size()));
    const auto are_among = [&](const std::vector<std::string>& patterns) {
      return std::any_of(own_names.begin(), own_names.end(),
                         [&](const std::string& name) { return matches_any(patterns, name); });
    };
    for (const std::string& name : names)
      if (const FileTensor* tensor = in_file.find(name)) {
        known.insert(name);
        const std::string differs = str(name, ": ", describe_shape(tensor->elements->shape), " in the file, ",
                                        describe_shape(shape), " in the model");
        if (tensor->elements->shape != shape && are_among(options.ignore_mismatched))
          return found.missing.push_back(differs);
        if (tensor->elements->shape != shape) problems.push_back(differs);
        place.tensor = tensor;
        return taken.push_back(place);
      }
    if (are_among(options.ignore_missing))
      return found.missing.push_back(own_names.front() + ": not in the file");
    names_differ = true;
    problems.push_back(own_names.front() + ": not in the file");
  };
  const auto& parameters = model.layout().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::vector<std::string> names{parameters[i].name};
    names.insert(names.end(), parameters[i].aliases.begin(), parameters[i].aliases.end());
    take(names, parameters[i].shape, {nullptr, static_cast<int>(i), {}, {}});
  }
  for (const auto& [buffer, names] : names_of_buffers(model))
    take(names, buffer.sizes().vec(), {nullptr, -1, buffer, {}});
  if (const zero::ModuleState* state = model.module_state()) {
    for (const zero::NamedBuffer& buffer : state->buffers())
      if (!buffer.persistent) {  // it keeps its value, whatever a file has
        known.insert(buffer.name);
        if (buffer.name.starts_with(options.base_model_prefix))
          known.insert(buffer.name.substr(options.base_model_prefix.size()));
      }
    for (const std::string& name : state->extra_state_names()) {
      known.insert(name);
      if (const FileTensor* tensor = in_file.find(name))
        taken.push_back({tensor, -1, {}, name});
      else
        found.missing.push_back(str("extra state ", name, ": not in the file"));
    }
  }
  for (const auto& [name, own_name] : in_file.names())
    if (!known.contains(name) && !matches_any(options.ignore_unexpected, name)) {
      names_differ = true;
      problems.push_back(own_name + ": not in the model");
    }
  if (problems.empty()) return found;
  throw CheckpointError(path, ": does not fit the model: ", first_of(problems, "; "),
                        names_differ             ? describe_names(file, model_names, options)
                        : options.advice.empty() ? ""
                                                 : "; " + options.advice);
}

}  // namespace

void Engine::load_weights(const std::string& path, const LoadWeightsOptions& options) {
  comm::on_all_ranks<Error>(*comm_, "engine before load_weights()", [&] {
    sharded_->check_usable(
        /*replaces_parameters=*/options.ignore_missing.empty() && options.ignore_mismatched.empty());
  });
  if (window_.micro_steps() != 0)
    throw Error("load_weights() between backward() and the step() that updates");
  std::optional<WeightsFile> file;
  Match found;
  std::string digest;
  comm::on_all_ranks<CheckpointError>(*comm_, "weights to load", [&] {
    file.emplace(path, *sharded_);
    found = match(*file, path, *sharded_, options);
    check_elements(*file, path, found.taken, *sharded_);
    std::vector<std::pair<std::string, const checkpoint::ForeignTensor*>> taken;
    for (const Taken& one : found.taken) taken.emplace_back(one.tensor->name, one.tensor->elements);
    digest = file->digest(taken);
  });
  check_same_content(*comm_, path, digest);
  sharded_->begin_replacing("load_weights()");
  comm::on_all_ranks<CheckpointError>(*comm_, "loaded weights", [&] {
    const zero::PauseListening our_own_operators;
    const at::NoGradGuard no_grad;
    for (const Taken& one : found.taken) {
      const zero::Range part = part_of(one, *sharded_);
      if (one.parameter < 0) {
        const at::Tensor value = file->read(*one.tensor, 0, part.numel()).view(one.tensor->elements->shape);
        if (one.extra_state.empty())
          zero::write_buffer(one.buffer, value,
                             /*keep_dtype=*/zero::converts(value.scalar_type(), one.buffer.scalar_type()));
        else
          sharded_->module_state()->set_extra_state(one.extra_state, value);
        continue;
      }
      if (part.numel() == 0) continue;
      const zero::UnitSlice& slice = sharded_->layout().slice(one.parameter);
      const zero::LocalState held = sharded_->unit(slice.unit).local_state();
      const zero::InMemory in_memory(sharded_->unit(slice.unit), held.weights,
                                     zero::InMemory::Access::kReadWrite);
      held.weights.narrow(0, slice.offset + part.begin - held.range.begin, part.numel())
          .copy_(file->read(*one.tensor, part.begin, part.numel()));
    }
  });
  sharded_->end_replacing();
  window_.give_up();
  if (!found.missing.empty() && rank() == 0)
    options_.log.warning(str(path, ": these stay as they were: ", first_of(found.missing, "; ")));
}

}  // namespace tessera
