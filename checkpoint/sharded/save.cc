#include "checkpoint/sharded/save.h"

#include <sys/stat.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/pending_output.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/checkpoint_files.h"
#include "checkpoint/sharded/manifest.h"
#include "core/check.h"
#include "core/files/temporary_name.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

using Identity = std::pair<dev_t, ino_t>;

/// Device and inode of a path. A failed rename may have taken effect, so undo() compares these.
std::optional<Identity> identity(const fs::path& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return Identity{status.st_dev, status.st_ino};
}

/// nullopt: there is no such file, or it cannot be read. A `latest` that is damaged is replaced as one that
/// is not there.
std::optional<std::string> content_of(const fs::path& path) {
  constexpr int64_t kMost = 1 << 16;
  if (!identity(path)) return std::nullopt;
  try {
    return InputFile(path).read_all(kMost);
  } catch (const DiskError&) {
    return std::nullopt;
  }
}

/// Whether a file of a checkpoint's folder has a name that save() gives.
bool is_of_a_save(const std::string& name) {
  constexpr std::string_view kBegin = "rank_", kEnd = ".h5";
  if (name == kManifestName || name == kModelFileName) return true;
  return name.starts_with(kBegin) && name.ends_with(kEnd) &&
         name.find_first_not_of("0123456789", kBegin.size()) == name.size() - kEnd.size();
}

/// Throws CheckpointError for what a save would remove and has not made.
void check_replaced(const fs::path& target) {
  if (!identity(target) || is_tesseras(target)) return;
  const auto is_left_of_a_save = [](const fs::path& path) { return is_of_a_save(path.filename().string()); };
  if (is_folder(target) && std::ranges::all_of(paths_in(target), is_left_of_a_save)) return;
  throw CheckpointError(
      target, " is no checkpoint of Tessera's; expected one, which is replaced, or a name that is free");
}

/// Publishes a folder, and can undo that. Used by one thread, once.
class Publisher {
 public:
  Publisher(const Publication& publication, const Disk& disk)
      : disk_(disk),
        directory_(publication.directory),
        folder_(directory_ / publication.temporary),
        target_(directory_ / publication.tag),
        ours_(identity(folder_)),
        replaces_(identity(target_).has_value()) {
    for (const auto& [name, text] : publication.pointers)
      pointers_.push_back({directory_ / name, text, content_of(directory_ / name)});
  }

  /// Throws CheckpointError; then nothing has changed, or it says what could not be undone.
  void publish_or_undo() {
    try {
      publish();
    } catch (const std::exception& error) {
      undo_after(error);
      throw CheckpointError(error.what());
    }
  }

  /// Undoes the steps, if that has not been done. Throws CheckpointError with both reasons if it fails.
  void undo_after(const std::exception& error) {
    try {
      undo();
    } catch (const std::exception& second) {
      throw CheckpointError(error.what(), "; and undoing it failed: ", second.what());
    }
  }

 private:
  /// In reverse order.
  void undo() {
    for (const Pointer& pointer : pointers_) {
      if (content_of(pointer.path) != pointer.text) continue;  // not written yet, or by another save since
      if (pointer.old)
        disk_.replace_file(pointer.path, *pointer.old);
      else
        disk_.remove_all(pointer.path);
    }
    if (identity(target_) == ours_) {
      if (replaces_)
        disk_.exchange(folder_, target_);
      else
        disk_.rename(target_, folder_);
    }
    disk_.sync_directory(directory_);
  }

  void publish() {
    if (replaces_)
      disk_.exchange(folder_, target_);
    else
      disk_.rename(folder_, target_);
    disk_.sync_directory(directory_);
    for (const Pointer& pointer : pointers_) disk_.replace_file(pointer.path, pointer.text);
  }

  struct Pointer {
    fs::path path;
    std::string text;
    std::optional<std::string> old;
  };

  const Disk& disk_;
  fs::path directory_, folder_, target_;
  std::optional<Identity> ours_;
  bool replaces_;
  std::vector<Pointer> pointers_;
};

}  // namespace

std::vector<fs::path> missing_folders(const fs::path& directory) {
  std::vector<fs::path> missing;
  for (fs::path next = fs::absolute(directory); !is_there(next) && next.has_relative_path();
       next = next.parent_path())
    if (next.has_filename()) missing.push_back(next);
  return missing;
}

void publish(const Publication& publication, const Disk& disk) {
  Publisher(publication, disk).publish_or_undo();
}

