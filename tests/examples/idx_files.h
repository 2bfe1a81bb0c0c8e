// Writes IDX files, valid and damaged ones.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/files/temporary_folder.h"

namespace tessera::examples {

using Bytes = std::vector<uint8_t>;

/// The header and `values` as an IDX file has them.
inline Bytes idx_bytes(const std::vector<uint32_t>& shape, const Bytes& values, uint8_t type = 0x08) {
  Bytes bytes = {0, 0, type, static_cast<uint8_t>(shape.size())};
  for (uint32_t size : shape) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(size >> shift));
  }
  bytes.insert(bytes.end(), values.begin(), values.end());
  return bytes;
}

/// 0, 1, 2 … modulo `modulus`.
inline Bytes counting(size_t count, int modulus = 256) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(i % static_cast<size_t>(modulus));
  return bytes;
}

inline Bytes gzipped(const Bytes& bytes) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  Bytes out(deflateBound(&stream, bytes.size()) + 64);
  stream.next_in = const_cast<uint8_t*>(bytes.data());
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// A folder for each test, removed afterwards.
class IdxFolderTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const Bytes& bytes) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::remove(path);  // some file systems wait for the disk when a file is overwritten
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return path.string();
  }

  const TemporaryFolder temporary_{"tessera_idx"};
  const std::filesystem::path folder_ = temporary_.path();
};

}  // namespace tessera::examples
