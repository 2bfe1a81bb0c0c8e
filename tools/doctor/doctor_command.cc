#include "tools/doctor/doctor_command.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "core/environment/environment.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/terminal.h"
#include "launcher/failure/failure_report.h"
#include "tools/common/captured_run.h"
#include "tools/doctor/doctor_facts.h"
#include "tools/doctor/doctor_group.h"
#include "tools/doctor/doctor_judgement.h"
#include "tools/doctor/doctor_print.h"
#include "tools/launch/launch_command.h"

namespace tessera::tools {
namespace {

constexpr int kMaxWidth = 80;
constexpr const char* kMark =
    "{\"tessera doctor\":";  ///< what a line begins with that a rank has for this command
constexpr auto kTimeForHosts = std::chrono::seconds(60);
constexpr auto kTimeForGroup = std::chrono::seconds(180);

struct DoctorFlags {
  LaunchFlags launch;
  bool json = false;
  std::string probe;  ///< of the ranks that this command starts: "host" or "group"
};

void print_marked(const nlohmann::json& value) { std::cout << kMark << json_text(value) << "}" << std::endl; }

/// What a rank has printed by print_marked() among other lines, such as a login's greeting.
std::optional<nlohmann::json> marked_in(const std::string& out) {
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(kMark)) return parse_json(line).at("tessera doctor");
  return std::nullopt;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (!line.empty() && !line.starts_with("Warning: ") && line.find("[info]") == line.npos)
      lines.push_back(line);
  }
  return lines;
}

/// Says in one line why a launcher failed: what the program said that it has started, else the launcher's own
/// error.
std::string reason_of(const CapturedRun& run, bool launcher_first) {
  if (run.timed_out) return "no answer in time";
  std::string error, warning, other;
  for (const std::string& line : lines_of(run.err)) {
    std::string* const first = line.starts_with("error: ")     ? &error
                               : line.starts_with("warning: ") ? &warning
                               : line.starts_with("[")         ? nullptr
                                                               : &other;
    if (first != nullptr && first->empty()) *first = first == &other ? line : line.substr(line.find(' ') + 1);
  }
  if (error.empty() && other.empty()) error = warning;
  if (launcher_first && !error.empty()) return error;
  if (!other.empty()) return other;
  return error.empty() ? str("exit code ", run.exit_code) : error;
}

std::function<int()> probe(const LaunchPlan& plan, const char* what) {
  return [plan, what] { return run_ranks_of_self(plan, {"doctor", "--probe", what}, Logger(LogOptions{})); };
}

/// A plan without what mixes other text into the output of rank 0.
LaunchPlan quiet(LaunchPlan plan) {
  plan.local.tee = false;
  if (plan.cluster)
    std::erase_if(plan.cluster->flags, [](const std::string& flag) { return flag.starts_with("--tee"); });
  // A host or a rank that is lost is what is to be found.
  plan.restarts = {};
  return plan;
}

/// The plan for a rank on one of its hosts alone.
LaunchPlan on_one_host(const LaunchPlan& plan, const launcher::Host& host) {
  LaunchPlan one = plan;
  one.num_ranks = one.cluster->num_nodes = one.cluster->nproc = 1;
  one.cluster->hosts = {{host.name, {host.slots.front()}, host.user}};
  one.cluster->master_addr = "";
  if (one.cluster->engine == launcher::Engine::kSsh)  // what --launcher-args says comes first, and counts
    one.cluster->engine_args.insert(one.cluster->engine_args.end(), {"-o", "ConnectTimeout=10"});
  return one;
}

void take_facts(HostReport& host, const CapturedRun& run) {
  const auto facts = marked_in(run.out);
  if (!facts || run.exit_code != 0) {
    host.unreachable = reason_of(run, /*launcher_first=*/false);
    return;
  }
  host.facts = *facts;
  host.has_facts = true;
}

