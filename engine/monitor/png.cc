#include "engine/monitor/png.h"

#include <zlib.h>

#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8), static_cast<char>(value)};
}

std::string chunk(const std::string& type, const std::string& data) {
  const std::string checked = type + data;
  const uLong crc = crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size()));
  return big_endian(static_cast<uint32_t>(data.size())) + checked + big_endian(static_cast<uint32_t>(crc));
}

std::string compressed(const std::string& data) {
  std::string out(compressBound(data.size()), '\0');
  uLongf size = out.size();
  const int result = compress(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(data.data()), data.size());
  if (result != Z_OK) throw Error(str("an image cannot be compressed: zlib error ", result));
  out.resize(size);
  return out;
}

}  // namespace

std::string encode_png(const ImageView& image) {
  constexpr int kLargestSide = 16384;  // rows of all chunks stay below 2^31 bytes
  if (image.width < 1 || image.height < 1 || image.width > kLargestSide || image.height > kLargestSide)
    throw Error(str("found an image of ", image.width, " x ", image.height, " pixels; expected sides from 1 to ", kLargestSide));
  const size_t row_bytes = 3 * static_cast<size_t>(image.width);
  if (image.rgb.size() != row_bytes * static_cast<size_t>(image.height))
    throw Error(str("found ", image.rgb.size(), " bytes for an RGB image of ", image.width, " x ", image.height, " pixels; expected ",
                    row_bytes * static_cast<size_t>(image.height)));
  std::string rows;
  rows.reserve((row_bytes + 1) * static_cast<size_t>(image.height));
  for (size_t at = 0; at < image.rgb.size(); at += row_bytes) {
    rows += '\0';  // this row is not filtered
    rows.append(reinterpret_cast<const char*>(image.rgb.data()) + at, row_bytes);
  }
  const std::string eight_bits_rgb("\x08\x02\x00\x00\x00", 5);
  const std::string header =
      big_endian(static_cast<uint32_t>(image.width)) + big_endian(static_cast<uint32_t>(image.height)) + eight_bits_rgb;
  return "\x89PNG\r\n\x1a\n" + chunk("IHDR", header) + chunk("IDAT", compressed(rows)) + chunk("IEND", "");
}

std::string image_file(std::string name, int64_t step) {
  for (char& c : name)
    if (c == '/' || c == ' ') c = '_';
  return str("images/", name, "_", step, ".png");
}

}  // namespace tessera
