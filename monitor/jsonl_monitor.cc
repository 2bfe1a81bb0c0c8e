#include "monitor/jsonl_monitor.h"

#include <nlohmann/json.hpp>

#include "core/files/disk.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "monitor/file_name.h"
#include "monitor/wall_time.h"

namespace tessera {
namespace {

using nlohmann::ordered_json;

std::filesystem::path made(std::filesystem::path folder) {
  Disk().create_directories(folder);
  return folder;
}

bool is_record(const nlohmann::json& record) {
  return record.is_object() && (!record.contains("step") || record["step"].is_number());
}

LineFile::Test keeps_until(std::optional<int64_t> step) {
  if (!step) return {};
  return [step](const std::string& line) {
    const nlohmann::json record = parse_json_or_discard(line);
    return is_record(record) && (!record.contains("step") || record["step"] <= *step);
  };
}

ordered_json record_of(int64_t step) { return {{"step", step}, {"time", wall_time_s()}}; }
ordered_json record_of() { return {{"time", wall_time_s()}}; }

}  // namespace

JsonlMonitor::JsonlMonitor(std::filesystem::path folder, std::optional<int64_t> resumed_after,
                           const Logger& log)
    : folder_(made(std::move(folder))),
      file_(folder_ / "events.jsonl", keeps_until(resumed_after),
            [](const std::string& line) { return is_record(parse_json_or_discard(line)); }) {
  if (!file_.damage().empty()) log.warning(file_.damage());
}

void JsonlMonitor::write(const ordered_json& record) { file_.append(json_text(record)); }

void JsonlMonitor::scalars(int64_t step, const Scalars& scalars) {
  ordered_json record = record_of(step);
  ordered_json& values = record["scalars"] = ordered_json::object();
  for (const auto& [name, value] : scalars) values[name] = value;
  write(record);
}

void JsonlMonitor::histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  ordered_json record = record_of(step);
  record.update(ordered_json{{"histogram", name},
                             {"min", histogram.min},
                             {"max", histogram.max},
                             {"num", histogram.num},
                             {"sum", histogram.sum},
                             {"sum_squares", histogram.sum_squares},
                             {"bucket_limit", histogram.bucket_limit},
                             {"bucket", histogram.bucket}});
  write(record);
}

void JsonlMonitor::image(const std::string& name, int64_t step, const PngView& png) {
  std::string file = png.file.string();
  if (file.empty()) {
    file = step_file("images", name, step, ".png");
    made(folder_ / "images");
    replace_file(folder_ / file, png.bytes);
  }
  ordered_json record = record_of(step);
  record.update(ordered_json{{"image", name}, {"width", png.width}, {"height", png.height}, {"file", file}});
  write(record);
}

void JsonlMonitor::text(const std::string& name, int64_t step, const std::string& text) {
  ordered_json record = record_of(step);
  record.update(ordered_json{{"text", name}, {"content", text}});
  write(record);
}

void JsonlMonitor::params(const ordered_json& params) {
  ordered_json record = record_of();
  record["params"] = params;
  write(record);
}

void JsonlMonitor::artifact(const std::filesystem::path& file) {
  ordered_json record = record_of();
  record["artifact"] = file.string();
  write(record);
}

void JsonlMonitor::close(RunStatus status) {
  ordered_json record = record_of();
  record["status"] = name_of(status);
  write(record);
}

}  // namespace tessera
