#include "monitor/png.h"

#include <png.h>

#include <array>

#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

constexpr std::string_view kSignature("\x89PNG\r\n\x1a\n", 8);

void check(const ImageView& image) {
  constexpr int kLargestSide = 16384;  // all rows together stay below 2^31 bytes
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
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width);
  png.height = static_cast<png_uint_32>(image.height);
  png.format = image.channels == 1 ? PNG_FORMAT_GRAY : image.channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(png);
  std::string bytes(size, '\0');
  if (png_image_write_to_memory(&png, bytes.data(), &size, /*convert_to_8bit=*/0, image.pixels.data(),
                                /*row_stride=*/0, /*colormap=*/nullptr) == 0)
    throw Error(str("an image cannot be written as PNG: ", png.message));
  bytes.resize(size);
  return bytes;
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
