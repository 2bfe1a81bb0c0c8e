// Writes a checkpoint of the sample model, and beside it what other readers should find:
// sample_checkpoint DIR WORLD. DIR/expected.json has {"parameters": {name: {type, shape, aliases, hex}},
// "buffers": {…}, "units": [{…}], "blobs": [hex]}.
#include <cstdio>
#include <fstream>
#include <string>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace tessera::checkpoint::testing {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(byte));
    text += digits;
  }
  return text;
}

nlohmann::json expected(SampleModel& model) {
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

int run(const std::filesystem::path& directory, int world) {
  SampleModel model = sample_model(world, 7);
  for (const std::string& error : save_all(model, directory, "step7"))
    if (!error.empty()) throw CheckpointError(error);
  std::ofstream(directory / "expected.json") << expected(model).dump();
  return 0;
}

}  // namespace
}  // namespace tessera::checkpoint::testing

int main(int argc, char** argv) {
  try {
    if (argc == 3) return tessera::checkpoint::testing::run(argv[1], std::stoi(argv[2]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: sample_checkpoint DIR WORLD\n");
  return 2;
}
