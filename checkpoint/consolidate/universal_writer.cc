// DeepSpeed's universal checkpoint, as its loaders of version 0.19.8 read it (checkpoint/ds_to_universal.py,
// checkpoint/universal_checkpoint.py, runtime/base_optimizer.py, runtime/zero/stage3.py, runtime/engine.py):
//
//   DIR/latest_universal                                         the folder's name
//   DIR/TAG_universal/zero/NAME/{fp32,exp_avg,…}.pt              {"cat_dim": 0, "param": tensor}
//   DIR/TAG_universal/zero/NAME/step.pt                          stages 1 and 2: the number of updates
//   DIR/TAG_universal/zero/optimizer_state.pt                    param groups; stage 3: the number of updates
//   DIR/TAG_universal/mp_rank_00_model_states.pt                 stages 1 and 2: counters, schedule, module
//   DIR/TAG_universal/zero_pp_rank_0_mp_rank_00_model_states.pt  stage 3: the same, parameters left out
//
// What ds_to_universal.py writes of a checkpoint loads at the stages of that checkpoint; this one has what
// the loaders of all stages ask for.
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/archive_sequence.h"
#include "checkpoint/consolidate/python_value.h"
#include "checkpoint/consolidate/writers.h"
#include "checkpoint/formats/pickle_writer.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/save.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/files/pending_file.h"
#include "core/files/temporary_name.h"
#include "core/numel.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kDeepSpeedVersion = "0.19.8";  // whose files these are
constexpr double kUniversalVersion = 0.4;
constexpr double kDefaultClipping = 1.0;
constexpr const char* kFolderEnding = "_universal";
constexpr const char* kLatestUniversal = "latest_universal";
constexpr const char* kModelFile = "mp_rank_00_model_states.pt";
constexpr const char* kStage3ModelFile = "zero_pp_rank_0_mp_rank_00_model_states.pt";
constexpr const char* kOptimizerFile = "zero/optimizer_state.pt";

/// Throws for a name that is no path inside of the folder `zero`.
void check_name(const std::string& name) {
  const fs::path path(name);
  const bool leaves = path.is_absolute() || std::find(path.begin(), path.end(), "..") != path.end() ||
                      std::find(path.begin(), path.end(), ".") != path.end();
  const bool is_plain = !path.empty() && path.has_filename() && path.lexically_normal() == path;
  if (leaves || !is_plain || path.begin()->string() == "optimizer_state.pt")
    throw CheckpointError("parameter '", name,
                          "': cannot be written as DeepSpeed's universal checkpoint, where "
                          "each has a folder of its name; expected a name that is one");
}

/// The number of updates, which DeepSpeed has once for all parameters.
int64_t common_step(const Manifest& manifest, const TrainingState& state, std::vector<std::string>& notes) {
  const SavedParameter* first = nullptr;
  int64_t step = 0;
  std::vector<std::string> without;
  for (size_t i = 0; i < manifest.layout.parameters.size(); ++i) {
    const SavedParameter& parameter = manifest.layout.parameters[i];
    if (!manifest.layout.is_trainable(parameter)) continue;
    if (state.steps[i] == 0) {
      without.push_back(parameter.name);
    } else if (first == nullptr) {
      first = &parameter;
      step = state.steps[i];
    } else if (state.steps[i] != step) {
      throw CheckpointError(
          first->name, " has had ", step, " updates and ", parameter.name, " ", state.steps[i],
          "; DeepSpeed has one count for all parameters; expected equal ones (--to dcp keeps "
          "each)");
    }
  }
  if (first != nullptr && !without.empty())
    notes.push_back(str(without.size(), " parameters without an update (", without.front(),
                        without.size() > 1 ? ", …" : "", ") count ", step, " now, as DeepSpeed counts them"));
  return step;
}

std::optional<double> clipping_of(const json& config) {
  const auto clipping = config.find("gradient_clipping");
  return clipping != config.end() && clipping->is_number() ? std::optional(clipping->get<double>())
                                                           : std::nullopt;
}

/// A tensor of the module, in the order of the model's file.
struct ModuleTensor {
  StreamedTensor streamed;
  std::vector<std::string> aliases;
  bool is_trainable = false;
  bool is_buffer = false;
};

