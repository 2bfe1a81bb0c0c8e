#include "checkpoint/sharded/catalog.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <tuple>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/sharded/manifest.h"
#include "core/error.h"
#include "core/files/temporary_name.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxTagBytes = 200;

bool is_temporary_name(const std::string& name) { return !name_of_temporary(name).empty(); }

/// Whether the folder has a manifest of ours with the folder's name as its tag. A copy under another name is
/// neither listed nor deleted.
bool holds_checkpoint(const fs::path& folder) {
  constexpr size_t kHeadBytes = 2048;  // the tag is on the third line
  const std::string start = str("{\n\"format\": \"", kFormatName, "\"");
  constexpr std::string_view kTagKey = "\n\"tag\": ";
  try {
    std::string head(kHeadBytes, '\0');
    head.resize(InputFile(folder / kManifestName).read_some(0, std::as_writable_bytes(std::span(head))));
    if (!head.starts_with(start)) return false;
    const size_t key = head.find(kTagKey), value = key + kTagKey.size();
    if (key == head.npos) return true;
    const std::string line = head.substr(value, head.find(",\n", value) - value);
    const nlohmann::json tag = parse_json_or_discard(line);
    return !tag.is_string() || tag.get<std::string>() == folder.filename().string();
  } catch (const DiskError&) {
    return false;
  }
}

/// The step at the end of a tag. It orders saves whose files have the same modification time.
std::string trailing_number(const std::string& tag) {
  size_t begin = tag.size();
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(tag[begin - 1]))) --begin;
  begin = std::min(tag.find_first_not_of('0', begin), tag.size());
  return tag.substr(begin);
}

/// Throws CheckpointError for a directory that cannot be read: it may have checkpoints.
std::vector<fs::path> entries(const fs::path& directory) {
  try {
    return paths_in(directory);
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
}

}  // namespace

void check_tag(const std::string& tag) {
  const bool has_control =
      std::any_of(tag.begin(), tag.end(), [](unsigned char c) { return c < 32 || c == 127 || c == '/'; });
  if (tag.empty() || tag.size() > kMaxTagBytes || has_control || tag == "." || tag == ".." || !is_utf8(tag))
    throw CheckpointError("checkpoint tag ", quoted_name(tag), ": expected a folder's name of 1 to ",
                          kMaxTagBytes, " bytes without / and control characters");
  if (tag == kLatestName || is_temporary_name(tag))
    throw CheckpointError("checkpoint tag ", tag, ": the name is one Tessera gives to a file of its own");
}

std::vector<std::string> list_checkpoints(const fs::path& directory) {
  std::vector<std::tuple<fs::file_time_type, size_t, std::string, std::string>> found;
  for (const fs::path& path : entries(directory)) {
    const std::string tag = path.filename().string();
    if (is_temporary_name(tag) || !holds_checkpoint(path)) continue;
    std::error_code error;
    const fs::file_time_type time = fs::last_write_time(path / kManifestName, error);
    const std::string number = trailing_number(tag);
    if (!error) found.emplace_back(time, number.size(), number, tag);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> tags;
  for (const auto& [time, digits, number, tag] : found) tags.push_back(tag);
  return tags;
}

bool is_tesseras(const fs::path& folder) {
  return is_there(folder / kManifestName) || is_there(folder / rank_file_name(0));
}

std::vector<std::string> list_folders(const fs::path& directory) {
  std::vector<std::string> names;
  for (const fs::path& path : entries(directory)) {
    const std::string name = path.filename().string();
    if (!is_temporary_name(name) && is_tesseras(path)) names.push_back(name);
  }
  return names;
}

std::optional<std::string> read_latest(const fs::path& directory) {
  const fs::path path = directory / kLatestName;
  std::error_code error;
  if (fs::status(path, error).type() == fs::file_type::not_found) return std::nullopt;
  try {
    std::string tag = InputFile(path).read_all(kMaxTagBytes + 1);
    if (tag.ends_with('\n')) tag.pop_back();
    check_tag(tag);
    return tag;
  } catch (const Error& found) {
    throw CheckpointError(path, ": does not name a checkpoint: ", found.what());
  }
}

std::vector<std::string> keep_last(const fs::path& directory, const KeepLast& keep, const Disk& disk) {
  if (keep.num < 1)
    throw CheckpointError("cannot keep the last ", keep.num, " checkpoints; expected at least 1");
  std::vector<std::string> tags = list_checkpoints(directory);
  std::erase_if(tags, [&](const std::string& tag) {
    return std::find(keep.protect.begin(), keep.protect.end(), tag) != keep.protect.end();
  });
  const std::optional<std::string> latest = read_latest(directory);
  std::vector<std::string> deleted;
  const size_t num_delete = tags.size() - std::min(tags.size(), static_cast<size_t>(keep.num));
  try {
    for (size_t i = 0; deleted.size() < num_delete && i < tags.size(); ++i) {
      if (tags[i] == latest) continue;
      const fs::path away = directory / temporary_name(tags[i]);
      // Renamed first, so that an interrupted deletion leaves no folder that looks whole, even after a loss
      // of power.
      disk.rename(directory / tags[i], away);
      disk.sync_directory(directory);
      disk.remove_all(away);
      deleted.push_back(tags[i]);
    }
  } catch (const DiskError& error) {
    throw CheckpointError("cannot delete an old checkpoint: ", error.what());
  }
  return deleted;
}

void remove_leftovers(const fs::path& directory, const Disk& disk) {
  std::vector<fs::path> paths;
  try {
    paths = paths_in(directory);
  } catch (const DiskError&) {
    // A folder that cannot be listed can be saved into; what is left over there stays.
  }
  for (const fs::path& path : paths) {
    const std::string name = path.filename().string();
    std::error_code error;
    const bool is_folder = fs::symlink_status(path, error).type() == fs::file_type::directory;
    FileDescriptor held;
    if (is_temporary_name(name) && (is_folder || name_of_temporary(name) == kLatestName) &&
        !is_held(path, held))
      disk.remove_all(path);
  }
}

}  // namespace tessera::checkpoint
