#include "monitor/csv_monitor.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "core/csv_field.h"
#include "core/files/disk.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "monitor/file_name.h"

namespace tessera {
namespace {

constexpr std::string_view kHead = "step,";  // of a file of ours
constexpr size_t kLongestName = 220;         // file systems take 255 bytes, with .csv and what a rewrite adds

/// Writes a number as Python's repr of a float.
std::string csv_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return nlohmann::json(value).dump();
}

std::optional<int64_t> step_of(std::string_view row) {
  const std::optional<int64_t> step = take_number<int64_t>(row);
  return row.starts_with(',') ? step : std::nullopt;
}

/// Written by a CSV monitor: its head ends in CR LF and names what the file's name ends with
/// (quoted, where there is a comma in it).
bool is_ours(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string head;
  if (!std::getline(file, head) || file.eof() || !head.starts_with(kHead) || !head.ends_with('\r'))
    return false;
  const std::string name = head.substr(kHead.size(), head.size() - kHead.size() - 1);
  return name.starts_with('"') || path.stem().string().ends_with(file_name_of(name));
}

}  // namespace

CsvMonitor::CsvMonitor(std::filesystem::path folder, std::optional<int64_t> resumed_after, const Logger& log)
    : folder_(std::move(folder)), log_(log) {
  Disk().create_directories(folder_);
  if (resumed_after) take_back(*resumed_after);
}

void CsvMonitor::take_back(int64_t resumed_after) {
  std::vector<std::filesystem::path> ours;
  std::error_code error;
  for (const std::filesystem::path& path : paths_in(folder_))
    if (path.extension() == ".csv" && std::filesystem::is_regular_file(path, error) && is_ours(path))
      ours.push_back(path);
  for (const std::filesystem::path& path : ours) {
    const auto kept =
        files_
            .try_emplace(
                path.stem().string(), path,
                [&](const std::string& line) {
                  const std::optional<int64_t> step = step_of(line);
                  return line.starts_with(kHead) || (step && *step <= resumed_after);
                },
                [](const std::string& line) { return line.starts_with(kHead) || step_of(line).has_value(); })
            .first;
    if (const std::string& damage = kept->second.damage(); !damage.empty()) log_.warning(damage);
    if (kept->second.is_new()) files_.erase(kept);  // killed within its first line
  }
}

LineFile& CsvMonitor::file_of(const std::string& name) {
  const std::string file = file_name_of(name);
  if (const auto found = files_.find(file); found != files_.end()) return found->second;
  LineFile& made = files_.try_emplace(file, folder_ / (file + ".csv"), nullptr).first->second;
  made.append(str(kHead, csv_field(without_line_breaks(name.substr(name.rfind('/') + 1))), "\r"));
  return made;
}

bool CsvMonitor::has_file(const std::string& name) {
  const std::string file = file_name_of(name);
  const bool fits = file.size() <= kLongestName;
  const std::string& owner = owners_.try_emplace(file, name).first->second;
  if ((fits && owner == name) || !warned_.insert(name).second) return fits;
  if (fits)
    log_.warning(str("csv_monitor: the values of ", without_line_breaks(name), " and ",
                     without_line_breaks(owner), " are both in ", file, ".csv; expected another name"));
  else
    log_.warning(str("csv_monitor: the values of ", without_line_breaks(name.substr(0, 40)),
                     "... are left out: its name has ", name.size(), " bytes; expected at most ",
                     kLongestName));
  return fits;
}

void CsvMonitor::scalars(int64_t step, const Scalars& scalars) {
  for (const auto& [name, value] : scalars)
    if (has_file(name)) file_of(name).append(str(step, ",", csv_number(value), "\r"));
}

}  // namespace tessera
