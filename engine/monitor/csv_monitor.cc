#include "engine/monitor/csv_monitor.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/disk.h"
#include "core/str.h"

namespace tessera {
namespace {

/// As Python's csv module (QUOTE_MINIMAL) and its repr of a float.
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}
std::string csv_field(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return nlohmann::json(value).dump();
}

std::optional<int64_t> step_of(const std::string& row) {
  int64_t step = 0;
  const auto [end, error] = std::from_chars(row.data(), row.data() + row.size(), step);
  return error == std::errc() && end != row.data() + row.size() && *end == ',' ? std::optional(step) : std::nullopt;
}

}  // namespace

CsvMonitor::CsvMonitor(std::filesystem::path folder, std::optional<int64_t> resumed_after)
    : folder_(std::move(folder)), resumed_after_(resumed_after) {
  Disk().create_directories(folder_);
}

LineFile& CsvMonitor::file_of(const std::string& name) {
  std::string file = name;
  for (char& c : file)
    if (c == '/' || c == ' ') c = '_';
  if (const auto found = files_.find(file); found != files_.end()) return found->second;

  std::function<bool(const std::string&)> keep;
  if (resumed_after_) {
    keep = [&](const std::string& line) {
      const std::optional<int64_t> step = step_of(line);
      return line.starts_with("step,") || (step && *step <= *resumed_after_);
    };
  }
  LineFile& made = files_.try_emplace(file, folder_ / (file + ".csv"), keep).first->second;
  if (made.is_new()) made.append(str("step,", csv_field(name.substr(name.rfind('/') + 1)), "\r"));
  return made;
}

void CsvMonitor::scalars(int64_t step, const Scalars& scalars) {
  for (const auto& [name, value] : scalars) file_of(name).append(str(step, ",", csv_field(value), "\r"));
}

}  // namespace tessera
