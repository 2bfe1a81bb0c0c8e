#include "engine/checkpoint_loader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "comm/init/agreement.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "zero/memory/pause_listening.h"
#include "zero/optimizer/state_values.h"

namespace tessera {

using checkpoint::Piece;
using checkpoint::TensorId;
using nlohmann::json;

void check_same_content(comm::Communicator& comm, const std::string& path, const std::string& digest) {
  if (const int other = comm::first_unlike(comm, "content of a checkpoint", digest); other != 0)
    throw CheckpointError(path, ": rank ", other,
                          " has opened other content than rank 0; expected the same files on "
                          "all hosts, which nothing replaces meanwhile");
}

checkpoint::ParameterOrder order_of(const zero::ShardedModel& model) {
  checkpoint::ParameterOrder order{
      .names = {}, .groups = {}, .aliases = {}, .buffers = {}, .frozen = {}, .may_differ = true};
  for (const zero::ParameterSpec& parameter : model.layout().parameters()) {
    (parameter.trainable ? order.names : order.frozen).push_back(parameter.name);
    if (!parameter.aliases.empty()) order.aliases[parameter.name] = parameter.aliases;
  }
  for (const zero::NamedBuffer& buffer : model.persistent_buffers()) order.buffers.push_back(buffer.name);
  return order;
}

static checkpoint::ParameterOrder order_of(const zero::ShardedModel& model, const LoadOptions& options) {
  checkpoint::ParameterOrder order = order_of(model);
  order.groups = options.optimizer_groups;
  return order;
}

CheckpointLoader::CheckpointLoader(const std::string& directory, const std::string& tag,
                                   zero::ShardedModel& model, const LoadOptions& options)
    : checkpoint_(options.folders ? checkpoint::Checkpoint::open_part(directory, tag)
                                  : checkpoint::Checkpoint::open(directory, tag, order_of(model, options))),
      model_(model),
      options_(options),
      wants_states_(with_states()),
      owned_(model.owned_parameters()) {
  const checkpoint::SavedLayout& saved = checkpoint_.manifest().layout;
  comparison_ = checkpoint::compare(saved, model_.layout());
  find_buffers_among_parameters();
  if (const checkpoint::ForeignCheckpoint* foreign = checkpoint_.foreign()) {
    not_loaded_ = foreign->not_read;
    const std::vector<std::string>& others = foreign->other_states;
    if (!is_whole()) not_loaded_.insert(not_loaded_.end(), others.begin(), others.end());
    const bool has_others = is_whole() && std::ranges::any_of(foreign->parameters, [](const auto& parameter) {
                              return !parameter.other_states.empty() || !parameter.other_values.empty();
                            });
    if (with_states() && checkpoint_.manifest().state_names.empty() && !has_others) {
      options_.load_optimizer_states = false;
      not_loaded_.emplace_back(
          "states of the optimizer: there are none that can be told by parameter; they stay as they are");
    }
  }
  record_ = parse_module_record(checkpoint_.manifest().state, checkpoint_.path().string());
  std::vector<zero::Range> wanted;
  for (int unit = 0; unit < model_.layout().num_units(); ++unit) {
    held_.push_back(model_.unit(unit).local_state());
    wanted.push_back(held_.back().range);
  }
  pieces_ = checkpoint::plan_reads(saved, model_.layout(), comparison_.matches, wanted);
}

std::vector<int> CheckpointLoader::files() const {
  std::set<int> files;
  for (const Piece& piece : pieces_) files.insert(piece.file);
  if (!checkpoint_.manifest().tensors.empty() || !record_.extra_state.empty()) files.insert(0);
  if (has_blob(0, kOptimizerState))
    for (int file = 0; file < checkpoint_.manifest().world_size(); ++file) files.insert(file);
  if (const int mine = model_.comm().rank(); mine < checkpoint_.manifest().world_size()) files.insert(mine);
  return {files.begin(), files.end()};
}

std::vector<std::string> CheckpointLoader::lost_states() const {
  std::vector<std::string> lines;
  const checkpoint::ForeignCheckpoint* const foreign = checkpoint_.foreign();
  if (foreign == nullptr || !wants_states_) return lines;
  using Kind = checkpoint::LostValue::Kind;
  const auto& wanted = model_.optimizer().state_names();
  for (const checkpoint::LostValue& one : foreign->lost) {
    const bool is_state = one.kind == Kind::kState || (one.kind == Kind::kOtherState && !is_whole());
    const bool is_wanted = one.name.empty() || one.name == "step" || is_whole() ||
                           std::find(wanted.begin(), wanted.end(), one.name) != wanted.end();
    if (is_state && is_wanted) lines.push_back(one.line);
  }
  return lines;
}

/// "NAdam" of "torch.optim.nadam.NAdam", and of the configuration's "Adafactor" all.
static std::string class_of(const std::string& optimizer) {
  const size_t last = optimizer.rfind('.');
  return last == optimizer.npos ? optimizer : optimizer.substr(last + 1);
}

std::string CheckpointLoader::advice(const char* otherwise) const {
  return options_.advice.empty() ? otherwise : options_.advice;
}

std::string CheckpointLoader::optimizer_advice(const char* otherwise) const {
  return options_.optimizer_advice.empty() ? advice(otherwise) : options_.optimizer_advice;
}

void CheckpointLoader::compare_parameters() {
  if (comparison_.exact()) return;
  if (options_.strict)
    throw CheckpointError(checkpoint_.path(), ": ", comparison_.describe(), "; ",
                          advice("load what fits with strict = false"));
  for (const std::string& name : comparison_.missing)
    not_loaded_.push_back(str("parameter ", name, ": not in the checkpoint"));
  for (const std::string& name : comparison_.extra)
    not_loaded_.push_back(str("parameter ", name, ": not in the model"));
  for (const std::string& what : comparison_.reshaped) not_loaded_.push_back(str("parameter ", what));
  for (const std::string& name : comparison_.unfrozen)
    not_loaded_.push_back(str("parameter ", name, ": frozen when saved, so without optimizer state"));
}

void CheckpointLoader::compare_types() const {
  for (const checkpoint::Match& match : comparison_.matches) {
    const at::ScalarType saved = to_torch(checkpoint_.elements().find(TensorId::weights(match.saved))->type);
    const at::ScalarType current = held_[model_.layout().slice(match.current).unit].weights.scalar_type();
    if (!zero::converts(saved, current))
      throw CheckpointError(checkpoint_.path(), ": parameter ",
                            model_.layout().parameters()[match.current].name, ": ", c10::toString(saved),
                            " in the checkpoint, ", c10::toString(current),
                            " in the model; expected a type that holds its values");
  }
}

CheckpointError CheckpointLoader::other_states(const std::string& what) const {
  return CheckpointError(checkpoint_.path(), ": ", what, "; ",
                         optimizer_advice("use the same optimizer, or load_optimizer_states = false"));
}

CheckpointError CheckpointLoader::saved_by_another(const std::string& saved,
                                                   const std::string& current) const {
  return other_states(
      str("it was saved with the optimizer ", saved, ", whose states are not those of ", current));
}

void CheckpointLoader::compare_optimizers(const OptimizerRecord& saved, const OptimizerRecord& current) {
  if (!with_states()) return;
  const checkpoint::ForeignCheckpoint* const foreign = checkpoint_.foreign();
  const bool saved_whole = foreign != nullptr ? is_whole() : has_blob(0, kOptimizerState);
  const bool is_another_whole = foreign == nullptr && is_whole() && saved.name != current.name;
  if (saved_whole != is_whole() || is_another_whole || saved.by_muon.empty() != current.by_muon.empty())
    throw saved_by_another(saved.name, current.name);
  if (foreign != nullptr && is_whole())
    compare_whole_states(*foreign, current);
  else
    compare_state_names(saved, current);
  if (!saved.by_muon.empty()) compare_by_muon(saved, current);
}

void CheckpointLoader::compare_state_names(const OptimizerRecord& saved,
                                           const OptimizerRecord& current) const {
  const std::vector<std::string>& found = checkpoint_.manifest().state_names;
  const auto& wanted = model_.optimizer().state_names();
  if (std::equal(found.begin(), found.end(), wanted.begin(), wanted.end())) return;
  const auto described = [](const auto& names) {
    static const std::map<std::string, const char*> option_of = {
        {"max_exp_avg_sq", "amsgrad"}, {"grad_avg", "centered"}, {"momentum_buffer", "momentum"}};
    std::vector<std::string> shown;
    for (const std::string& name : names) {
      const auto option = option_of.find(name);
      shown.push_back(option == option_of.end() ? name : str(name, " (of ", option->second, ")"));
    }
    return shown.empty() ? std::string("no state") : join(shown, ", ");
  };
  throw other_states(str("optimizer ", saved.name, " was saved with ", described(found), "; ", current.name,
                         " needs ", described(wanted)));
}

/// All states of a parameter have to be there, and nothing but their names says whose they are. A class of
/// somebody's own may have the names of another's; two classes of torch.optim are never taken for each other.
void CheckpointLoader::compare_whole_states(const checkpoint::ForeignCheckpoint& foreign,
                                            const OptimizerRecord& current) {
  const std::string& saved = foreign.optimizer;
  const bool is_torchs =
      current.name.find('.') == current.name.npos || current.name.starts_with("torch.optim.");
  if (!saved.empty() && saved != class_of(current.name)) {
    if (is_torchs) throw saved_by_another(saved, current.name);
    not_loaded_.push_back(str("states of the optimizer: they look like those of ", saved,
                              "; they are taken for ", current.name, "'s"));
  }
  for (const checkpoint::ForeignParameter& parameter : foreign.parameters)
    if (!parameter.unread_state.empty())
      throw CheckpointError(checkpoint_.path(), ": the optimizer's states of ", parameter.name,
                            " cannot all be read: ", parameter.unread_state, "; ",
                            optimizer_advice("load_optimizer_states = false leaves all as they are"));
  if (saved.empty())
    not_loaded_.push_back(
        str("states of the optimizer: the files do not say of which class; they are taken for ", current.name,
            "'s"));
}

/// Whether the parameter was trained when it was saved, and is.
bool CheckpointLoader::has_states(const checkpoint::Match& match) const {
  const checkpoint::SavedLayout& layout = checkpoint_.manifest().layout;
  return layout.is_trainable(layout.parameters[match.saved]) &&
         model_.layout().parameters()[match.current].trainable;
}

void CheckpointLoader::compare_by_muon(const OptimizerRecord& saved, const OptimizerRecord& current) const {
  for (const checkpoint::Match& match : comparison_.matches) {
    const zero::ParameterSpec& parameter = model_.layout().parameters()[match.current];
    const bool was = saved.by_muon[static_cast<size_t>(match.saved)];
    const bool is = current.by_muon[static_cast<size_t>(match.current)];
    if (has_states(match) && was != is)
      throw other_states(str(was ? "Muon" : "AdamW", " updated the parameter ", parameter.name,
                             " when it was saved, and ", is ? "Muon" : "AdamW",
                             " does now (use_muon, or its name)"));
  }
}

/// What was converted from another program's checkpoint has buffers of floating-point numbers among the
/// parameters that are not trained [Note: which entries are parameters]. It is of one rank, and so any
/// checkpoint of one rank may have them there.
void CheckpointLoader::find_buffers_among_parameters() {
  const checkpoint::Manifest& manifest = checkpoint_.manifest();
  if (manifest.world_size() != 1) return;
  std::set<std::string> buffers;
  for (const zero::NamedBuffer& buffer : model_.persistent_buffers())
    if (manifest.find_tensor(buffer.name) == nullptr) buffers.insert(buffer.name);
  const checkpoint::SavedLayout& layout = manifest.layout;
  for (size_t i = 0; i < layout.parameters.size(); ++i) {
    const checkpoint::SavedParameter& parameter = layout.parameters[i];
    const bool was_trained = layout.is_trainable(parameter) && !manifest.state_names.empty();
    if (!was_trained && buffers.contains(parameter.name)) among_parameters_[parameter.name] = i;
  }
  std::erase_if(comparison_.extra, [&](const std::string& name) { return among_parameters_.contains(name); });
}

void CheckpointLoader::match_buffers() {
  std::vector<std::string> problems;
  std::map<std::string, const zero::NamedBuffer*> mine;  // null: not in the module
  std::vector<zero::NamedBuffer> held;
  if (model_.module_state() != nullptr) held = model_.module_state()->buffers();
  for (const checkpoint::TensorRecord& record : checkpoint_.manifest().tensors) mine[record.name] = nullptr;
  for (const zero::NamedBuffer& buffer : held) mine[buffer.name] = &buffer;
  for (const auto& [name, buffer] : mine) {
    // One that is not persistent keeps its value, also where older checkpoints have one.
    if (buffer != nullptr && !buffer->persistent) continue;
    const auto is_saved_alias = [&, tensor = buffer != nullptr ? buffer->tensor
                                                               : at::Tensor()](const auto& other) {
      return tensor.defined() && other.tensor.is_same(tensor) &&
             checkpoint_.manifest().find_tensor(other.name) != nullptr;
    };
    if (checkpoint_.manifest().find_tensor(name) != nullptr ||
        std::none_of(held.begin(), held.end(), is_saved_alias))
      match_buffer(name, buffer, problems);
  }
  match_extra_state(problems);
  if (problems.empty()) return;
  if (options_.strict)
    throw CheckpointError(checkpoint_.path(), ": ", join(problems, "; "), "; ",
                          advice("load what fits with strict = false"));
  not_loaded_.insert(not_loaded_.end(), problems.begin(), problems.end());
}

/// See [Note: a module's state is read when it is used] in zero/model/module_state.h. `mine`: null: not in
/// the module.
void CheckpointLoader::match_buffer(const std::string& name, const zero::NamedBuffer* mine,
                                    std::vector<std::string>& problems) {
  const std::vector<checkpoint::TensorRecord>& records = checkpoint_.manifest().tensors;
  std::optional<TensorId> id;
  if (const checkpoint::TensorRecord* record = checkpoint_.manifest().find_tensor(name))
    id = TensorId::buffer(static_cast<size_t>(record - records.data()));
  if (const auto at = among_parameters_.find(name); at != among_parameters_.end())
    id = TensorId::weights(static_cast<int>(at->second));
  const auto change = record_.changed.find(name);
  std::optional<zero::BufferKind> saved, first;
  if (id) {
    const checkpoint::StoredTensor stored = checkpoint_.elements().find(*id).value();
    first = saved = zero::BufferKind{to_torch(stored.type), stored.shape};
  }
  if (change != record_.changed.end()) first = change->second.first;
  const at::Tensor tensor = mine != nullptr ? mine->tensor : at::Tensor();
  if (!saved && !tensor.defined()) return;
  const auto problem = [&](const auto&... what) { problems.push_back(str("buffer ", name, what...)); };

  const bool was_there = saved && tensor.defined();  // also in checkpoints from before there were records
  const bool began_alike = (record_.is_known || was_there) && first == model_.first_kind(name);
  if (began_alike && (!saved || !tensor.defined() || *saved != zero::kind_of(tensor))) {
    const bool changes_names = !saved || !tensor.defined();
    if (!changes_names || (model_.module_state() != nullptr && model_.module_state()->can_assign(name))) {
      const bool to_none = !saved && change != record_.changed.end() && change->second.is_none;
      buffers_.push_back({name, tensor, id, /*keep_dtype=*/false, to_none});
      return;
    }
  }
  if (!saved) return problem(": not in the checkpoint");
  if (!tensor.defined()) return problem(": not in the model");
  if (tensor.sizes() != at::IntArrayRef(saved->shape))
    return problem(": ", describe_shape(saved->shape), " in the checkpoint, ", describe_shape(tensor.sizes()),
                   " in the model");
  if (!zero::converts(saved->dtype, tensor.scalar_type()))
    return problem(": ", c10::toString(saved->dtype), " in the checkpoint, ",
                   c10::toString(tensor.scalar_type()), " in the model");
  buffers_.push_back({name, tensor, id});
}

void CheckpointLoader::match_extra_state(std::vector<std::string>& problems) {
  if (!record_.is_known) return;  // older checkpoints have none
  std::vector<std::string> mine;
  if (model_.module_state() != nullptr) mine = model_.module_state()->extra_state_names();
  const std::vector<std::string>& saved = record_.extra_state;
  const auto has = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const std::string& name : mine)
    if (!has(saved, name)) problems.push_back(str("extra state ", name, ": not in the checkpoint"));
  for (const std::string& name : saved)
    if (!has(mine, name)) problems.push_back(str("extra state ", name, ": not in the model"));
}

