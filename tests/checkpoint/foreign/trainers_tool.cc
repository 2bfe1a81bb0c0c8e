// Reads checkpoints of other programs for tests in Python, which have the programs' own loaders to compare
// with.
//
//   trainers_tool READER PATH DATA [ORDER]
//
// READER: deepspeed, universal, distributed, trainer, model, or foreign for all of them in turn. Writes all
// elements to the file DATA, one tensor after the other, and prints what the reader found, in which a tensor
// is {"type", "shape", "begin": its byte of DATA}. Prints null for a path that is not the reader's, {"error":
// …} for one that it refuses. ORDER: a file of names, one a line: the parameters in the model's order.
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/foreign/foreign_checkpoint.h"
#include "core/error.h"

namespace {

using namespace tessera;
using namespace tessera::checkpoint;
using nlohmann::json;

/// Writes elements to a file. Pieces are small, so that they begin and end anywhere in a run.
class Writer {
 public:
  Writer(const ForeignCheckpoint& checkpoint, const char* path)
      : files_(checkpoint.files), out_(path, std::ios::binary) {}

  json write(const ForeignTensor& tensor) {
    const int64_t width = size_bytes(tensor.type), numel = tensor.numel(), piece = numel / 3 + 1;
    json out = {{"type", name_of(tensor.type)}, {"shape", tensor.shape}, {"begin", begin_}};
    std::vector<std::byte> bytes;
    for (int64_t begin = 0; begin < numel; begin += piece) {
      bytes.resize(static_cast<size_t>(std::min(piece, numel - begin) * width));
      files_.read(tensor, begin, bytes);
      out_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
    begin_ += numel * width;
    return out;
  }

 private:
  ForeignFiles files_;
  std::ofstream out_;
  int64_t begin_ = 0;
};

json describe(const ForeignCheckpoint& found, const char* data) {
  Writer writer(found, data);
  json parameters = json::array(), buffers = json::object();
  for (const ForeignParameter& one : found.parameters) {
    json states = json::object();
    for (const auto& [name, tensor] : one.states) states[name] = writer.write(tensor);
    parameters.push_back({{"name", one.name},
                          {"dtype", name_of(one.dtype)},
                          {"trainable", one.trainable},
                          {"group", one.group},
                          {"aliases", one.aliases},
                          {"weights", writer.write(one.weights)},
                          {"states", std::move(states)},
                          {"steps", one.steps}});
  }
  for (const auto& [name, tensor] : found.buffers) buffers[name] = writer.write(tensor);
  const auto optional = [](const auto& value) { return value ? json(*value) : json(); };
  json lost = json::array();
  for (const LostValue& one : found.lost) {
    constexpr const char* kKinds[] = {"state", "other state", "option", "schedule", "scale", "count"};
    lost.push_back({{"kind", kKinds[static_cast<int>(one.kind)]}, {"name", one.name}});
  }
  return {{"format", found.format},
          {"version", found.version},
          {"world_size", found.world_size},
          {"stage", found.stage},
          {"path", found.path.string()},
          {"num_files", found.files.size()},
          {"parameters", std::move(parameters)},
          {"buffers", std::move(buffers)},
          {"optimizer", found.optimizer},
          {"groups", found.groups},
          {"global_steps", optional(found.global_steps)},
          {"skipped_steps", optional(found.skipped_steps)},
          {"global_samples", optional(found.global_samples)},
          {"lr_scheduler", optional(found.lr_scheduler)},
          {"loss_scaler", optional(found.loss_scaler)},
          {"client_state", found.client_state},
          {"not_read", found.not_read},
          {"lost", std::move(lost)},
          {"other_states", found.other_states}};
}

std::optional<ForeignCheckpoint> read(const std::string& reader, const std::filesystem::path& path,
                                      const char* order_file) {
  const auto by = [](const std::optional<IdentifiedCheckpoint>& identified, const ParameterOrder& order) {
    return identified ? std::optional(identified->read(order)) : std::nullopt;
  };
  if (reader == "deepspeed") return by(identify_deepspeed(path, ""), {});
  if (reader == "universal") return by(identify_universal(path, ""), {});
  if (reader == "distributed") return by(identify_distributed(path), {});
  if (reader == "model") return by(identify_model(path), {});
  std::vector<std::string> order;
  if (order_file != nullptr) {
    std::ifstream in(order_file);
    for (std::string line; std::getline(in, line);) order.push_back(line);
  }
  const ParameterOrder names{.names = order, .groups = {}, .aliases = {}, .buffers = {}};
  if (reader == "foreign") {
    const std::optional<IdentifiedCheckpoint> identified = identify(path);
    return identified ? std::optional(read_foreign(*identified, names)) : std::nullopt;
  }
  if (is_directory(path)) return by(identify_trainer(path), names);
  return read_trainer_file(path, names);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return 2;
  try {
    const std::optional<ForeignCheckpoint> found = read(argv[1], argv[2], argc == 5 ? argv[4] : nullptr);
    if (found) check(*found);
    std::cout << (found ? describe(*found, argv[3]) : json()) << "\n";
  } catch (const Error& error) {
    std::cout << json{{"error", error.what()}} << "\n";
  }
}
