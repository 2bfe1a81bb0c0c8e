// Writes and reads full models for tests in Python, which have the real libraries to compare with.
//
//   formats_tool write SPEC.json   {"format", "path", "max_shard_bytes", "piece_bytes", "data": FILE,
//                                   "tensors": [{"name", "shape", "type", "aliases"}]}; prints {"peak_kib":
//                                   …, "seconds": …}
//   formats_tool read PATH         prints a safetensors model's tensors, with their bytes in hexadecimal
//   formats_tool check PATH...     a line each: "ok" or the error
//   formats_tool zip HEADER_OFFSET NAME BYTES   where TorchZip puts the data of such an entry
#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/formats/model_writer.h"
#include "checkpoint/formats/torch_archive.h"
#include "core/error.h"
#include "core/memory/process_memory.h"
#include "tests/checkpoint/formats/safetensors_testing.h"
#include "tests/support/files.h"

namespace {

using namespace tessera;
using namespace tessera::checkpoint;
using nlohmann::json;

int write_model(const std::string& spec_path) {
  const json spec = json::parse(std::ifstream(spec_path));
  ModelWriterOptions options;
  options.format = model_format_of("m." + spec.at("format").get<std::string>()).value();
  options.path = spec.at("path").get<std::string>();
  options.max_shard_bytes = spec.value("max_shard_bytes", int64_t{0});
  for (const json& tensor : spec.at("tensors"))
    options.tensors.push_back({tensor.at("name"), tensor.at("shape").get<std::vector<int64_t>>(),
                               dtype_named(tensor.at("type").get<std::string>()).value(),
                               tensor.value("aliases", std::vector<std::string>())});
  const auto start = std::chrono::steady_clock::now();
  const Disk disk({.sync = spec.value("sync", true), .probe = {}});
  const auto writer = open_model_writer(disk, std::move(options));
  const InputFile data(spec.at("data").get<std::string>());
  std::vector<std::byte> piece(spec.at("piece_bytes").get<size_t>());
  for (int64_t offset = 0; offset < data.bytes(); offset += static_cast<int64_t>(piece.size())) {
    const auto bytes = std::min(piece.size(), static_cast<size_t>(data.bytes() - offset));
    data.read_at(offset, std::span(piece).first(bytes));
    writer->append(std::span(piece).first(bytes));
  }
  writer->finish();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::cout << json{{"peak_kib", static_cast<int64_t>(peak_resident_bytes()) / 1024},
                    {"seconds", seconds.count()}}
            << "\n";
  return 0;
}

int read_model(const std::string& path) {
  const SafetensorsModel model{std::filesystem::path(path)};
  json out = json::object();
  for (const std::string& name : model.names()) {
    const SafetensorsTensor& tensor = *model.find(name);
    std::vector<std::byte> data(static_cast<size_t>(tensor.bytes));
    model.read(name, 0, data);
    out[name] = {{"shape", tensor.shape}, {"type", name_of(tensor.type)}, {"hex", hex(data)}};
  }
  std::cout << out << "\n";
  return 0;
}

int check_models(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    try {
      const SafetensorsModel model{std::filesystem::path(path)};
      std::cout << "ok\n";
    } catch (const Error& error) {
      std::cout << error.what() << "\n";
    }
  }
  return 0;
}

int place_in_zip(const std::vector<std::string>& args) {
  TorchZip zip(std::stoll(args.at(0)));
  zip.add(args.at(1), std::stoll(args.at(2)));
  std::cout << zip.entries()[0].data_offset << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 2 && args[0] == "write") return write_model(args[1]);
    if (args.size() == 2 && args[0] == "read") return read_model(args[1]);
    if (args.size() >= 2 && args[0] == "check") return check_models({args.begin() + 1, args.end()});
    if (args.size() == 4 && args[0] == "zip") return place_in_zip({args.begin() + 1, args.end()});
    std::cerr << "see the top of formats_tool.cc\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
