#include "tools/doctor/doctor_print.h"

#include "core/str.h"
#include "core/terminal.h"
#include "tools/common/columns.h"

namespace tessera::tools {
namespace {

constexpr int kIndent = 11;                       ///< of what a check has found: behind "  problem  "
constexpr size_t kTimeWidth = 9, kRateWidth = 6;  ///< of the columns of a size
constexpr size_t kCheckWidth = 12;                ///< "open files" and two blanks

/// Rounded: a buffer is a multiple of the number of ranks.
std::string bytes_label(int64_t bytes) {
  constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;
  return bytes >= kMiB ? str((bytes + kMiB / 2) / kMiB, " MiB") : str((bytes + kKiB / 2) / kKiB, " KiB");
}

std::string lines_of(const Finding& finding, int width) {
  const std::string level = padded_right(name_of(finding.level), 7);
  std::string text =
      wrap_words(str("  ", level, "  ", padded_right(finding.check, kCheckWidth), finding.found), width,
                 kIndent + static_cast<int>(kCheckWidth)) +
      "\n";
  if (!finding.advice.empty())
    text += wrap_words(std::string(kIndent, ' ') + "-> " + finding.advice, width, kIndent + 3) + "\n";
  return text;
}

std::string findings_of(const std::string& host, const std::vector<Finding>& findings, int width) {
  std::string text;
  for (const Finding& finding : findings)
    if (finding.host == host) text += lines_of(finding, width);
  return text;
}

/// 4 KiB: the time, which is latency; above: gigabytes a second.
std::string table(const DoctorReport& report) {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
  for (const CollectiveTiming& timing : report.collectives) {
    if (sizes.empty() || sizes.back() != timing.bytes) sizes.push_back(timing.bytes);
    if (sizes.size() == 1) names.push_back(timing.name);
  }
  std::string text = padded_right("collective", 15);
  for (const int64_t size : sizes) text += padded_left(bytes_label(size), kTimeWidth + kRateWidth);
  text += "\n" + std::string(15, ' ');
  for (size_t i = 0; i < sizes.size(); ++i)
    text += padded_left("us", kTimeWidth) + padded_left("GB/s", kRateWidth);
  for (const std::string& name : names) {
    text += "\n" + padded_right(name, 15);
    for (const CollectiveTiming& timing : report.collectives)
      if (timing.name == name)
        text += padded_left(fixed(timing.seconds * 1e6, timing.seconds < 1e-4 ? 1 : 0), kTimeWidth) +
                padded_left(fixed(bus_bandwidth(timing, report.num_ranks) / 1e9, 2), kRateWidth);
  }
  return text + "\n";
}

std::string number_of(int number, const char* what) {
  return number == 0 ? str("no ", what, "s") : str(number, " ", what, number == 1 ? "" : "s");
}

}  // namespace

std::string doctor_text(const DoctorReport& report, const std::vector<Finding>& findings, int width) {
  std::string text;
  for (const HostReport& host : report.hosts)
    text += host.name + "\n" + findings_of(host.name, findings, width) + "\n";
  text += number_of(static_cast<int>(report.hosts.size()), "host") + ", " +
          number_of(report.num_ranks, "rank") + "\n" + findings_of("", findings, width) + "\n";
  if (!report.collectives.empty())
    text += table(report) +
            wrap_words(
                "us: time of one; GB/s: bus bandwidth as nccl-tests defines it, to compare with the speed of "
                "a link.",
                width, 0) +
            "\n\n";
  else if (report.num_ranks == 1)
    text +=
        wrap_words("--nproc N and --hostfile FILE start ranks, and measure collectives.", width, 0) + "\n\n";
  else if (report.num_ranks > 1 && report.backend.empty() && report.no_group.empty())
    text += wrap_words("The host of rank 0 prints what the ranks measure.", width, 0) + "\n\n";
  text += number_of(count(findings, Level::kProblem), "problem") + ", " +
          number_of(count(findings, Level::kWarning), "warning") + "\n";
  return text;
}

nlohmann::json doctor_json(const DoctorReport& report, const std::vector<Finding>& findings) {
  nlohmann::json found = nlohmann::json::array(), collectives = nlohmann::json::array();
  for (const Finding& finding : findings)
    found.push_back({{"level", name_of(finding.level)},
                     {"host", finding.host},
                     {"check", finding.check},
                     {"found", finding.found},
                     {"advice", finding.advice}});
  for (const CollectiveTiming& timing : report.collectives)
    collectives.push_back({{"name", timing.name},
                           {"bytes", timing.bytes},
                           {"seconds", timing.seconds},
                           {"algorithm_bytes_per_s", algorithm_bandwidth(timing)},
                           {"bus_bytes_per_s", bus_bandwidth(timing, report.num_ranks)}});
  return {{"ranks", report.num_ranks},
          {"backend", report.backend},
          {"device", report.device},
          {"problems", count(findings, Level::kProblem)},
          {"warnings", count(findings, Level::kWarning)},
          {"findings", found},
          {"hosts", report.hosts},
          {"collectives", collectives}};
}

}  // namespace tessera::tools