/// The files of the checkpoint. Owns the one that is open.
class UniversalFiles : public ArchiveSequence {
 public:
  UniversalFiles(const Conversion& conversion, fs::path folder)
      : conversion_(conversion),
        manifest_(conversion.checkpoint.manifest()),
        state_(conversion.state),
        disk_(conversion.disk),
        folder_(std::move(folder)),
        step_(common_step(manifest_, state_, conversion.result.notes)) {
    list_parameters();
    list_module();
    files_.push_back({.path = kModelFile});
    for (const ModuleTensor& tensor : module_) tensors_.push_back(tensor.streamed);
    files_.push_back({.path = kStage3ModelFile});
    for (const ModuleTensor& tensor : module_)
      if (!tensor.is_trainable) tensors_.push_back(tensor.streamed);
    files_.push_back({.path = kOptimizerFile});
  }

  const std::vector<StreamedTensor>& tensors() const { return tensors_; }
  const std::set<fs::path>& folders() const { return folders_; }

  void make_folders() const {
    disk_.create_directories(folder_ / "zero");
    for (const fs::path& path : folders_) disk_.create_directories(path);
  }

 private:
  struct File {
    std::string path;
    const std::vector<int64_t>* shape = nullptr;  ///< of the one tensor; null: not such a file
  };

  const SavedLayout& layout() const { return manifest_.layout; }
  const ElementSource& elements() const { return conversion_.checkpoint.elements(); }

  void list_parameters() {
    for (int i = 0; i < static_cast<int>(layout().parameters.size()); ++i) {
      const SavedParameter& parameter = layout().parameters[static_cast<size_t>(i)];
      if (!layout().is_trainable(parameter)) continue;
      check_name(parameter.name);
      const std::string folder = "zero/" + parameter.name;
      folders_.insert(folder_ / folder);
      files_.push_back({.path = folder + "/fp32.pt", .shape = &parameter.shape});
      tensors_.push_back(streamed(elements(), parameter.name, TensorId::weights(i), DType::kFloat32));
      for (const std::string& name : manifest_.state_names) {
        if (!has_state(state_.groups[static_cast<size_t>(parameter.group)], name)) continue;
        files_.push_back({.path = str(folder, "/", name, ".pt"), .shape = &parameter.shape});
        tensors_.push_back(streamed(elements(), str(parameter.name, ": ", name), TensorId::state(i, name)));
      }
      files_.push_back({.path = folder + "/step.pt"});
    }
  }

  void list_module() {
    for (int i = 0; i < static_cast<int>(layout().parameters.size()); ++i) {
      const SavedParameter& parameter = layout().parameters[static_cast<size_t>(i)];
      DType type = layout().units[static_cast<size_t>(parameter.unit)].dtype;
      if (layout().is_trainable(parameter) && type == DType::kFloat64)
        type = DType::kFloat32;  // as it is saved
      module_.push_back({.streamed = streamed(elements(), parameter.name, TensorId::weights(i), type),
                         .aliases = parameter.aliases,
                         .is_trainable = layout().is_trainable(parameter)});
    }
    for (size_t i = 0; i < manifest_.tensors.size(); ++i)
      module_.push_back({.streamed = streamed(elements(), manifest_.tensors[i].name, TensorId::buffer(i)),
                         .aliases = {},
                         .is_buffer = true});
  }

  std::optional<PlannedArchive> next() override {
    if (next_ == files_.size()) return std::nullopt;
    const File& file = files_[next_++];
    if (file.shape != nullptr) return tensor_archive(*file.shape);
    if (file.path == kModelFile) return model_archive(/*with_trainable=*/true);
    if (file.path == kStage3ModelFile) return model_archive(/*with_trainable=*/false);
    return file.path == kOptimizerFile ? optimizer_archive() : step_archive();
  }

  std::pair<OutputFile*, int64_t> open(int64_t bytes) override {
    file_.emplace(disk_.create(folder_ / files_[next_ - 1].path));
    file_->reserve(bytes);
    return {&*file_, 0};
  }

  void close() override {
    file_->close();
    file_.reset();
  }

