// JsonlMonitor: all records in one file of JSON lines, for programs of your own.
#pragma once

#include <optional>

#include "core/files/line_file.h"
#include "core/log.h"
#include "monitor/monitor.h"

namespace tessera {

/// Writes events as JSON lines: FOLDER/events.jsonl, one object a line, each with "time" (seconds since
/// 1970):
///   {"step": 10, "time": …, "scalars": {"train/loss": 0.31, …}}     null for a value that is not finite
///   {"step": 10, "time": …, "histogram": "NAME", "min": …, "max": …, "num": …, "sum": …, "sum_squares": …,
///    "bucket_limit": […], "bucket": […]}                            as in monitor/histogram.h
///   {"step": 10, "time": …, "image": "NAME", "width": 32, "height": 32, "file": "images/NAME_10.png"}
///                                                                   or PngView::file
///   {"step": 10, "time": …, "text": "NAME", "content": "…"}
///   {"time": …, "params": {…}}    {"time": …, "artifact": "FILE"}    {"time": …, "status": "FINISHED"}
/// Owns the open file.
class JsonlMonitor final : public Monitor {
 public:
  /// Creates the folder and the file. `resumed_after`: lines of later steps are removed; unset: all
  /// are. `log`: where it is said which lines could not be read.
  JsonlMonitor(std::filesystem::path folder, std::optional<int64_t> resumed_after, const Logger& log = {});

  std::string_view name() const override { return "jsonl_monitor"; }
  void scalars(int64_t step, const Scalars& scalars) override;
  void histogram(const std::string& name, int64_t step, const Histogram& histogram) override;
  void image(const std::string& name, int64_t step, const PngView& png) override;
  void text(const std::string& name, int64_t step, const std::string& text) override;
  void params(const nlohmann::ordered_json& params) override;
  void artifact(const std::filesystem::path& file) override;
  void close(RunStatus status) override;

 private:
  void write(const nlohmann::ordered_json& record);

  std::filesystem::path folder_;
  LineFile file_;
};

}  // namespace tessera
