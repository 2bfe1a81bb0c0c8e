// Makes checkpoints and consolidates them for tests in Python, which have the
// real libraries to look at the results.
//
//   consolidate_tool sample DIR WORLD           saves the tests' sample model as DIR/step
//   consolidate_tool layers DIR WORLD COUNT     saves COUNT layers of 1M fp32 parameters each, without
//   optimizer states
//   consolidate_tool convert DIR OUT TARGET [DTYPE]   prints {"peak_kib", "bytes", "output", "notes"}
//   consolidate_tool consolidate DIR OUT FORMAT DTYPE [sync]   prints {"peak_kib": …,
//   "seconds": …, "bytes": …,
//                                                              "overflowed": …, "first_overflowed": …}
#include <chrono>
#include <iostream>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/consolidate.h"
#include "checkpoint/consolidate/convert_checkpoint.h"
#include "core/error.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace {

using namespace tessera;
using namespace tessera::checkpoint;

void save(const checkpoint::testing::SampleModel& model, const std::string& directory) {
  for (const std::string& error : checkpoint::testing::save_all(model, directory, "step"))
    if (!error.empty()) throw CheckpointError(error);
}

void save_layers(const std::string& directory, int world, int count) {
  std::vector<zero::ParameterSpec> specs;
  for (int i = 0; i < count; ++i)
    specs.push_back({.name = str("layers.", i, ".weight"),
                     .shape = {1'000, 1'000},
                     .dtype = DType::kFloat32,
                     .trainable = true,
                     .group = 0,
                     .aliases = {}});
  save({specs, {.world_size = world}, 1, {}}, directory);
}

void consolidate(const std::vector<std::string>& args) {
  ConsolidateOptions options;
  options.directory = args.at(1);
  options.output = args.at(2);
  options.format = parse_model_format(args.at(3)).value();
  options.dtype = parse_dtype(args.at(4)).value();
  options.disk.sync = args.size() > 5;
  const auto start = std::chrono::steady_clock::now();
  const ConsolidateResult result = consolidate(options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::cout << nlohmann::json{{"peak_kib", static_cast<int64_t>(peak_resident_bytes()) / 1024},
                              {"seconds", seconds.count()},
                              {"bytes", result.bytes},
                              {"overflowed", result.num_overflowed},
                              {"first_overflowed", result.first_overflowed}}
            << "\n";
}

void convert(const std::vector<std::string>& args) {
  ConvertOptions options;
  options.directory = args.at(1);
  options.output = args.at(2);
  options.target = parse_convert_target(args.at(3)).value();
  if (args.size() > 4) options.dtype = parse_dtype(args.at(4));
  options.disk.sync = false;
  const ConvertResult result = convert_checkpoint(options);
  std::cout << nlohmann::json{{"peak_kib", static_cast<int64_t>(peak_resident_bytes()) / 1024},
                              {"bytes", result.bytes},
                              {"output", result.output.string()},
                              {"notes", result.notes}}
            << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 3 && args[0] == "sample")
      save(checkpoint::testing::sample_model(std::stoi(args[2]), 1), args[1]);
    else if (args.size() == 4 && args[0] == "layers")
      save_layers(args[1], std::stoi(args[2]), std::stoi(args[3]));
    else if (args.size() >= 4 && args[0] == "convert")
      convert(args);
    else if (args.size() >= 5 && args[0] == "consolidate")
      consolidate(args);
    else
      throw Error("see the top of consolidate_tool.cc");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