  static PlannedArchive tensor_archive(const std::vector<int64_t>& shape) {
    PlannedArchive archive;
    const size_t storage = archive.stream(numel_of(shape) * size_bytes(DType::kFloat32));
    PickleWriter pickle;
    pickle.begin_dict()
        .text("cat_dim")
        .integer(0)
        .text("param")
        .tensor(DType::kFloat32, shape, storage)
        .end_dict();
    archive.pickle = pickle.finish();
    return archive;
  }

  // A tensor, as torch's optimizers have it; DeepSpeed's own take one for a number.
  PlannedArchive step_archive() const {
    PlannedArchive archive;
    PickleWriter pickle;
    pickle.tensor(DType::kFloat32, {}, archive.place(float_bytes(static_cast<float>(step_))));
    archive.pickle = pickle.finish();
    return archive;
  }

  void write_groups(PickleWriter& pickle) const {
    pickle.begin_list();
    for (size_t i = 0; i < state_.groups.size(); ++i) {
      pickle.begin_dict();
      for (const auto& [key, value] : state_.groups[i].items()) {
        pickle.text(key);
        write_value(pickle, value);
      }
      pickle.text("params").begin_list().integer(static_cast<int64_t>(i)).end_list().end_dict();
    }
    pickle.end_list();
  }

  PlannedArchive optimizer_archive() const {
    PlannedArchive archive;
    const size_t step = archive.place(float_bytes(static_cast<float>(step_)));
    PickleWriter pickle;
    pickle.begin_dict().text("param_groups");
    write_groups(pickle);
    pickle.text("optimizer_state_dict").begin_dict().text("state").begin_dict();
    for (size_t i = 0; i < state_.groups.size(); ++i)
      pickle.integer(static_cast<int64_t>(i))
          .begin_dict()
          .text("step")
          .tensor(DType::kFloat32, {}, step)
          .end_dict();
    pickle.end_dict().text("param_groups");
    write_groups(pickle);
    pickle.end_dict();
    if (!state_.loss_scaler.is_null()) write_loss_scaler(pickle);
    pickle.text("overflow").boolean(false);
    if (const auto clipping = clipping_of(state_.config)) pickle.text("clip_grad").number(*clipping);
    pickle.text("ds_version").text(kDeepSpeedVersion).end_dict();
    archive.pickle = pickle.finish();
    return archive;
  }

  // An object of DeepSpeed's class: its loader takes the optimizer's own scaler from here.
  void write_loss_scaler(PickleWriter& pickle) const {
    const auto found = state_.config.find("fp16");
    const json fp16 = found != state_.config.end() && found->is_object() ? *found : json::object();
    const bool is_dynamic = state_.loss_scaler.value("dynamic", fp16.value("loss_scale", 0.0) == 0);
    pickle.text("dynamic_loss_scale").boolean(is_dynamic).text("loss_scaler");
    pickle.object("deepspeed.runtime.fp16.loss_scaler", is_dynamic ? "DynamicLossScaler" : "LossScaler")
        .begin_dict();
    pickle.text("cur_scale").number(state_.loss_scaler.value("cur_scale", 1.0));
    pickle.text("dynamic").boolean(is_dynamic);
    if (is_dynamic) {
      const auto integer = [&](const char* name, int64_t value) { pickle.text(name).integer(value); };
      integer("cur_iter", state_.loss_scaler.value("cur_iter", int64_t{0}));
      integer("last_overflow_iter", state_.loss_scaler.value("last_overflow_iter", int64_t{-1}));
      integer("cur_hysteresis", state_.loss_scaler.value("cur_hysteresis", int64_t{1}));
      integer("delayed_shift", fp16.value("hysteresis", int64_t{2}));
      integer("scale_window", fp16.value("loss_scale_window", int64_t{1000}));
      pickle.text("scale_factor").number(2.0).text("min_scale").number(fp16.value("min_loss_scale", 1.0));
      pickle.text("consecutive_hysteresis").boolean(fp16.value("consecutive_hysteresis", false));
      pickle.text("raise_error_at_min_scale").boolean(true).text("dtype").dtype(DType::kFloat16);
    }
    pickle.end_dict().set_state();
  }