/// Reaches each host by itself, so that one which cannot be reached hides nothing of the others. Those leave
/// `plan`.
std::vector<HostReport> examine_hosts(LaunchPlan& plan) {
  std::vector<HostReport> hosts;
  std::vector<std::function<int()>> bodies;
  if (!plan.cluster) {
    hosts.push_back({.name = launcher::node_name(), .num_ranks = plan.local.nproc});
    bodies.emplace_back([] {
      print_marked(host_facts());
      return 0;
    });
  } else {
    for (const launcher::Host& host : plan.cluster->hosts) {
      hosts.push_back({.name = host.name, .num_ranks = static_cast<int>(host.slots.size())});
      bodies.push_back(probe(on_one_host(plan, host), "host"));
    }
  }
  const std::vector<CapturedRun> runs = run_captured(bodies, kTimeForHosts);
  for (size_t i = 0; i < runs.size(); ++i) take_facts(hosts[i], runs[i]);
  if (!plan.cluster || hosts.empty()) return hosts;
  const auto is_gone = [&](const launcher::Host& host) {
    return std::any_of(hosts.begin(), hosts.end(),
                       [&](const HostReport& one) { return one.name == host.name && !one.has_facts; });
  };
  std::erase_if(plan.cluster->hosts, is_gone);
  plan.cluster->num_nodes = static_cast<int>(plan.cluster->hosts.size());
  plan.num_ranks = 0;
  for (const launcher::Host& host : plan.cluster->hosts)
    plan.num_ranks += static_cast<int>(host.slots.size());
  return hosts;
}

/// Puts what the ranks have found into the report. Their hosts' names are the hosts' own, those of the report
/// the user's.
void take_group(DoctorReport& report, DoctorReport group) {
  size_t next = 0;
  for (HostReport& host : report.hosts) {
    if (!host.unreachable.empty() || next == group.hosts.size()) continue;
    HostReport& found = group.hosts[next++];
    found.name = host.name;
    host = found;
  }
  report.hosts.insert(report.hosts.end(), group.hosts.begin() + static_cast<std::ptrdiff_t>(next),
                      group.hosts.end());
  report.num_ranks = group.num_ranks;
  report.backend = group.backend;
  report.device = group.device;
  report.collectives = group.collectives;
}

DoctorReport examine(LaunchPlan plan) {
  DoctorReport report;
  plan = quiet(std::move(plan));
  report.num_ranks = plan.num_ranks;
  const bool slurm_chooses = plan.cluster && plan.cluster->hosts.empty();
  if (!slurm_chooses) report.hosts = examine_hosts(plan);
  report.num_ranks = plan.num_ranks;
  if (plan.num_ranks < 2) return report;
  const CapturedRun run = run_captured({probe(plan, "group")}, kTimeForGroup).front();
  for (const std::string& line : lines_of(run.err))
    if (line.starts_with("[warning] ")) report.warnings.push_back(line.substr(10));
  const auto group = marked_in(run.out);
  if (group && run.exit_code == 0)
    take_group(report, *group);
  else if (run.exit_code != 0)
    report.no_group = reason_of(run, /*launcher_first=*/true);
  return report;
}

int print(const DoctorReport& report, bool as_json) {
  const std::vector<Finding> findings = judge(report);
  if (as_json)
    std::cout << json_text(doctor_json(report, findings), 1) << '\n';
  else
    std::cout << doctor_text(report, findings, std::min(kMaxWidth, terminal_width(STDOUT_FILENO)));
  return count(findings, Level::kProblem) > 0 ? 1 : 0;
}

int doctor(const DoctorFlags& flags) {
  if (flags.probe == "host") {
    print_marked(host_facts());
    return 0;
  }
  if (flags.probe == "group") {
    if (const auto report = examine_group()) print_marked(*report);
    return 0;
  }
  if (!starts_ranks(flags.launch) && in_group()) {  // torchrun, mpirun or srun has started the ranks
    const auto report = examine_group();
    return report ? print(*report, flags.json) : 0;
  }
  return print(examine(plan_launch(flags.launch)), flags.json);
}

}  // namespace

void add_doctor_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("doctor", "Check the hosts of a run, measure its collectives, say what to mend");
  const auto flags = std::make_shared<DoctorFlags>();
  command->add_flag("--json", flags->json, "Print JSON");
  command->add_option("--probe", flags->probe)->group("");
  add_launch_flags(*command, flags->launch);
  command->footer(
      "Give it the flags of the run: tessera doctor --hostfile hosts. Exit code 1: there\n"
      "is a problem. Each check, and the keys of --json: docs/doctor.md.");
  command->callback([flags, &exit_code] { exit_code = doctor(*flags); });
}

}  // namespace tessera::tools
