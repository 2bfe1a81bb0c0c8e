#include "train/run/run_directory.h"

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <system_error>

#include "checkpoint/sharded/catalog.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/files/temporary_name.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"

namespace tessera::train {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& reason) {
  throw ConfigError("trainer.output_dir: ", path, " cannot be written: ", reason);
}

/// Of a model, a configuration, or another program's training. A run of our own has an id, records, or a
/// checkpoint.
void refuse_files_of_no_run(const std::filesystem::path& folder) {
  std::error_code error;
  if (is_there(folder / kRunIdName) || is_there(checkpoints_of(folder) / checkpoint::kLatestName) ||
      (is_there(folder / kMetricsName) && std::filesystem::file_size(folder / kMetricsName, error) > 0))
    return;
  for (const char* const name : {kConfigName, kModelName, kStateName, kResultsName, kEvalResultsName})
    if (is_there(folder / name))
      fail(folder / name,
           "it is no file of a run of `tessera train`, which would replace it; expected another folder");
}

/// Removes only files named by sample_path(), since the folder may hold files of the user's own.
void remove_samples(const std::filesystem::path& samples) {
  std::error_code error;
  for (const std::filesystem::path& path : paths_in(samples)) {
    const std::string file_name = path.filename().string();
    const std::string_view unfinished = name_of_temporary(file_name);  // left by a killed run
    const std::string stem =
        std::filesystem::path(unfinished.empty() ? file_name : unfinished).stem().string();
    const bool is_ours = stem.size() >= 13 && stem.starts_with("step_") &&
                         stem.find_first_not_of("0123456789", 5) == stem.npos;
    if (is_ours && std::filesystem::is_regular_file(path, error)) std::filesystem::remove(path, error);
    if (error) throw Error(path, " cannot be removed: ", error.message());
  }
  std::filesystem::remove(samples, error);  // succeeds only if it is empty
}

}  // namespace

RunDirectory::RunDirectory(const std::filesystem::path& folder) : folder_(folder) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) fail(folder_, error.message());
  if (!std::filesystem::is_directory(folder_, error)) fail(folder_, "it is not a folder");
  // Before anything is removed: a file that cannot be read or replaced later would leave half of a run.
  for (const char* const name : {kConfigName, kMetricsName, kRunIdName, kStateName, kResultsName, kModelName})
    if (std::filesystem::exists(folder_ / name, error) &&
        !std::filesystem::is_regular_file(folder_ / name, error))
      fail(folder_ / name, "it is not a regular file");
  refuse_files_of_no_run(folder_);
  lock_.emplace(folder_);
  errno = 0;
  if (!std::ofstream(folder_ / kMetricsName, std::ios::app))
    fail(folder_ / kMetricsName, describe_errno(errno));
}

std::filesystem::path sample_path(const std::filesystem::path& folder, int64_t step,
                                  std::string_view ending) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  return folder / str(printed("step_%08lld", static_cast<long long>(step)), ending);
}

std::string read_run_id(const std::filesystem::path& folder) {
  constexpr size_t kDigits = 16;
  const std::filesystem::path path = folder / kRunIdName;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return "";
  std::string text = InputFile(path).read_all(kDigits + 1);
  if (text.ends_with('\n')) text.pop_back();
  if (text.size() == kDigits && text.find_first_not_of("0123456789abcdef") == text.npos) return text;
  throw Error(path, ": holds no run's id; expected ", kDigits, " hexadecimal digits");
}

void RunDirectory::begin() {
  remove_samples(folder_ / kSamplesName);
  remove_results();
  metrics_.emplace(folder_ / kMetricsName, nullptr);
}

std::string RunDirectory::resume(int64_t step) {
  remove_results();
  const auto step_of = [](const std::string& line) {
    const auto record = parse_json_or_discard(line);
    const bool is_record =
        record.is_object() && record.contains("step") && record["step"].is_number_integer();
    return is_record ? std::optional(record["step"].get<int64_t>()) : std::nullopt;
  };
  metrics_.emplace(
      folder_ / kMetricsName,
      [&](const std::string& line) { return step_of(line).value_or(step + 1) <= step; },
      [&](const std::string& line) { return step_of(line).has_value(); });
  return metrics_->damage();
}

/// Is called before metrics.jsonl changes, so that results are never beside another run's metrics.
void RunDirectory::remove_results() const {
  std::error_code error;
  for (const char* name : {kResultsName, kStateName, kEvalResultsName, kModelName}) {
    std::filesystem::remove(folder_ / name, error);
    if (error) throw Error(folder_ / name, " cannot be removed: ", error.message());
  }
}

void RunDirectory::write(const std::string& name, const std::string& content) const {
  replace_file(folder_ / name, content);
}

void RunDirectory::append_metrics(const nlohmann::ordered_json& record) {
  metrics_.value().append(json_text(record));
}

std::vector<nlohmann::ordered_json> RunDirectory::metrics() const {
  std::vector<nlohmann::ordered_json> records;
  std::istringstream file(InputFile(folder_ / kMetricsName).read_all());
  for (std::string line; std::getline(file, line);) try {
      if (auto record = parse_ordered_json(line); record.is_object()) records.push_back(std::move(record));
    } catch (const JsonError&) {
      continue;  // the last line of a run that was killed
    }
  return records;
}

}  // namespace tessera::train