  PlannedArchive model_archive(bool with_trainable) const {
    PlannedArchive archive;
    PickleWriter pickle;
    std::map<std::string, size_t> frozen;  // storage by name
    pickle.begin_dict().text("module").begin_ordered_dict();
    for (const ModuleTensor& tensor : module_) {
      if (tensor.is_trainable && !with_trainable) continue;
      const size_t storage = archive.stream(tensor.streamed.bytes());
      if (!tensor.is_trainable && !tensor.is_buffer) frozen[tensor.streamed.name] = storage;
      pickle.text(tensor.streamed.name).tensor(tensor.streamed.type, tensor.streamed.saved.shape, storage);
      for (const std::string& alias : tensor.aliases)
        pickle.text(alias).tensor(tensor.streamed.type, tensor.streamed.saved.shape, storage);
    }
    pickle.end_dict();
    write_names(pickle, frozen);
    write_counters(pickle);
    pickle.end_dict();
    archive.pickle = pickle.finish();
    return archive;
  }

  void write_names(PickleWriter& pickle, const std::map<std::string, size_t>& frozen) const {
    pickle.text("buffer_names").begin_list();
    for (const ModuleTensor& tensor : module_)
      if (tensor.is_buffer) pickle.text(tensor.streamed.name);
    pickle.end_list().text("param_shapes").begin_list();
    for (size_t group = 0; group < state_.groups.size(); ++group) {
      pickle.begin_ordered_dict();
      for (const SavedParameter& parameter : layout().parameters)
        if (layout().is_trainable(parameter) && parameter.group == static_cast<int>(group))
          pickle.text(parameter.name).size(parameter.shape);
      pickle.end_dict();
    }
    pickle.end_list();
    for (const bool with_tensors : {false, true}) {
      pickle.text(with_tensors ? "frozen_param_fragments" : "frozen_param_shapes").begin_ordered_dict();
      for (const ModuleTensor& tensor : module_) {
        if (!frozen.contains(tensor.streamed.name)) continue;
        pickle.text(tensor.streamed.name);
        with_tensors ? pickle.tensor(tensor.streamed.type, tensor.streamed.saved.shape,
                                     frozen.at(tensor.streamed.name))
                     : pickle.size(tensor.streamed.saved.shape);
      }
      pickle.end_dict();
    }
    pickle.text("shared_params").begin_dict();
    for (const SavedParameter& parameter : layout().parameters)
      for (const std::string& alias : parameter.aliases) pickle.text(alias).text(parameter.name);
    pickle.end_dict();
  }

  void write_counters(PickleWriter& pickle) const {
    pickle.text("optimizer").none().text("data_sampler").none().text("random_ltd").none();
    pickle.text("lr_scheduler");
    write_value(pickle, state_.lr_scheduler);
    pickle.text("global_steps").integer(state_.global_steps);
    pickle.text("skipped_steps").integer(state_.skipped_steps);
    if (state_.global_samples) pickle.text("global_samples").integer(*state_.global_samples);
    pickle.text("dp_world_size").integer(layout().world_size).text("mp_world_size").integer(1);
    pickle.text("ds_config");
    write_value(pickle, unwritable(state_.config).empty() ? state_.config : json::object());
    pickle.text("ds_version").text(kDeepSpeedVersion);
    pickle.text("universal_checkpoint_info").begin_dict();
    pickle.text("universal_checkpoint_version").number(kUniversalVersion).end_dict();
    for (const auto& [key, value] : state_.client_state.items())
      if (!kOwnKeys.contains(key)) {
        pickle.text(key);
        write_value(pickle, value);
      }
  }

 public:
  /// Keys of the model's file that are not the user's.
  static inline const std::set<std::string> kOwnKeys{
      "module",        "buffer_names",  "param_shapes",   "frozen_param_shapes", "frozen_param_fragments",
      "shared_params", "optimizer",     "data_sampler",   "random_ltd",          "lr_scheduler",
      "global_steps",  "skipped_steps", "global_samples", "dp_world_size",       "mp_world_size",
      "ds_config",     "ds_version",    "num_experts",    "ds_autoep_layers",    "universal_checkpoint_info"};

