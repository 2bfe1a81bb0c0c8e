// Helpers of the tests of model files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/formats/model_writer.h"
#include "checkpoint/formats/safetensors.h"
#include "core/error.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/checkpoint/formats/safetensors_testing.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::checkpoint {

/// A folder for one test; removed with this object.
class TestFolder : public testing::MemoryFolder {
 public:
  std::filesystem::path operator/(const std::string& name) const { return path() / name; }
  std::vector<std::string> names() const { return testing::names_in(path()); }
};

/// A file's content, or that of all files of a folder, by name; "" if it does not exist.
inline std::string content_of(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return read_text(path);
  std::vector<std::string> parts;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    parts.push_back(entry.path().filename().string() + "\n" + read_text(entry.path()));
  std::sort(parts.begin(), parts.end());
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

using testing::random_bytes;

/// A few tensors: tied, empty, 0-dim, of several types.
inline std::vector<ModelTensor> small_model() {
  return {{"a.weight", {3, 5}, DType::kFloat32, {}}, {"a.bias", {5}, DType::kBFloat16, {}},
          {"none", {0, 7}, DType::kInt64, {}},       {"embed", {9, 4}, DType::kFloat32, {"head", "decoder"}},
          {"scalar", {}, DType::kFloat64, {}},       {"flags", {13}, DType::kUInt8, {}},
          {"b.weight", {11, 3}, DType::kFloat16, {}}};
}

/// The bytes of a model, which follow from `seed`; those of a tied tensor once.
inline std::vector<std::byte> bytes_of(const std::vector<ModelTensor>& tensors, uint64_t seed) {
  int64_t bytes = 0;
  for (const ModelTensor& tensor : tensors) bytes += tensor.bytes();
  return random_bytes(bytes, seed);
}

/// Writes a model whose bytes follow from `seed`.
inline void write_model(const Disk& disk, ModelWriterOptions options, uint64_t seed,
                        size_t piece_bytes = 50) {
  const auto writer = open_model_writer(disk, std::move(options));
  const std::vector<std::byte> data = bytes_of(writer->tensors(), seed);
  for (size_t begin = 0; begin < data.size(); begin += piece_bytes)
    writer->append(std::span(data).subspan(begin, std::min(piece_bytes, data.size() - begin)));
  writer->finish();
}

/// A safetensors file of this header and data.
inline std::string file_of(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return length + header + data;
}

inline std::string header_error(const std::string& header, int64_t data_bytes) {
  return tessera::testing::error_of<Error>(
      [&] { parse_safetensors_header(header, data_bytes, "m.safetensors"); });
}

}  // namespace tessera::checkpoint
