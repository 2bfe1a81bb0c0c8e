// Pickles and files of torch.save for tests, put together by hand.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/torch_archive.h"
#include "checkpoint/formats/torch_file.h"
#include "tests/checkpoint/formats/formats_testing.h"

namespace tessera::checkpoint {

using namespace std::string_literals;
using tessera::testing::error_of;

/// Little-endian.
inline std::string number(uint64_t value, size_t bytes) {
  std::string out;
  for (size_t i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

/// BINUNICODE.
inline std::string text(std::string_view word) { return "X" + number(word.size(), 4) + std::string(word); }
/// GLOBAL.
inline std::string name(std::string_view module, std::string_view attribute) {
  return "c" + std::string(module) + "\n" + std::string(attribute) + "\n";
}
inline std::string call(const std::string& callable, const std::string& arguments) {
  return callable + "(" + arguments + "tR";
}
/// A pickle of protocol 2.
inline std::string proto(const std::string& body) { return "\x80\x02" + body + "."; }

inline Pickle read_pickle(const std::string& bytes, const PickleLimits& limits = {}) {
  return {std::as_bytes(std::span(bytes)), "a.pkl", limits};
}
inline std::string pickle_error(const std::string& bytes, const PickleLimits& limits = {}) {
  return error_of<Error>([&] { read_pickle(bytes, limits); });
}

/// ("storage", torch.FloatStorage, key, "cpu", numel) as a persistent id.
inline std::string storage(int numel, std::string_view key = "0", std::string_view kind = "FloatStorage") {
  return "(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + "K" +
         static_cast<char>(numel) + "tQ";
}
/// A tensor of 2 x 2 in a storage of 4.
inline std::string small_tensor() {
  return call(name("torch._utils", "_rebuild_tensor_v2"),
              storage(4) + "K\0(K\2K\2t(K\2K\1t\x89"s + call(name("collections", "OrderedDict"), ""));
}

/// An archive as torch.save writes it. Without `checksums`, as after set_crc32_options(False).
inline std::string torch_archive(const std::string& pickle,
                                 const std::vector<std::pair<std::string, std::string>>& storages,
                                 bool checksums = true) {
  std::vector<std::pair<std::string, std::string>> entries = {{"data.pkl", pickle}, {"byteorder", "little"}};
  for (const auto& [key, data] : storages) entries.emplace_back("data/" + key, data);
  entries.emplace_back("version", "3\n");
  TorchZip zip;
  std::vector<uint32_t> crcs;
  for (const auto& [entry, data] : entries) {
    zip.add(entry, static_cast<int64_t>(data.size()));
    crcs.push_back(!checksums ? 0
                              : static_cast<uint32_t>(::crc32_z(
                                    0, reinterpret_cast<const unsigned char*>(data.data()), data.size())));
  }
  std::string out;
  for (size_t i = 0; i < entries.size(); ++i)
    out += zip.between(i, i == 0 ? 0 : crcs[i - 1]) + entries[i].second;
  return out + zip.tail(crcs);
}

/// A file of the legacy format with one storage.
inline std::string legacy_file(const std::string& pickle, int64_t numel, const std::string& data) {
  const std::string magic = proto("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"s);
  const std::string machine = proto("}" + text("little_endian") + "\x88s");
  return magic + proto("M\xe9\x03"s) + machine + pickle + proto("](" + text("0") + "e") +
         number(static_cast<uint64_t>(numel), 8) + data;
}

/// Calls `visit` for each value that the root has, once.
inline void for_each_value(const PickleValue& root, const std::function<void(const PickleValue&)>& visit) {
  std::set<const PickleValue*> seen = {&root};
  std::vector<const PickleValue*> next = {&root};
  while (!next.empty()) {
    const PickleValue& value = *next.back();
    next.pop_back();
    visit(value);
    const auto add = [&](const PickleValue* inner) {
      if (inner != nullptr && seen.insert(inner).second) next.push_back(inner);
    };
    for (const PickleValue* inner : {value.callable, value.arguments, value.state}) add(inner);
    for (const PickleValue* inner : value.items) add(inner);
  }
}

/// Whether a tensor's first and last element lie in the file; reads them.
inline bool lies_within(const TorchTensor& tensor, const TorchFile& file) {
  if (tensor.numel() == 0) return true;
  __int128 last = tensor.offset;
  for (size_t d = 0; d < tensor.shape.size(); ++d)
    last += static_cast<__int128>(tensor.shape[d] - 1) * tensor.strides[d] * size_bytes(tensor.type);
  const __int128 end = last + size_bytes(tensor.type);
  if (tensor.offset < 0 || end > static_cast<__int128>(std::filesystem::file_size(file.path()))) return false;
  return file.read(tensor.offset, 1).size() == 1 && file.read(static_cast<int64_t>(end) - 1, 1).size() == 1;
}

}  // namespace tessera::checkpoint
