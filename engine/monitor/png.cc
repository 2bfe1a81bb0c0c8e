#include "engine/monitor/png.h"

#include <zlib.h>

#include <array>
#include <cstdlib>

#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

constexpr std::string_view kSignature("\x89PNG\r\n\x1a\n", 8);

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string chunk(const std::string& type, const std::string& data) {
  const std::string checked = type + data;
  const uLong crc =
      crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size()));
  return big_endian(static_cast<uint32_t>(data.size())) + checked + big_endian(static_cast<uint32_t>(crc));
}

std::string compressed(const std::string& data) {
  std::string out(compressBound(data.size()), '\0');
  uLongf size = out.size();
  const int result = compress(reinterpret_cast<Bytef*>(out.data()), &size,
                              reinterpret_cast<const Bytef*>(data.data()), data.size());
  if (result != Z_OK) throw Error(str("an image cannot be compressed: zlib error ", result));
  out.resize(size);
  return out;
}

/// Of the neighbours on the left, above, and above on the left, the one closest to left + above - corner.
uint8_t paeth(int left, int above, int corner) {
  const int guess = left + above - corner;
  const int from_left = std::abs(guess - left), from_above = std::abs(guess - above),
            from_corner = std::abs(guess - corner);
  if (from_left <= from_above && from_left <= from_corner) return static_cast<uint8_t>(left);
  return static_cast<uint8_t>(from_above <= from_corner ? above : corner);
}

/// A row as its number of filter and its bytes. Of the standard's filters (chapter 9) the one with the least
/// sum of magnitudes is taken, as its chapter 12 advises. `above`: the row before, zeros for the first.
std::string filtered(std::span<const uint8_t> row, std::span<const uint8_t> above, size_t pixel_bytes) {
  constexpr std::array<char, 4> kFilters = {0, 1, 2, 4};  // none, Sub, Up, Paeth
  std::string best;
  int64_t least = -1;
  for (const char filter : kFilters) {
    std::string out(1, filter);
    out.reserve(row.size() + 1);
    int64_t sum = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      const uint8_t left = i < pixel_bytes ? 0 : row[i - pixel_bytes];
      const uint8_t corner = i < pixel_bytes ? 0 : above[i - pixel_bytes];
      const uint8_t guess = filter == 0   ? 0
                            : filter == 1 ? left
                            : filter == 2 ? above[i]
                                          : paeth(left, above[i], corner);
      const auto rest = static_cast<int8_t>(row[i] - guess);
      out += static_cast<char>(rest);
      sum += std::abs(static_cast<int>(rest));
    }
    if (least >= 0 && sum >= least) continue;
    least = sum;
    best = std::move(out);
  }
  return best;
}

void check(const ImageView& image) {
  constexpr int kLargestSide = 16384;  // rows of all chunks stay below 2^31 bytes
  if (image.channels != 1 && image.channels != 3 && image.channels != 4)
    throw Error(str("found an image of ", image.channels, " channels; expected 1, 3 or 4"));
  if (image.width < 1 || image.height < 1 || image.width > kLargestSide || image.height > kLargestSide)
    throw Error(str("found an image of ", image.width, " x ", image.height,
                    " pixels; expected sides from 1 to ", kLargestSide));
  const size_t wanted = static_cast<size_t>(image.channels) * static_cast<size_t>(image.width) *
                        static_cast<size_t>(image.height);
  if (image.pixels.size() != wanted)
    throw Error(str("found ", image.pixels.size(), " bytes for an image of ", image.width, " x ",
                    image.height, " pixels and ", image.channels, " channels; expected ", wanted));
}

}  // namespace

std::string encode_png(const ImageView& image) {
  check(image);
  const auto pixel_bytes = static_cast<size_t>(image.channels);
  const size_t row_bytes = pixel_bytes * static_cast<size_t>(image.width);
  const std::string zeros(row_bytes, '\0');
  std::span<const uint8_t> above(reinterpret_cast<const uint8_t*>(zeros.data()), row_bytes);
  std::string rows;
  rows.reserve((row_bytes + 1) * static_cast<size_t>(image.height));
  for (size_t at = 0; at < image.pixels.size(); at += row_bytes) {
    const std::span<const uint8_t> row = image.pixels.subspan(at, row_bytes);
    rows += filtered(row, above, pixel_bytes);
    above = row;
  }
  const char colour_type = image.channels == 1 ? 0 : image.channels == 3 ? 2 : 6;
  const std::string header = big_endian(static_cast<uint32_t>(image.width)) +
                             big_endian(static_cast<uint32_t>(image.height)) + '\x08' + colour_type +
                             std::string(3, '\0');
  return std::string(kSignature) + chunk("IHDR", header) + chunk("IDAT", compressed(rows)) +
         chunk("IEND", "");
}

PngView png_view(std::string_view bytes) {
  constexpr size_t kHeaderEnd = 33;  // signature, and IHDR with its length and CRC
  constexpr size_t kWidth = 16, kHeight = 20, kColourType = 25;
  constexpr std::array<int, 7> kChannels = {1, 0, 3, 3, 2, 0, 4};  // by colour type
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(bytes[at]); };
  const auto number = [&](size_t at) {
    return byte(at) << 24 | byte(at + 1) << 16 | byte(at + 2) << 8 | byte(at + 3);
  };
  if (bytes.size() < kHeaderEnd || !bytes.starts_with(kSignature) || bytes.substr(12, 4) != "IHDR" ||
      byte(kColourType) >= kChannels.size())
    throw Error("found no PNG header; expected a PNG file");
  const PngView view{.width = number(kWidth),
                     .height = number(kHeight),
                     .channels = kChannels[byte(kColourType)],
                     .bytes = bytes};
  if (view.width < 1 || view.height < 1 || view.channels == 0)
    throw Error(str("found a PNG header of ", view.width, " x ", view.height, " pixels and ", view.channels,
                    " channels; expected some"));
  return view;
}

}  // namespace tessera
