#include "train/run_directory.h"

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/disk.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::train {
namespace {

constexpr const char* kMetrics = "metrics.jsonl";

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& reason) {
  throw ConfigError(str("trainer.output_dir: ", path.string(), " cannot be written: ", reason));
}

}  // namespace

RunDirectory::RunDirectory(const std::filesystem::path& folder) : folder_(folder) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) fail(folder_, error.message());
  if (!std::filesystem::is_directory(folder_, error)) fail(folder_, "it is not a folder");
  errno = 0;
  metrics_.open(folder_ / kMetrics, std::ios::app);
  if (!metrics_) fail(folder_ / kMetrics, std::strerror(errno));
}

std::filesystem::path sample_path(const std::filesystem::path& folder, int64_t step, std::string_view ending) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  char name[32];
  std::snprintf(name, sizeof name, "step_%08lld", static_cast<long long>(step));
  return folder / str(name, ending);
}

bool RunDirectory::has_results() const {
  std::error_code error;
  return std::filesystem::exists(folder_ / kResultsName, error);
}

void RunDirectory::begin() {
  std::error_code error;
  std::filesystem::remove_all(folder_ / kSamplesName, error);
  if (error) throw Error(str((folder_ / kSamplesName).string(), " cannot be removed: ", error.message()));
  replace_metrics("");
}

void RunDirectory::replace_metrics(const std::string& content) {
  std::error_code error;
  std::filesystem::remove(folder_ / kResultsName, error);  // first: results are never beside another run's metrics
  if (error) throw Error(str((folder_ / kResultsName).string(), " cannot be removed: ", error.message()));
  metrics_.close();
  write(kMetrics, content);
  errno = 0;
  metrics_.open(folder_ / kMetrics, std::ios::app);
  if (!metrics_) throw Error(str((folder_ / kMetrics).string(), " cannot be written: ", std::strerror(errno)));
}

// Not synced: that would protect against power failures only.
void RunDirectory::write(const std::string& name, const std::string& content) const {
  Disk({.sync = false, .probe = {}}).replace_file(folder_ / name, content);
}

void RunDirectory::append_metrics(const nlohmann::ordered_json& record) {
  errno = 0;
  metrics_ << record.dump() + "\n" << std::flush;
  if (!metrics_) throw Error(str((folder_ / kMetrics).string(), " cannot be written: ", std::strerror(errno)));
}

void RunDirectory::go_on(int64_t step) {
  std::ifstream old(folder_ / kMetrics);
  std::string kept;
  for (std::string line; std::getline(old, line);) {
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);  // a killed run's last line may be half
    if (record.is_object() && record.value("step", int64_t{0}) <= step) kept += line + "\n";
  }
  replace_metrics(kept);
}

}  // namespace tessera::train
