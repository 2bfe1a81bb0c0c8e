// A folder of torch.distributed.checkpoint, as torch 2.15 writes and reads it (metadata.py, filesystem.py,
// default_planner.py), with the entries of the usual recipe of FSDP2:
//
//   state = {"model": …, "optimizer": …}       of torch.distributed.checkpoint.state_dict.get_state_dict
//   dcp.load(state, checkpoint_id=DIR); set_state_dict(model, optimizer, …)
//
// An entry's name is its path in that dict: "model.fc.weight", "optimizer.state.fc.weight.exp_avg",
// "optimizer.param_groups.0.lr". With flatten_optimizer_state_dict the groups' options are asked for by
// parameter, "optimizer.param_groups.fc.weight.lr": these names are there too, for the same bytes of the
// file. Beside these: "lr_scheduler.…", "client_state.…", "global_steps", "skipped_steps", "global_samples".
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "checkpoint/consolidate/archive_sequence.h"
#include "checkpoint/consolidate/python_value.h"
#include "checkpoint/consolidate/writers.h"
#include "checkpoint/formats/pending_output.h"
#include "checkpoint/formats/pickle_writer.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/value_tag.h"
#include "core/numel.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMetadataFile = ".metadata";
constexpr const char* kDataFile = "__0_0.distcp";
constexpr const char* kVersion = "1.0.0";
constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr const char* kFileModule = "torch.distributed.checkpoint.filesystem";

bool is_ours(const std::string& file_name) {
  return file_name == kMetadataFile || file_name.ends_with(".distcp");
}

using Path = std::vector<std::variant<std::string, int64_t>>;

/// "optimizer.param_groups.0.lr"
std::string entry_name(const Path& path) {
  std::string name;
  for (const auto& step : path) {
    if (!name.empty()) name += '.';
    name += std::holds_alternative<std::string>(step) ? std::get<std::string>(step)
                                                      : std::to_string(std::get<int64_t>(step));
  }
  return name;
}

Path operator+(Path path, std::variant<std::string, int64_t> step) {
  path.push_back(std::move(step));
  return path;
}

/// What an entry's bytes are: a tensor of the checkpoint, a step, or a value that is no tensor.
struct Item {
  enum class Kind { kTensor, kStep, kValue };
  Kind kind = Kind::kValue;
  DType type = DType::kFloat32;
  std::vector<int64_t> shape = {};
  float step = 0;
  json value = {};
  int64_t offset = 0, length = 0;  // in the file
};

struct Entry {
  Path path;
  size_t item = 0;
};

// As torch's traverse_state_dict: a list with dicts in it has an entry for each of their values, any other
// list is one value.
bool is_leaf(const json& value) {
  if (value.is_object()) return value.contains(kValueTag);
  return !value.is_array() || std::all_of(value.begin(), value.end(), [](const json& item) {
    return item.is_object() ? item.contains(kValueTag) : is_leaf(item);
  });
}

/// The entries and the file with their bytes. Owns the file.
class DistributedFile : public ArchiveSequence {
 public:
  DistributedFile(const Conversion& conversion, const fs::path& folder)
      : conversion_(conversion), file_(conversion.disk.create(folder / kDataFile)) {
    list_model();
    list_optimizer();
    const TrainingState& state = conversion.state;
    add_value({"global_steps"}, state.global_steps);
    add_value({"skipped_steps"}, state.skipped_steps);
    if (state.global_samples) add_value({"global_samples"}, *state.global_samples);
    if (!state.lr_scheduler.is_null()) add_value({"lr_scheduler"}, state.lr_scheduler);
    add_value({"client_state"}, state.client_state);
  }

  const std::vector<StreamedTensor>& tensors() const { return tensors_; }
  void close_file() { file_.close(); }

  std::string metadata() const {
    PickleWriter pickle;
    pickle.object(kMetadataModule, "Metadata").begin_dict().text("state_dict_metadata").begin_dict();
    for (const Entry& entry : entries_) {
      pickle.text(entry_name(entry.path));
      write_shape(pickle, items_[entry.item]);
    }
    pickle.end_dict().text("planner_data").begin_dict();
    for (const Entry& entry : entries_) {
      pickle.text(entry_name(entry.path)).begin_tuple();
      for (const auto& step : entry.path)
        std::holds_alternative<std::string>(step) ? pickle.text(std::get<std::string>(step))
                                                  : pickle.integer(std::get<int64_t>(step));
      pickle.end_tuple();
    }
    pickle.end_dict().text("storage_data").begin_dict();
    for (const Entry& entry : entries_) write_place(pickle, entry);
    pickle.end_dict().text("storage_meta").object(kMetadataModule, "StorageMeta").begin_dict();
    pickle.text("checkpoint_id").none().text("save_id").none().text("load_id").none();
    pickle.text("modules").begin_list().end_list().end_dict().set_state();
    pickle.text("version").text(kVersion).end_dict().set_state();
    return pickle.finish();
  }