at::Tensor CheckpointLoader::extra_state() const {
  return blob_of(checkpoint_.manifest().world_size() == model_.comm().size() ? model_.comm().rank() : 0,
                 kExtraState);
}

template <class Visit>
void CheckpointLoader::for_each_read(const Visit& visit) const {
  const checkpoint::Manifest& manifest = checkpoint_.manifest();
  const int num_states = with_states() && !is_whole() ? static_cast<int>(manifest.state_names.size()) : 0;
  const auto saved_unit = [&](const Piece& piece) {
    return manifest.layout.parameters[static_cast<size_t>(piece.parameter)].unit;
  };
  for (auto begin = pieces_.begin(), end = begin; begin != pieces_.end(); begin = end) {
    end = std::find_if(begin, pieces_.end(), [&](const Piece& piece) {
      return piece.file != begin->file || piece.unit != begin->unit ||
             saved_unit(piece) != saved_unit(*begin);
    });
    const bool has_states = manifest.layout.units[static_cast<size_t>(saved_unit(*begin))].trainable &&
                            model_.layout().units()[begin->unit].trainable;
    for (int kind = 0; kind <= (has_states ? num_states : 0); ++kind) visit(std::span(begin, end), kind);
  }
}

TensorId CheckpointLoader::id_of(const Piece& piece, int kind) const {
  if (kind == 0) return TensorId::weights(piece.parameter);
  return TensorId::state(piece.parameter, checkpoint_.manifest().state_names[static_cast<size_t>(kind - 1)]);
}

