#include "engine/monitor/monitors.h"

#include <exception>

#include "core/disk.h"
#include "core/str.h"
#include "core/utf8.h"
#include "engine/monitor/csv_monitor.h"
#include "engine/monitor/jsonl_monitor.h"
#include "engine/monitor/mlflow_monitor.h"
#include "engine/monitor/tensorboard_monitor.h"

namespace tessera {

std::string_view name_of(RunStatus status) {
  switch (status) {
    case RunStatus::kFinished: return "FINISHED";
    case RunStatus::kFailed: return "FAILED";
    case RunStatus::kKilled: return "KILLED";
  }
  return "";
}

std::filesystem::path monitor_folder(const FileMonitorConfig& config, std::string_view section,
                                     const MonitoredRun& run) {
  if (config.output_path.empty()) return run.folder / section / config.job_name;
  if (!config.job_name.empty()) return std::filesystem::path(config.output_path) / config.job_name;
  const std::string last =
      run.folder.filename().string();  // runs with folders of their own do not share one here
  return std::filesystem::path(config.output_path) /
         (last.empty() || last == "." || last == ".." ? run.name : last);
}

static void warn(const Logger& log, std::string_view monitor, const std::exception& error) {
  log.warning(str(monitor, ": ", error.what(), "; the run goes on without it"));
}

Monitors::Monitors(const MonitorConfig& config, const MonitoredRun& run) : log_(run.log) {
  const auto open = [&](bool enabled, const char* name, const auto& make) {
    if (!enabled) return;
    try {
      monitors_.push_back(make());
    } catch (const std::exception& error) {
      warn(log_, name, error);
    }
  };
  const auto folder = [&](const FileMonitorConfig& section, const char* name) {
    return monitor_folder(section, name, run);
  };
  open(config.tensorboard.enabled, "tensorboard", [&] {
    return std::make_unique<TensorboardMonitor>(folder(config.tensorboard, "tensorboard"), run.resumed_after);
  });
  open(config.csv.enabled, "csv_monitor",
       [&] { return std::make_unique<CsvMonitor>(folder(config.csv, "csv_monitor"), run.resumed_after); });
  open(config.jsonl.enabled, "jsonl_monitor", [&] {
    return std::make_unique<JsonlMonitor>(folder(config.jsonl, "jsonl_monitor"), run.resumed_after);
  });
  if (!run.resumed_after) {
    try {
      forget_mlflow_run(run);
    } catch (const std::exception& error) {
      log_.warning(str("mlflow: ", error.what()));
    }
  }
  open(config.mlflow.enabled, "mlflow",
       [&] { return std::make_unique<MlflowMonitor>(mlflow_options(config.mlflow, run)); });
}

Monitors::Monitors(std::vector<std::unique_ptr<Monitor>> monitors, Logger log)
    : monitors_(std::move(monitors)), log_(std::move(log)) {}

Monitors& Monitors::operator=(Monitors&& other) noexcept {
  if (this != &other) {
    close(RunStatus::kFailed);
    monitors_ = std::move(other.monitors_);
    log_ = std::move(other.log_);
  }
  return *this;
}

Monitors::~Monitors() { close(RunStatus::kFailed); }

void Monitors::tell(const std::function<void(Monitor&)>& what) {
  std::erase_if(monitors_, [&](const std::unique_ptr<Monitor>& monitor) {
    try {
      what(*monitor);
      return false;
    } catch (const std::exception& error) {
      warn(log_, monitor->name(), error);
      return true;
    }
  });
}

void Monitors::scalars(int64_t step, const Scalars& scalars) {
  tell([&](Monitor& monitor) { monitor.scalars(step, scalars); });
}

void Monitors::histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  tell([&](Monitor& monitor) { monitor.histogram(name, step, histogram); });
}

void Monitors::histogram(const std::string& name, int64_t step, std::span<const float> values) {
  if (!empty()) histogram(name, step, make_histogram(values));
}

/// What is wrong with one image is no fault of the monitors.
void Monitors::or_warn(const std::string& name, const std::function<void()>& what) {
  if (empty()) return;
  try {
    what();
  } catch (const std::exception& error) {
    log_.warning(str("monitors: ", name, " is left out: ", error.what()));
  }
}

void Monitors::image(const std::string& name, int64_t step, const ImageView& image) {
  or_warn(name, [&] {
    const std::string png = encode_png(image);
    tell([&, view = png_view(png)](Monitor& monitor) { monitor.image(name, step, view); });
  });
}

void Monitors::text(const std::string& name, int64_t step, const std::string& text) {
  const std::string valid = as_utf8(text);
  tell([&](Monitor& monitor) { monitor.text(name, step, valid); });
}

void Monitors::sample(const std::string& name, int64_t step, const std::filesystem::path& file) {
  constexpr int64_t kLongestFile = int64_t{1} << 28;
  or_warn(name, [&] {
    const std::string content = InputFile(file).read_all(kLongestFile);
    if (file.extension() != ".png") return text(name, step, content);
    PngView png = png_view(content);
    png.file = file;
    tell([&](Monitor& monitor) { monitor.image(name, step, png); });
  });
}

void Monitors::params(const nlohmann::ordered_json& params) {
  tell([&](Monitor& monitor) { monitor.params(params); });
}

void Monitors::artifact(const std::filesystem::path& file) {
  tell([&](Monitor& monitor) { monitor.artifact(file); });
}

void Monitors::close(RunStatus status) {
  tell([&](Monitor& monitor) { monitor.close(status); });
  monitors_.clear();
}

}  // namespace tessera
