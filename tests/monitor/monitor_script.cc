// Does with monitors what a JSON file says, so that tests in Python can read the outcome with other programs:
//   monitor_script SCRIPT.json
// {"config": {"tensorboard": {…}, …}, "run": {"name": "r", "folder": "F", "resumed_after": 3}, "calls": [
//   ["scalars", STEP, {NAME: NUMBER}], ["histogram", NAME, STEP, [NUMBER, …]], ["image", NAME, STEP, WIDTH,
//   HEIGHT, [BYTE, …], CHANNELS],
//   ["text", NAME, STEP, TEXT], ["sample", NAME, STEP, FILE],
//   ["params", {…}], ["artifact", FILE], ["sleep", SECONDS], ["await", FILE], ["close", "FINISHED"]]}
// "nan", "inf" and "-inf" are numbers too. Prints a line a call with the
// seconds it took; warnings go to stderr.
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/error.h"
#include "engine/config/parse.h"
#include "monitor/histogram.h"
#include "train/report/monitoring.h"

namespace tessera {
namespace {

using nlohmann::ordered_json;

double number(const ordered_json& value) {
  if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (value == "inf") return std::numeric_limits<double>::infinity();
  if (value == "-inf") return -std::numeric_limits<double>::infinity();
  return value.get<double>();
}

RunStatus status(const std::string& name) {
  for (RunStatus status : {RunStatus::kFinished, RunStatus::kFailed, RunStatus::kKilled})
    if (name == name_of(status)) return status;
  throw Error("found ", name, "; expected a status");
}

void call(Monitors& monitors, const ordered_json& call) {
  const std::string what = call.at(0);
  if (what == "scalars") {
    Scalars scalars;
    for (const auto& [name, value] : call.at(2).items()) scalars.emplace_back(name, number(value));
    monitors.scalars(call.at(1), scalars);
  } else if (what == "histogram") {
    std::vector<float> values;
    for (const ordered_json& value : call.at(3)) values.push_back(static_cast<float>(number(value)));
    HistogramCounts counts;
    counts.add(values);
    monitors.histogram(call.at(1), call.at(2), counts.histogram());
  } else if (what == "image") {
    const auto pixels = call.at(5).get<std::vector<uint8_t>>();
    monitors.image(call.at(1), call.at(2),
                   {.width = call.at(3),
                    .height = call.at(4),
                    .channels = call.size() > 6 ? call.at(6).get<int>() : 3,
                    .pixels = pixels});
  } else if (what == "text") {
    monitors.text(call.at(1), call.at(2), call.at(3));
  } else if (what == "sample") {
    monitors.sample(call.at(1), call.at(2), call.at(3).get<std::string>());
  } else if (what == "params") {
    monitors.params(call.at(1));
  } else if (what == "artifact") {
    monitors.artifact(call.at(1).get<std::string>());
  } else if (what == "sleep") {
    std::this_thread::sleep_for(std::chrono::duration<double>(call.at(1).get<double>()));
  } else if (what == "await") {
    while (!std::filesystem::exists(call.at(1).get<std::string>()))
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } else if (what == "close") {
    monitors.close(status(call.at(1)));
  } else {
    throw Error("found the call ", what);
  }
}

void run(const std::string& file) {
  const ordered_json script = ordered_json::parse(std::ifstream(file));
  train::MonitoredRun run{.name = script.at("run").at("name"),
                          .folder = script.at("run").at("folder").get<std::string>(),
                          .resumed_after = std::nullopt,
                          .log = Logger(LogOptions{})};
  if (script.at("run").contains("resumed_after"))
    run.resumed_after = script.at("run").at("resumed_after").get<int64_t>();
  ordered_json config = script.at("config");
  config["train_batch_size"] = 1;
  Monitors monitors = train::open_monitors(parse_engine_config(config.dump()).monitors, run);
  for (const ordered_json& one : script.at("calls")) {
    const auto start = std::chrono::steady_clock::now();
    call(monitors, one);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%s %.6f\n", one.at(0).get<std::string>().c_str(), seconds.count());
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw tessera::Error("usage: monitor_script SCRIPT.json");
    tessera::run(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