void CheckpointLoader::check(const OptimizerRecord& saved, const OptimizerRecord& current) {
  if (const checkpoint::ForeignCheckpoint* const foreign = checkpoint_.foreign())  // each file on one rank
    checkpoint::check_archives(*foreign, static_cast<size_t>(model_.comm().rank()),
                               static_cast<size_t>(model_.comm().size()));
  compare_parameters();
  compare_types();
  compare_optimizers(saved, current);
  match_buffers();
  const checkpoint::ElementSource& elements = checkpoint_.elements();
  for_each_read([&](std::span<const Piece> pieces, int kind) {
    for (const Piece& piece : pieces) elements.check(id_of(piece, kind), piece.first, piece.numel);
  });
  for (const Buffer& buffer : buffers_)
    if (buffer.saved) elements.check(*buffer.saved, 0, elements.find(*buffer.saved)->numel());
}

void CheckpointLoader::load_pieces(std::span<const Piece> pieces, int kind) const {
  const int unit = pieces.front().unit;
  const zero::LocalState& held = held_[unit];
  const at::Tensor& whole = kind == 0 ? held.weights : held.states[kind - 1];
  // One that is offloaded is brought into memory once for all pieces.
  const zero::InMemory in_memory(model_.unit(unit), whole, zero::InMemory::Access::kReadWrite);
  for (const Piece& piece : pieces) {
    const TensorId id = id_of(piece, kind);
    const at::Tensor target = whole.narrow(0, piece.begin - held.range.begin, piece.numel);
    const at::ScalarType saved_type = to_torch(checkpoint_.elements().find(id)->type);
    if (target.is_cpu() && target.scalar_type() == saved_type) {
      checkpoint_.elements().read(id, piece.first, bytes_of(target));
      continue;
    }
    const at::Tensor read = at::empty({piece.numel}, saved_type);
    checkpoint_.elements().read(id, piece.first, bytes_of(read));
    target.copy_(read);
  }
}

