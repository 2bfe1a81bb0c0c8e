// Small files as text, and bytes as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// A file's content; "" if there is no such file.
inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Two lower-case hexadecimal digits a byte.
inline std::string hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes)
    for (const int shift : {4, 0}) text += kDigits[static_cast<int>(byte) >> shift & 15];
  return text;
}

/// Flips bit `bit` (0: the lowest) of byte `byte`. Throws std::ios_base::failure.
inline void flip_bit(const std::filesystem::path& path, int64_t byte, int bit) {
  std::fstream file;
  file.exceptions(std::ios::failbit | std::ios::badbit);
  file.open(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(byte);
  const int old = file.get();
  file.seekp(byte);
  file.put(static_cast<char>(old ^ (1 << bit)));
}

}  // namespace tessera