 private:
  const Conversion& conversion_;
  const Manifest& manifest_;
  const TrainingState& state_;
  const Disk& disk_;
  fs::path folder_;
  int64_t step_;
  std::vector<File> files_;
  std::vector<StreamedTensor> tensors_;
  std::vector<ModuleTensor> module_;
  std::set<fs::path> folders_;
  size_t next_ = 0;
  std::optional<OutputFile> file_;
};

/// Notes what DeepSpeed does not take from the checkpoint.
void add_notes(const Conversion& conversion) {
  const Manifest& manifest = conversion.checkpoint.manifest();
  const TrainingState& state = conversion.state;
  std::vector<std::string>& notes = conversion.result.notes;
  const bool has_frozen = std::any_of(manifest.layout.units.begin(), manifest.layout.units.end(),
                                      [](const SavedUnit& unit) { return !unit.trainable; });
  if (has_frozen || !manifest.tensors.empty())
    notes.push_back(str(
        "DeepSpeed ", kDeepSpeedVersion, " loads neither ", has_frozen ? "frozen parameters" : "buffers",
        has_frozen && !manifest.tensors.empty() ? " nor buffers" : "",
        " from a universal checkpoint: give the module torch.load(\"", kModelFile, "\")[\"module\"] first"));
  const auto has = [&](const char* name) {
    return std::find(manifest.state_names.begin(), manifest.state_names.end(), name) !=
           manifest.state_names.end();
  };
  if (!has("exp_avg") || !has("exp_avg_sq"))
    notes.push_back(str("DeepSpeed ", kDeepSpeedVersion,
                        " loads this at stages 1 and 2; its stage 3 loads the states of Adam alone"));
  const double clipping = clipping_of(state.config).value_or(kDefaultClipping);
  if (clipping != kDefaultClipping)
    notes.push_back(str("DeepSpeed ", kDeepSpeedVersion,
                        " at stage 3 clips gradients as its own configuration says, by default at ",
                        kDefaultClipping, ": give it \"gradient_clipping\": ", clipping));
  const auto differ = [&](const json& group) { return group != state.groups.front(); };
  if (std::any_of(state.groups.begin(), state.groups.end(), differ))
    notes.push_back(
        str("DeepSpeed ", kDeepSpeedVersion,
            " at stage 3 gives all param groups the options of the first: set them after load_checkpoint()"));
  for (const auto& [key, value] : state.client_state.items())
    if (UniversalFiles::kOwnKeys.contains(key))
      notes.push_back(str("client_state: ", key, " is left out: DeepSpeed has something else of that name"));
}

void check_target(const fs::path& target) {
  if (is_there(target) && !is_there(target / kOptimizerFile))
    throw CheckpointError(
        target, " is no universal checkpoint; expected one, which is replaced, or a name that is free");
}

}  // namespace

void write_universal(const Conversion& conversion) {
  const Disk& disk = conversion.disk;
  const fs::path& directory = conversion.options.output;
  const std::string tag = conversion.checkpoint.manifest().tag + kFolderEnding;
  check_tag(tag);
  const fs::path target = directory / tag;
  check_target(target);
  add_notes(conversion);
  disk.create_directories(directory);
  remove_abandoned(disk, target);
  const HeldFolder folder = create_temporary_folder(disk, target);
  const fs::path& temporary = folder.path;
  try {
    UniversalFiles files(conversion, temporary);
    files.make_folders();
    stream_into(conversion, files.tensors(),
                [&](size_t tensor, std::span<const std::byte> data) { files.write(tensor, data); });
    files.finish();
    for (const fs::path& folder : files.folders()) disk.sync_directory(folder);
    disk.sync_directory(temporary / "zero");
    disk.sync_directory(temporary);
    check_target(target);
    Publication publication{directory, tag, temporary.filename().string(), {{kLatestUniversal, tag}}};
    if (!is_there(directory / kLatestName)) publication.pointers.emplace_back(kLatestName, tag + "\n");
    publish(publication, disk);
  } catch (...) {
    remove_quietly(disk, temporary);
    throw;
  }
  remove_quietly(disk, temporary);  // a checkpoint that was replaced has its name
  conversion.result.output = target;
}

}  // namespace tessera::checkpoint