namespace {

using nlohmann::json;

/// The file through which a rank sends its file record to rank 0, in a folder that both share: for many ranks
/// the records are too long for an exchange.
fs::path record_path(const fs::path& folder, int rank) { return folder / str(rank_file_name(rank), ".json"); }

/// The outcome of a step on one rank, as sent to the others.
struct Outcome {
  std::string error;  // empty: success
  json facts = json::object();
};

std::string encode(const Outcome& outcome) {
  const json message =
      outcome.error.empty() ? json{{"facts", outcome.facts}} : json{{"error", outcome.error}};
  return json_text(message);  // paths may not be UTF-8
}

Outcome decode(const std::string& text) {
  const json message = parse_json_or_discard(text);
  if (message.is_object() && message.contains("error") && message["error"].is_string())
    return {.error = message["error"], .facts = {}};
  if (message.is_object() && message.contains("facts") && message["facts"].is_object())
    return {.error = "", .facts = message["facts"]};
  return {.error = "sent something that is no outcome of a save", .facts = {}};
}

/// One rank's part of a save. Used by one thread, once.
class Save {
 public:
  Save(const SaveRequest& request, const Exchange& exchange)
      : request_(request),
        exchange_(exchange),
        disk_(request.disk),
        scratch_({.sync = false, .probe = request.disk.probe}) {
    TESSERA_CHECK(request.layout != nullptr);
    layout_ = saved_layout(*request.layout, !request.exclude_frozen);
    TESSERA_CHECK(request.owners.empty() || std::ssize(request.owners) == layout_.world_size);
  }

  SaveResult run() {
    try {
      agree([&] { return begin(); });
      check_same_save();
      folder_.path = request_.directory / outcomes_[owner()].facts.value("folder", std::string());
      agree([&] { return write(); });
      commit_everywhere();
    } catch (...) {
      discard();
      throw;
    }
    SaveResult result{.path = request_.directory / request_.tag, .warning = ""};
    if (owns_folder()) result.warning = remove_replaced();
    return result;
  }

 private:
  bool is_first() const { return request_.rank == 0; }
  size_t owner() const {
    return request_.owners.empty() ? 0
                                   : static_cast<size_t>(request_.owners[static_cast<size_t>(request_.rank)]);
  }
  bool owns_folder() const { return static_cast<int>(owner()) == request_.rank; }
  bool is_one_folder() const {
    return std::all_of(request_.owners.begin(), request_.owners.end(), [](int owner) { return owner == 0; });
  }
  /// Which rank writes the file of this number.
  int rank_of(int file) const {
    return request_.writers.empty() ? file : request_.writers[static_cast<size_t>(file)];
  }
  std::string what() const {
    fs::path path = request_.directory;
    try {
      check_tag(request_.tag);
      path /= request_.tag;
    } catch (const CheckpointError&) {  // an invalid tag may contain anything: not shown
    }
    return str("cannot save checkpoint ", path, ": ");
  }

  /// Runs this rank's part and exchanges outcomes. An error on one rank throws the same CheckpointError on
  /// all.
  template <class Part>
  void agree(const Part& part) {
    Outcome mine;
    try {
      mine.facts = part();
    } catch (const std::exception& error) {
      mine.error = error.what();
    }
    outcomes_.clear();
    for (const std::string& text : exchange_(encode(mine))) outcomes_.push_back(decode(text));
    TESSERA_CHECK(static_cast<int>(outcomes_.size()) == layout_.world_size, "the exchange gave ",
                  outcomes_.size(), " strings");
    std::string errors;
    for (int file = 0; file < layout_.world_size; ++file)
      if (!outcomes_[file].error.empty())
        errors += str(errors.empty() ? "" : "; ", "rank ", rank_of(file), ": ", outcomes_[file].error);
    if (!errors.empty()) throw CheckpointError(what() + errors);
  }

  /// Where an owner has failed, or a rank is lost, the others take back what they have published. One folder
  /// whose owner has committed it stays, whoever is lost then.
  void commit_everywhere() {
    try {
      agree([&] { return owns_folder() ? commit() : json::object(); });
    } catch (const std::exception& error) {
      const bool is_lost = dynamic_cast<const CheckpointError*>(&error) == nullptr;
      if (!publisher_ || (is_lost && is_one_folder())) throw;
      keeps_folder_ = true;
      publisher_->undo_after(error);
      keeps_folder_ = false;
      throw;
    }
  }

  ShardContent content() const {
    return {.tag = request_.tag,
            .rank = request_.rank,
            .layout = &layout_,
            .state_names = request_.state_names,
            .units = request_.units,
            .tensors = is_first() ? request_.tensors : std::vector<WholeTensor>{},
            .blobs = request_.blobs};
  }

  json begin() {
    check_tag(request_.tag);
    check_content(content());
    if (is_first()) check_state(request_.state);
    json facts{{"tag", request_.tag},
               {"stage", request_.stage},
               {"states", join(request_.state_names, ", ")},
               {"layout", str(std::hex, request_.layout->digest())},
               {"save_latest", request_.latest},
               {"exclude_frozen_parameters", request_.exclude_frozen}};
    if (!owns_folder()) return facts;
    const fs::path& directory = request_.directory;
    check_replaced(directory / request_.tag);
    if (!request_.create && !fs::is_directory(directory)) throw CheckpointError("the folder is gone");
    if (request_.create) {
      const std::vector<fs::path> made = missing_folders(directory);
      disk_.create_directories(directory);
      for (const fs::path& folder : made) disk_.sync_directory(folder.parent_path());
    }
    remove_leftovers(directory, disk_);
    folder_ = create_temporary_folder(disk_, directory / request_.tag);
    facts["folder"] = folder_.path.filename().string();
    return facts;
  }