 private:
  size_t add_item(Item item) {
    items_.push_back(std::move(item));
    return items_.size() - 1;
  }

  // {"a.b": 1, "a": {"b": 2}} has two entries of one name.
  void add_entry(Path path, size_t item) {
    const auto [known, is_new] = items_by_name_.try_emplace(entry_name(path), item);
    const Item &first = items_[known->second], &second = items_[item];
    if (is_new)
      entries_.push_back({std::move(path), item});
    else if (&first != &second && (second.kind != Item::Kind::kValue || first.value != second.value))
      conversion_.result.notes.push_back(
          str(known->first,
              " is there twice, and one of them is left out: dots join names in this format; "
              "expected names that stay different"));
  }

  void add_tensor(Path path, StreamedTensor tensor, const std::vector<Path>& aliases = {}) {
    const size_t item =
        add_item({.kind = Item::Kind::kTensor, .type = tensor.type, .shape = tensor.saved.shape});
    tensors_.push_back(std::move(tensor));
    add_entry(std::move(path), item);
    for (const Path& alias : aliases) add_entry(alias, item);
  }

  void add_value(const Path& path, const json& value) {
    if (is_leaf(value)) {
      add_entry(path, add_item({.value = value}));
    } else if (value.is_object()) {
      for (const auto& [key, item] : value.items()) add_value(path + key, item);
    } else {
      int64_t i = 0;
      for (const json& item : value) add_value(path + i++, item);
    }
  }

  DType model_type(DType saved) const {
    return is_floating(saved) ? conversion_.options.dtype.value_or(saved) : saved;
  }

  void list_model() {
    const Manifest& manifest = conversion_.checkpoint.manifest();
    const auto add = [&](const std::string& name, const TensorId& id, const std::vector<Path>& aliases) {
      const Path path{"model", name};
      StreamedTensor tensor = streamed(conversion_.checkpoint.elements(), entry_name(path), id);
      tensor.type = model_type(tensor.saved.type);
      add_tensor(path, std::move(tensor), aliases);
    };
    for (size_t i = 0; i < manifest.layout.parameters.size(); ++i) {
      const SavedParameter& parameter = manifest.layout.parameters[i];
      std::vector<Path> aliases;
      for (const std::string& alias : parameter.aliases) aliases.push_back({"model", alias});
      add(parameter.name, TensorId::weights(static_cast<int>(i)), aliases);
    }
    for (size_t i = 0; i < manifest.tensors.size(); ++i)
      add(manifest.tensors[i].name, TensorId::buffer(i), {});
  }

  void list_optimizer() {
    const Manifest& manifest = conversion_.checkpoint.manifest();
    const TrainingState& state = conversion_.state;
    for (size_t i = 0; i < manifest.layout.parameters.size(); ++i) {
      const SavedParameter& parameter = manifest.layout.parameters[i];
      if (!manifest.layout.is_trainable(parameter)) continue;
      const Path path{"optimizer", "state", parameter.name};
      bool has_any = false;
      for (const std::string& name : manifest.state_names) {
        if (!has_state(state.groups[static_cast<size_t>(parameter.group)], name)) continue;
        has_any = true;
        add_tensor(path + name, streamed(conversion_.checkpoint.elements(), entry_name(path + name),
                                         TensorId::state(static_cast<int>(i), name)));
      }
      if (has_any && counts_steps(state.optimizer))
        add_entry(path + "step",
                  add_item({.kind = Item::Kind::kStep, .step = static_cast<float>(state.steps[i])}));
    }
    for (size_t group = 0; group < state.groups.size(); ++group) list_group(static_cast<int>(group));
  }

  void list_group(int group) {
    json names = json::array();
    const SavedLayout& layout = conversion_.checkpoint.manifest().layout;
    for (const SavedParameter& parameter : layout.parameters)
      if (parameter.group == group && layout.is_trainable(parameter)) names.push_back(parameter.name);
    const Path path{"optimizer", "param_groups", int64_t{group}};
    add_entry(path + "params", add_item({.value = names}));
    for (const auto& [option, value] : conversion_.state.groups[static_cast<size_t>(group)].items()) {
      if (option == "bias_correction") continue;  // torch's optimizers always correct
      const size_t item = add_item({.value = value});
      add_entry(path + option, item);
      for (const json& name : names)
        add_entry({"optimizer", str("param_groups.", name.get<std::string>(), ".", option)}, item);
    }
  }

