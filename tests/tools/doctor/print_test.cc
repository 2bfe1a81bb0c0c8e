// The report as text and as JSON.
#include "tools/doctor/doctor_print.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace tessera::tools {
namespace {

using testing::HasSubstr;

DoctorReport two_hosts() {
  DoctorReport report;
  report.num_ranks = 4;
  report.backend = "hybrid";
  report.device = "CPUs";
  for (const char* name : {"n1", "n2"}) {
    HostReport host;
    host.name = name;
    host.num_ranks = 2;
    host.has_facts = true;
    host.facts.open_files = 30;
    host.address = "fd00:aaaa:bbbb:cccc:dddd:eeee:ffff:1";
    host.interface = "enp193s0f1np1";
    host.chosen_by = "route to a-host-with-a-long-name";
    report.hosts.push_back(host);
  }
  for (const int64_t bytes : {4096, 262144, 33554432})
    for (const char* name : {"all_gather", "reduce_scatter", "all_reduce", "broadcast"})
      report.collectives.push_back({name, bytes, static_cast<double>(bytes) / 2e9});
  return report;
}

TEST(DoctorText, FitsItsWidth) {
  const DoctorReport report = two_hosts();
  for (const size_t width : {60, 80}) {
    std::istringstream lines(doctor_text(report, judge(report), static_cast<int>(width)));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), width) << line;
  }
}

TEST(DoctorText, ShowsTimesAndBusBandwidth) {
  const DoctorReport report = two_hosts();
  const std::string text = doctor_text(report, judge(report), 80);
  EXPECT_THAT(text, HasSubstr("4 KiB"));
  EXPECT_THAT(text, HasSubstr("32 MiB"));
  EXPECT_THAT(text,
              testing::ContainsRegex("all_reduce +2.0 +3.00 +131 +3.00 +16777 +3.00"));  // 2 GB/s * 2 * 3/4
  EXPECT_THAT(text, testing::ContainsRegex("broadcast +2.0 +2.00"));
  EXPECT_THAT(text, HasSubstr("\n2 hosts, 4 ranks\n"));
  EXPECT_THAT(text, HasSubstr(" problems, "));
}

TEST(DoctorText, SizesOfThreeRanksAreRounded) {
  DoctorReport report;
  report.num_ranks = 3;
  report.collectives = {{"broadcast", 4092, 1e-3}, {"broadcast", 33554424, 1}};
  EXPECT_THAT(doctor_text(report, {}, 80), testing::ContainsRegex("collective +4 KiB +32 MiB"));
}

TEST(DoctorText, SaysWhereTheRestIs) {
  DoctorReport report;
  EXPECT_THAT(doctor_text(report, {}, 80), HasSubstr("--nproc N"));
  report.num_ranks = 4;
  EXPECT_THAT(doctor_text(report, {}, 80), HasSubstr("The host of rank 0 prints"));
  report.num_ranks = 0;  // no host was reached
  EXPECT_THAT(doctor_text(report, {}, 80), testing::Not(HasSubstr("prints")));
}

TEST(DoctorJson, HasFindingsAndRates) {
  const DoctorReport report = two_hosts();
  const std::vector<Finding> findings = judge(report);
  const nlohmann::json json = doctor_json(report, findings);
  EXPECT_EQ(json.at("problems"), count(findings, Level::kProblem));
  EXPECT_EQ(json.at("findings").size(), findings.size());
  EXPECT_EQ(json.at("findings")[0].at("check"), findings[0].check);
  EXPECT_EQ(json.at("hosts")[1].at("facts").at("open_files"), 30);
  EXPECT_DOUBLE_EQ(json.at("collectives")[0].at("bus_bytes_per_s").get<double>(), 1.5e9);
}

}  // namespace
}  // namespace tessera::tools