void CheckpointLoader::load_buffer(const Buffer& buffer) const {
  zero::ModuleState* const state = model_.module_state();
  if (!buffer.saved)
    return buffer.to_none ? state->assign(buffer.name, at::Tensor()) : state->remove(buffer.name);
  const at::Tensor read = read_whole(*buffer.saved);
  if (buffer.tensor.defined())
    zero::write_buffer(buffer.tensor, read, buffer.keep_dtype);
  else
    state->assign(buffer.name, read.to(model_.device()));
}

void CheckpointLoader::load(const std::vector<int64_t>& steps) {
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  for_each_read([&](std::span<const Piece> pieces, int kind) { load_pieces(pieces, kind); });
  for (const Buffer& buffer : buffers_) load_buffer(buffer);
  if (!with_states()) return;
  for (const checkpoint::Match& match : comparison_.matches)
    if (has_states(match)) model_.optimizer().set_steps(match.current, steps[match.saved]);
}

std::optional<std::map<int, int>> CheckpointLoader::matched_groups() const {
  std::map<int, int> current_of, saved_of;
  for (const checkpoint::Match& match : comparison_.matches) {
    const zero::ParameterSpec& parameter = model_.layout().parameters()[match.current];
    const checkpoint::SavedLayout& layout = checkpoint_.manifest().layout;
    const bool was_in_none =
        checkpoint_.foreign() == nullptr && !layout.is_trainable(layout.parameters[match.saved]);
    if (!parameter.trainable || was_in_none) continue;
    const int saved = layout.parameters[match.saved].group;
    if (current_of.try_emplace(saved, parameter.group).first->second != parameter.group) return std::nullopt;
    if (saved_of.try_emplace(parameter.group, saved).first->second != saved) return std::nullopt;
  }
  // In the same order, so that the n-th has the n-th's values.
  int before = std::numeric_limits<int>::min();
  for (const auto& [saved, current] : current_of) {
    if (current < before) return std::nullopt;
    before = current;
  }
  return current_of;
}

