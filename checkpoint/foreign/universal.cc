// [Note: DeepSpeed's universal format]
// ds_to_universal.py makes of a checkpoint of any number of ranks a folder with
//
//   zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt   of each parameter a tensor; of stage 3 it is flat. A dict
//                                                  {"param": tensor} of the other stages
//   zero/NAME/step.pt                              not of stage 3
//   zero/optimizer_state.pt                        param groups, and what else rank 0's file had
//   …_model_states.pt                              as they were
//
// and names it in `latest_universal`.
#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/deepspeed_files.h"
#include "checkpoint/foreign/deepspeed_model.h"
#include "checkpoint/foreign/deepspeed_optimizer.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/foreign/saved_state.h"
#include "core/files/disk.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Kind = PickleValue::Kind;

class UniversalReader {
 public:
  explicit UniversalReader(const fs::path& folder)
      : folder_(folder), files_(list_deepspeed_files(folder, true)), model_(files_.model[0]) {
    checkpoint_.format = "DeepSpeed universal";
    checkpoint_.path = folder;
    check_parallelism(model_, true);
    checkpoint_.world_size = static_cast<int>(integer_of(model_.find("dp_world_size")).value_or(1));
    is_whole_ = integer_of(model_.find("mp_world_size")).value_or(1) <= 1 && model_.has_module();
  }

  ForeignCheckpoint read() {
    read_optimizer();
    read_counters(checkpoint_, model_);
    list_shapes();
    std::map<std::string, fs::path> folders;
    for (const fs::path& path : paths_in(folder_ / "zero"))
      if (is_folder(path)) folders.emplace(path.filename().string(), path);
    for (const std::string& name : order_) {
      const fs::path relative(name);  // a name may have slashes
      const bool is_inside =
          relative.is_relative() && std::find(relative.begin(), relative.end(), "..") == relative.end();
      const fs::path folder = folder_ / "zero" / relative;
      if (!is_inside || !is_folder(folder))
        throw CheckpointError(folder_ / "zero", ": has no folder ", quoted_name(name), ", a parameter of ",
                              files_.model[0].filename(), "; expected one of each parameter");
      add(name, folder);
    }
    // Without param_shapes, and of several stages of a pipeline, the folders say what there is.
    for (const auto& [name, path] : folders)
      if (!places_.contains(name) && is_trained(name, path)) add(name, path);
    const int model_file = file_index(checkpoint_, files_.model[0]);
    if (is_whole_)
      complete_parameters(checkpoint_, model_, model_file,
                          files_.model_by_rank ? files_.model : std::vector<fs::path>());
    else
      complete_without_model();
    checkpoint_.optimizer = optimizer_class(checkpoint_, model_.config());
    return std::move(checkpoint_);
  }

 private:
  void read_optimizer() {
    const fs::path path = folder_ / "zero" / "optimizer_state.pt";
    if (!is_there(path)) {
      checkpoint_.lose(LostValue::Kind::kOption, "lr",
                       "the param groups' options: there is no zero/optimizer_state.pt");
      return;
    }
    const TorchFile file(path);
    const PickleValue& root = file.root();
    read_loss_scaler(checkpoint_, file, root.find("loss_scaler"));
    saved_stage_ = integer_of(root.find("zero_stage"));
    all_steps_ = integer_of(root.find("base_optimizer_state_step"));
    const PickleValue *groups = root.find("param_groups"), *inner = root.find("optimizer_state_dict");
    const PickleValue* states = inner == nullptr ? nullptr : inner->find("state");
    for (const PickleValue* group : groups == nullptr ? std::vector<const PickleValue*>() : groups->items) {
      if (group->kind != Kind::kDict)
        throw CheckpointError(path, ": a param group is ", group->describe(), "; expected a dict");
      std::vector<LostValue> lost;
      checkpoint_.groups.push_back(group_options(*group, file, kOptionOfGroups, lost));
      say_lost(checkpoint_, lost);
      const PickleValue* members = group->find("params");
      const auto of_group = count_in(file, group->find("step"));
      group_steps_.push_back(of_group);
      if (members == nullptr) continue;
      for (const PickleValue* member : members->items) {
        group_of_sub_group_.push_back(static_cast<int>(checkpoint_.groups.size()) - 1);
        const PickleValue* state =
            states == nullptr ? nullptr : find_number(*states, integer_of(member).value_or(-1));
        const PickleValue* own = state == nullptr ? nullptr : state->find("step");
        sub_group_steps_.push_back(own == nullptr ? of_group : count_in(file, own));
      }
    }
  }