  std::optional<PlannedArchive> next() override {
    if (next_ == items_.size()) return std::nullopt;
    const Item& item = items_[next_++];
    PlannedArchive archive;
    PickleWriter pickle;
    if (item.kind == Item::Kind::kValue) {
      write_value(pickle, item.value);
    } else {
      const size_t storage = item.kind == Item::Kind::kStep
                                 ? archive.place(float_bytes(item.step))
                                 : archive.stream(numel_of(item.shape) * size_bytes(item.type));
      pickle.tensor(item.type, item.shape, storage);
    }
    archive.pickle = pickle.finish();
    return archive;
  }

  std::pair<OutputFile*, int64_t> open(int64_t bytes) override {
    Item& item = items_[next_ - 1];
    item.offset = end_;
    item.length = bytes;
    end_ += bytes;
    return {&file_, item.offset};
  }

  void close() override {}

  // The properties as torch wrote them before it had strides: every version reads these.
  static void write_shape(PickleWriter& pickle, const Item& item) {
    if (item.kind == Item::Kind::kValue) {
      pickle.object(kMetadataModule, "BytesStorageMetadata");
      return;
    }
    const std::vector<int64_t> origin(item.shape.size(), 0);
    pickle.object(kMetadataModule, "TensorStorageMetadata").begin_dict().text("properties");
    pickle.object(kMetadataModule, "TensorProperties").begin_tuple().dtype(item.type);
    pickle.global("torch.serialization", "_get_layout")
        .begin_tuple()
        .text("torch.strided")
        .end_tuple()
        .call();
    pickle.boolean(false);
    pickle.global(kMetadataModule, "_MEM_FORMAT_ENCODING").begin_tuple().integer(0).end_tuple().call();
    pickle.boolean(false).end_tuple().set_state();
    pickle.text("size").size(item.shape).text("chunks").begin_list();
    pickle.object(kMetadataModule, "ChunkStorageMetadata").begin_dict();
    pickle.text("offsets").size(origin).text("sizes").size(item.shape).end_dict().set_state();
    pickle.end_list().end_dict().set_state();
  }

  void write_place(PickleWriter& pickle, const Entry& entry) const {
    const Item& item = items_[entry.item];
    pickle.object(kMetadataModule, "MetadataIndex").begin_dict();
    pickle.text("fqn").text(entry_name(entry.path)).text("index");
    if (item.kind == Item::Kind::kValue)
      pickle.none().text("offset").none();
    else
      pickle.integer(0).text("offset").size(std::vector<int64_t>(item.shape.size(), 0));
    pickle.end_dict().set_state();
    pickle.object(kFileModule, "_StorageInfo").begin_dict();
    pickle.text("relative_path").text(kDataFile).text("offset").integer(item.offset);
    pickle.text("length").integer(item.length).end_dict().set_state();
  }

  const Conversion& conversion_;
  OutputFile file_;
  std::vector<Item> items_;  // in the order of the file
  std::vector<Entry> entries_;
  std::map<std::string, size_t> items_by_name_;
  std::vector<StreamedTensor> tensors_;
  size_t next_ = 0;
  int64_t end_ = 0;
};

}  // namespace

void write_distributed(const Conversion& conversion) {
  const TrainingState& state = conversion.state;
  if (std::any_of(state.groups.begin(), state.groups.end(), [](const json& group) {
        return group.value("bias_correction", json(true)) == json(false);
      }))
    conversion.result.notes.push_back("bias_correction false is left out: torch's optimizers always correct");
  if (!state.loss_scaler.is_null())
    conversion.result.notes.push_back(
        str("the loss scale is left out: give it to torch.amp.GradScaler(init_scale=",
            state.loss_scaler.value("cur_scale", 1.0), ")"));
  PendingDirectory folder(conversion.disk, conversion.options.output, is_ours);
  DistributedFile file(conversion, folder.temporary());
  stream_into(conversion, file.tensors(),
              [&](size_t tensor, std::span<const std::byte> data) { file.write(tensor, data); });
  file.finish();
  file.close_file();
  OutputFile metadata = conversion.disk.create(folder.temporary() / kMetadataFile);
  metadata.append(file.metadata());
  metadata.close();
  folder.publish();
}

}  // namespace tessera::checkpoint