  void check_same_save() const {
    for (const char* key : {"tag", "stage", "states", "layout", "save_latest", "exclude_frozen_parameters"})
      for (int file = 1; file < layout_.world_size; ++file) {
        const json &first = outcomes_[0].facts[key], &other = outcomes_[file].facts[key];
        if (other != first)
          throw CheckpointError(what(), key, " ", other.dump(), " on rank ", rank_of(file), ", ",
                                first.dump(), " on rank ", rank_of(0));
      }
  }

  json write() {
    const fs::path path = folder_.path / rank_file_name(request_.rank);
    if (!fs::is_directory(folder_.path))
      throw CheckpointError(folder_.path, ", which rank ", rank_of(static_cast<int>(owner())),
                            " made, is not here: all ranks must share the file system of ",
                            request_.directory);
    mine_ = write_shard_file(disk_, path, content());
    if (owns_folder()) {
      std::vector<std::string> buffers;
      for (const WholeTensor& tensor : request_.tensors) buffers.push_back(tensor.name);
      model_ = write_model_file(disk_, folder_.path / kModelFileName, layout_, buffers);
    }
    if (!is_one_folder()) {
      json facts{{"record", file_record_to_text(mine_)}};
      if (is_first()) facts["state"] = request_.state;
      return facts;
    }
    if (is_first()) return json::object();
    const std::string text = file_record_to_text(mine_);
    OutputFile file = scratch_.create(record_path(folder_.path, request_.rank));
    file.append(text);
    file.close();
    return {{"record", text_digest(text)}};
  }

  FileRecord take_record(int file, FileRecordReader& records) const {
    const std::string record = outcomes_[file].facts.value("record", std::string());
    if (!is_one_folder()) return records.parse(record, str("the record of rank ", rank_of(file)));
    const fs::path path = record_path(folder_.path, file);
    const std::string text = InputFile(path).read_all(kMaxManifestBytes);
    if (text_digest(text) != record)
      throw CheckpointError(path, ": is not what rank ", rank_of(file), " wrote");
    FileRecord parsed = records.parse(text, path.string());
    scratch_.remove_all(path);
    return parsed;
  }

  /// A folder's owner: the checkpoint is committed there when this returns.
  json commit() {
    Manifest manifest{.tag = request_.tag,
                      .stage = request_.stage,
                      .layout = layout_,
                      .state_names = request_.state_names,
                      .files = {},
                      .tensors = {},
                      .state = is_one_folder() ? request_.state : outcomes_[0].facts.at("state")};
    FileRecordReader records;
    for (int rank = 0; rank < layout_.world_size; ++rank)
      manifest.files.push_back(rank == request_.rank ? mine_ : take_record(rank, records));
    manifest.files.push_back(model_);
    for (const WholeTensor& tensor : request_.tensors)
      manifest.tensors.push_back({tensor.name, tensor_dataset(tensor.name)});
    const fs::path path = folder_.path / kManifestName;
    const std::string text = manifest.to_text();
    Manifest::parse(text, path.string());  // throws for a manifest that could not be opened
    OutputFile file = disk_.create(path);
    file.append(text);
    file.close();
    const fs::path target = request_.directory / request_.tag;
    check_replaced(target);  // it may be new
    if (fs::is_directory(target)) keep_other_files(disk_, target, folder_.path, is_of_a_save);
    disk_.sync_directory(folder_.path);
    Publication publication{request_.directory, request_.tag, folder_.path.filename().string(), {}};
    if (request_.latest) publication.pointers.emplace_back(kLatestName, request_.tag + "\n");
    publisher_.emplace(publication, disk_);
    publisher_->publish_or_undo();
    return json::object();
  }

  /// Removes the replaced checkpoint, if there was one: it now has the temporary folder's name.
  std::string remove_replaced() const {
    try {
      if (fs::exists(folder_.path)) disk_.remove_all(folder_.path);
      return "";
    } catch (const std::exception& error) {
      return str("the checkpoint that ", request_.tag,
                 " replaced is left over, to be removed by the next save: ", error.what());
    }
  }

  /// Is called after an error, when all ranks have stopped writing.
  void discard() const noexcept {
    if (!owns_folder() || folder_.path.empty() || keeps_folder_) return;
    try {
      disk_.remove_all(folder_.path);
    } catch (const std::exception&) {
      // The first error is reported; the next save removes the folder.
    }
  }

  const SaveRequest& request_;
  const Exchange& exchange_;
  Disk disk_, scratch_;  // scratch_ does not sync: its files are removed before the save ends
  SavedLayout layout_;
  HeldFolder folder_;  // its owner has the lock, so that other saves into the directory leave it
  FileRecord mine_, model_;
  std::optional<Publisher> publisher_;  // a folder's owner, once it commits
  bool keeps_folder_ = false;           // what was replaced could not be put back, and has that name
  std::vector<Outcome> outcomes_;       // of the last exchange, by file
};

}  // namespace

SaveResult save(const SaveRequest& request, const Exchange& exchange) {
  return Save(request, exchange).run();
}

}  // namespace tessera::checkpoint