  static const PickleValue* find_number(const PickleValue& dict, int64_t number) {
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2)
      if (dict.items[i]->kind == Kind::kInt && dict.items[i]->integer == number) return dict.items[i + 1];
    return nullptr;
  }

  void list_shapes() {
    checkpoint_.stage = static_cast<int>(saved_stage_.value_or(files_.model_by_rank ? 3 : -1));
    const auto shapes = model_.param_shapes();
    if (!shapes) return;
    const bool by_sub_group = files_.model_by_rank;
    for (size_t i = 0; i < shapes->size(); ++i)
      for (const auto& [name, shape] : (*shapes)[i]) {
        order_.push_back(name);
        shapes_[name] = shape;
        const bool known = by_sub_group && i < group_of_sub_group_.size();
        groups_[name] = by_sub_group ? (known ? group_of_sub_group_[i] : 0) : static_cast<int>(i);
        if (known) steps_[name] = sub_group_steps_[i];
      }
  }

  bool is_trained(const std::string& name, const fs::path& path) const {
    if (model_.in_module(name) != nullptr && (is_whole_ || !is_there(path / "exp_avg.pt"))) {
      // ds_to_universal.py makes a folder of what the optimizer does not have: buffers, frozen parameters.
      return order_.empty() && !model_.buffer_names().contains(name);
    }
    if (is_whole_ && !order_.empty()) return false;
    return is_there(path / "fp32.pt");
  }

  /// The tensor of a file, with its number.
  std::pair<TorchTensor, int> read_tensor(const fs::path& path, const std::string& what) {
    const TorchFile file(path);
    const PickleValue* value = &file.root();
    if (value->kind == Kind::kDict) {
      if (const PickleValue* expert = value->find("is_expert_param");
          expert != nullptr && integer_of(expert).value_or(0) != 0)
        throw CheckpointError(path, ": is of a mixture of experts, which is not read");
      value = value->find("param");
    }
    const std::optional<TorchTensor> tensor = value == nullptr ? std::nullopt : file.tensor(*value);
    if (!tensor || !tensor->is_contiguous() || !is_floating(tensor->type))
      throw CheckpointError(path, ": is ", file.root().describe(), "; expected the tensor of ", what);
    checkpoint_.files.push_back(path);
    return {*tensor, static_cast<int>(checkpoint_.files.size()) - 1};
  }

  ForeignTensor foreign(const fs::path& path, const std::string& what, const std::vector<int64_t>* shape) {
    const auto [tensor, file] = read_tensor(path, what);
    if (shape != nullptr && tensor.numel() != numel_of(*shape))
      throw CheckpointError(path, ": has ", tensor.numel(), " elements; expected those of ", what, ", ",
                            describe_shape(*shape));
    return contiguous_tensor(file, tensor.offset, tensor.type, shape != nullptr ? *shape : tensor.shape);
  }

  void add(const std::string& name, const fs::path& folder) {
    ForeignParameter parameter;
    parameter.name = name;
    if (const auto group = groups_.find(name); group != groups_.end()) parameter.group = group->second;
    // With model parallelism param_shapes has the shapes of a rank's slice.
    const auto known = shapes_.find(name);
    parameter.weights = foreign(folder / "fp32.pt", quoted_name(name),
                                is_whole_ && known != shapes_.end() ? &known->second : nullptr);
    std::optional<int64_t> steps;
    for (const fs::path& path : paths_in(folder)) {
      const std::string state = path.stem().string();
      if (path.extension() != ".pt" || state == "fp32") continue;
      if (state == "step") {
        const TorchFile file(path);
        steps = count_in(file, file.root().kind == Kind::kDict ? file.root().find("param") : &file.root());
        if (!steps)
          throw CheckpointError(path, ": is ", file.root().describe(), "; expected a count of steps");
      } else if (is_utf8(state)) {
        parameter.states.emplace(
            state, foreign(path, str(state, " of ", quoted_name(name)), &parameter.weights.shape));
      }
    }
    if (const auto at = steps_.find(name); !steps && at != steps_.end()) steps = at->second;
    const auto group = static_cast<size_t>(parameter.group);
    if (!steps && group < group_steps_.size()) steps = group_steps_[group];
    if (!steps) steps = all_steps_;
    parameter.steps = steps.value_or(0);
    places_.insert(name);
    checkpoint_.parameters.push_back(std::move(parameter));
  }

  /// Of a run with model parallelism: the files of the model have slices.
  void complete_without_model() {
    for (ForeignParameter& one : checkpoint_.parameters) one.dtype = model_.compute_type();
    for (const auto& [alias, name] : model_.shared_names())
      for (ForeignParameter& one : checkpoint_.parameters)
        if (one.name == name && !places_.contains(alias)) one.aliases.push_back(alias);
    checkpoint_.not_read.push_back(
        "buffers and parameters that are not trained: the run had model parallelism, and each rank's file a "
        "part");
  }

  fs::path folder_;
  DeepSpeedFiles files_;
  DeepSpeedModel model_;
  ForeignCheckpoint checkpoint_;
  bool is_whole_ = true;
  // What zero/optimizer_state.pt has.
  std::vector<std::optional<int64_t>> sub_group_steps_;  // of stage 3
  std::vector<int> group_of_sub_group_;                  // of stage 3
  std::optional<int64_t> all_steps_;
  std::optional<int64_t> saved_stage_;
  std::vector<std::optional<int64_t>> group_steps_;
  std::vector<std::string> order_;
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::map<std::string, int> groups_;
  std::map<std::string, std::optional<int64_t>> steps_;
  std::set<std::string> places_;
};

}  // namespace

std::optional<IdentifiedCheckpoint> identify_universal(const fs::path& path, const std::string& tag) {
  const auto folder = deepspeed_folder(path, tag, "latest_universal");
  if (!folder || !is_deepspeed_universal(*folder)) return std::nullopt;
  return IdentifiedCheckpoint{*folder,
                              [=](const ParameterOrder&) { return UniversalReader(*folder).read(); }};
}

}  // namespace tessera::checkpoint