at::Tensor CheckpointLoader::blob(const std::string& name) const {
  const int rank = model_.comm().rank();
  return blob_of(rank, name);
}

bool CheckpointLoader::has_blob(int rank, const std::string& name) const {
  return checkpoint_.elements().find(TensorId::blob(rank, name)).has_value();
}

std::vector<at::Tensor> CheckpointLoader::whole_states() const {
  if (!is_whole() || !with_states()) return {};
  if (const checkpoint::ForeignCheckpoint* foreign = checkpoint_.foreign())
    return {states_of_owned(*foreign)};
  std::vector<at::Tensor> blobs;
  for (int rank = 0; rank < checkpoint_.manifest().world_size(); ++rank)
    blobs.push_back(blob_of(rank, kOptimizerState));
  return blobs;
}

zero::NamesInCheckpoint CheckpointLoader::names_of_states() const {
  zero::NamesInCheckpoint names;
  for (const checkpoint::Match& match : comparison_.matches) {
    if (!has_states(match)) continue;
    const std::string& name = model_.layout().parameters()[match.current].name;
    if (checkpoint_.foreign() != nullptr)
      names.emplace(name, name);  // states_of_owned() has renamed them
    else
      names.emplace(name, checkpoint_.manifest().layout.parameters[match.saved].name);
  }
  return names;
}

