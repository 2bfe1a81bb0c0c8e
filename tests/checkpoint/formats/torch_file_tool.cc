// Reads files of torch.save and pickles for tests in Python, which have the real libraries to compare with.
// Prints a line of JSON for each file: {"root": VALUE, "peak_kib": …} or {"error": …}.
//
//   torch_file_tool torch PATH...     files of torch.save
//   torch_file_tool verify PATH...    the same, and their checksums: {"verified": BOOL}
//   torch_file_tool pickle PATH...    pickles
//
// Values: null, true, 5, "text", [list] and otherwise an object of one key: "long": "…", "float": bits,
// "bytes": hex, "tuple", "set": [values], "dict": [[key, value], …] with "state", "global": name, "object":
// name with "arguments", "state", "items", "pairs"; "persistent": value; "tensor": {"type", "shape", "crc" of
// its elements, …}.
#include <zlib.h>

#include <bit>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/formats/torch_file.h"
#include "core/error.h"
#include "core/files/input_file.h"
#include "core/memory/process_memory.h"
#include "tests/support/files.h"

namespace {

using namespace tessera;
using namespace tessera::checkpoint;
using nlohmann::json;
using Kind = PickleValue::Kind;

/// CRC-32 of a tensor's elements in row-major order.
uint32_t crc_of(const TorchTensor& tensor, std::string_view file) {
  const auto element = static_cast<size_t>(size_bytes(tensor.type));
  uLong crc = ::crc32(0, nullptr, 0);
  std::vector<int64_t> index(tensor.shape.size(), 0);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    int64_t at = tensor.offset;
    for (size_t d = 0; d < index.size(); ++d)
      at += index[d] * tensor.strides[d] * static_cast<int64_t>(element);
    const std::string_view bytes = file.substr(static_cast<size_t>(at), element);
    crc = ::crc32_z(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    for (size_t d = index.size(); d-- > 0 && ++index[d] == tensor.shape[d];) index[d] = 0;
  }
  return static_cast<uint32_t>(crc);
}

/// Writes a tree as JSON; what is in it many times is written many times, so there is a limit.
class Dump {
 public:
  explicit Dump(const TorchFile* file)
      : file_(file), content_(file == nullptr ? "" : InputFile(file->path()).read_all()) {}

  json operator()(const PickleValue& value, int depth = 0) {
    if (++count_ > 3'000'000 || depth > 250) throw Error("the dump is too large");
    const auto all = [&](const std::vector<const PickleValue*>& items) {
      json list = json::array();
      for (const PickleValue* item : items) list.push_back((*this)(*item, depth + 1));
      return list;
    };
    const auto pairs = [&] {
      json list = json::array();
      for (size_t i = 0; i < value.items.size(); i += 2)
        list.push_back({(*this)(*value.items[i], depth + 1), (*this)(*value.items[i + 1], depth + 1)});
      return list;
    };
    const auto state = [&] { return value.state == nullptr ? json() : (*this)(*value.state, depth + 1); };
    switch (value.kind) {
      case Kind::kNone: return nullptr;
      case Kind::kBool: return value.integer != 0;
      case Kind::kInt: return value.integer;
      case Kind::kLong: return {{"long", value.text}};
      case Kind::kFloat: return {{"float", std::bit_cast<uint64_t>(value.number)}};
      case Kind::kString: return value.text;
      case Kind::kBytes: return {{"bytes", hex(std::as_bytes(std::span(value.text)))}};
      case Kind::kList: return all(value.items);
      case Kind::kTuple: return {{"tuple", all(value.items)}};
      case Kind::kSet: return {{"set", all(value.items)}};
      case Kind::kDict: return {{"dict", pairs()}, {"state", state()}};
      case Kind::kGlobal: return {{"global", value.text}};
      case Kind::kPersistent: return {{"persistent", (*this)(*value.arguments, depth + 1)}};
      case Kind::kObject: break;
    }
    if (const auto tensor = file_ == nullptr ? std::nullopt : file_->tensor(value)) {
      json out = {{"type", name_of(tensor->type)},
                  {"shape", tensor->shape},
                  {"strides", tensor->strides},
                  {"storage", tensor->storage},
                  {"parameter", tensor->is_parameter},
                  {"contiguous", tensor->is_contiguous()},
                  {"requires_grad", tensor->requires_grad}};
      if (tensor->numel() <= 10'000'000) out["crc"] = crc_of(*tensor, content_);
      return {{"tensor", out}};
    }
    return {{"object", value.global()},
            {"arguments", (*this)(*value.arguments, depth + 1)},
            {"state", state()},
            {"pairs", value.pairs},
            {"items", value.pairs ? pairs() : all(value.items)}};
  }

 private:
  const TorchFile* file_;
  std::string content_;
  int64_t count_ = 0;
};

json read_one(const std::string& what, const std::string& path) {
  try {
    json out;
    if (what == "pickle") {
      const std::string text = InputFile(path).read_all();
      const Pickle pickle(std::as_bytes(std::span(text)), path);
      out["root"] = Dump(nullptr)(pickle.root());
    } else {
      const TorchFile file{std::filesystem::path(path)};
      if (what == "verify") out["verified"] = file.verify();
      out["root"] = Dump(&file)(file.root());
      out["recognized"] = TorchFile::recognizes(path);
    }
    return out;
  } catch (const Error& error) {
    return {{"error", error.what()}, {"recognized", TorchFile::recognizes(path)}};
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() < 2 || (args[0] != "torch" && args[0] != "verify" && args[0] != "pickle")) {
    std::cerr << "see the top of torch_file_tool.cc\n";
    return 2;
  }
  for (size_t i = 1; i < args.size(); ++i) {
    json out = read_one(args[0], args[i]);
    out["peak_kib"] = static_cast<int64_t>(peak_resident_bytes()) / 1024;
    std::cout << out << "\n";
  }
  return 0;
}
