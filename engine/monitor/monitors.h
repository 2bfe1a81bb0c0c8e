// Monitors: everything a configuration's monitors are told, told once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/log.h"
#include "engine/config/config.h"
#include "engine/monitor/monitor.h"

namespace tessera {

/// The run that is monitored.
struct MonitoredRun {
  std::string name;              ///< where the configuration gives no job_name or run_name
  std::filesystem::path folder;  ///< where it gives no output_path
  /// The run goes on after this step: what was recorded of later steps is taken back. Unset: it is a new run,
  /// which takes the place of one that was recorded in the same folder.
  std::optional<int64_t> resumed_after;
  Logger log;
};

/// Owns the monitors that are enabled. Rank 0 has some, the other ranks none. One thread uses it.
/// Monitoring is never a reason for a run to stop: a monitor that fails, at the beginning or later, is
/// dropped with one warning, and nothing here throws.
class Monitors {
 public:
  Monitors() = default;  ///< none
  Monitors(const MonitorConfig& config, const MonitoredRun& run);
  /// For monitors of one's own.
  Monitors(std::vector<std::unique_ptr<Monitor>> monitors, Logger log);
  Monitors(Monitors&& other) = default;
  Monitors& operator=(Monitors&& other) noexcept;
  /// Closes as kFailed: whoever comes to a good end has closed.
  ~Monitors();

  bool empty() const { return monitors_.empty(); }
  /// Local. Each as in Monitor.
  void scalars(int64_t step, const Scalars& scalars);
  void histogram(const std::string& name, int64_t step, const Histogram& histogram);
  void histogram(const std::string& name, int64_t step, std::span<const float> values);
  /// Encoded once, for all. An image that cannot be encoded is left out with a warning.
  void image(const std::string& name, int64_t step, const ImageView& image);
  void text(const std::string& name, int64_t step, const std::string& text);
  /// A file for people to look at: the image in a .png, as it is, and anything else as text. One that cannot
  /// be read is left out with a warning. It has to stay where it is.
  void sample(const std::string& name, int64_t step, const std::filesystem::path& file);
  void params(const nlohmann::ordered_json& params);
  void artifact(const std::filesystem::path& file);
  void close(RunStatus status);

 private:
  void tell(const std::function<void(Monitor&)>& what);
  void or_warn(const std::string& name, const std::function<void()>& what);

  std::vector<std::unique_ptr<Monitor>> monitors_;
  Logger log_;
};

/// Local. The folder of a monitor that writes files: output_path/job_name as in DeepSpeed, where an
/// output_path of "" is the folder SECTION in the run's and a job_name of "" the last part of the run's
/// folder (in the run's folder: nothing).
std::filesystem::path monitor_folder(const FileMonitorConfig& config, std::string_view section,
                                     const MonitoredRun& run);

}  // namespace tessera