/// In the form of zero/optimizer/state_values.h. Floating-point numbers are in fp32, as masters are; "step"
/// is as it was, as torch's load_state_dict() leaves it.
at::Tensor CheckpointLoader::states_of_owned(const checkpoint::ForeignCheckpoint& foreign) const {
  const checkpoint::ForeignFiles files(foreign.files);
  zero::StateValuesWriter writer;
  json states = json::object();
  for (const checkpoint::Match& match : comparison_.matches) {
    if (!owned_[match.current] || !has_states(match)) continue;
    const checkpoint::ForeignParameter& parameter = foreign.parameters.at(static_cast<size_t>(match.saved));
    json found = parameter.other_values;
    const auto add = [&](const std::string& name, const checkpoint::ForeignTensor& tensor) {
      at::Tensor read = at::empty(tensor.shape, to_torch(tensor.type));
      files.read(tensor, 0, bytes_of(read));
      if (name != "step" && read.is_floating_point()) read = read.to(at::kFloat);
      found[name] = writer.add(read);
    };
    for (const auto& [name, tensor] : parameter.states) add(name, tensor);
    for (const auto& [name, tensor] : parameter.other_states) add(name, tensor);
    if (!found.empty()) states[model_.layout().parameters()[match.current].name] = std::move(found);
  }
  return writer.finish({{"state", states}, {"other", json::object()}});
}

at::Tensor CheckpointLoader::blob_of(int rank, const std::string& name) const {
  return has_blob(rank, name) ? read_whole(TensorId::blob(rank, name)) : at::Tensor();
}

at::Tensor CheckpointLoader::read_whole(const TensorId& id) const {
  const checkpoint::StoredTensor stored = checkpoint_.elements().find(id).value();
  const at::Tensor read = at::empty(stored.shape, to_torch(stored.type));
  checkpoint_.elements().read(id, 0, bytes_of(read));
  return read;
}

}  // namespace tessera
