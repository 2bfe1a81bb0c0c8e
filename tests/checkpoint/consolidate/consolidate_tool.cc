// Makes checkpoints and consolidates them for tests in Python, which have the
// real libraries to look at the results.
//
//   consolidate_tool sample DIR WORLD           saves the tests' sample model as DIR/step, and in
//   DIR/expected.json what other readers should find
//   consolidate_tool layers DIR WORLD COUNT     saves COUNT layers of 1M fp32 parameters each, without
//   optimizer states
//   consolidate_tool convert DIR OUT TARGET [DTYPE]   prints {"peak_kib", "bytes", "output", "notes",
//   "overflowed", "first_overflowed"}
#include <fstream>
#include <iostream>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/convert_checkpoint.h"
#include "core/error.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"

namespace {

using namespace tessera;
using namespace tessera::checkpoint;

void save(const checkpoint::testing::SampleModel& model, const std::string& directory) {
  for (const std::string& error : checkpoint::testing::save_all(model, directory, "step"))
    if (!error.empty()) throw CheckpointError(error);
}

/// What readers should find: {"parameters": {name: {type, shape, aliases, hex}}, "buffers": {…}, "units":
/// [{…}], "blobs": [hex]}.
nlohmann::json expected(checkpoint::testing::SampleModel& model) {
  nlohmann::json all{{"parameters", nlohmann::json::object()},
                     {"buffers", nlohmann::json::object()},
                     {"units", nlohmann::json::array()}};
  const SavedLayout saved = saved_layout(model.layout());
  for (const SavedParameter& parameter : saved.parameters) {
    const DType type = saved.weights_type(parameter.unit);
    const auto bytes =
        std::span(model.weights(parameter.unit))
            .subspan(parameter.offset * size_bytes(type), parameter.numel() * size_bytes(type));
    all["parameters"][parameter.name] = {{"type", name_of(type)},
                                         {"shape", parameter.shape},
                                         {"aliases", parameter.aliases},
                                         {"hex", hex(bytes)}};
  }
  for (const WholeTensor& tensor : model.tensors())
    all["buffers"][tensor.name] = {
        {"type", name_of(tensor.type)}, {"shape", tensor.shape}, {"hex", hex(tensor.data)}};
  for (int unit = 0; unit < saved.num_units(); ++unit) {
    nlohmann::json one{{"weights", hex(model.weights(unit))},
                       {"trainable", saved.units[unit].trainable},
                       {"type", name_of(saved.weights_type(unit))}};
    for (size_t i = 0; saved.units[unit].trainable && i < model.state_names().size(); ++i)
      one["states"][model.state_names()[i]] = hex(model.state(unit, static_cast<int>(i)));
    all["units"].push_back(one);
  }
  for (int rank = 0; rank < saved.world_size; ++rank) all["blobs"].push_back(hex(model.blob(rank)));
  return all;
}

void save_sample(const std::string& directory, int world) {
  checkpoint::testing::SampleModel model = checkpoint::testing::sample_model(world, 1);
  save(model, directory);
  std::ofstream(directory + "/expected.json") << expected(model).dump();
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
                              {"notes", result.notes},
                              {"overflowed", result.num_overflowed},
                              {"first_overflowed", result.first_overflowed}}
            << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 3 && args[0] == "sample")
      save_sample(args[1], std::stoi(args[2]));
    else if (args.size() == 4 && args[0] == "layers")
      save_layers(args[1], std::stoi(args[2]), std::stoi(args[3]));
    else if (args.size() >= 4 && args[0] == "convert")
      convert(args);
    else
      throw Error("see the top of consolidate_tool.cc");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
