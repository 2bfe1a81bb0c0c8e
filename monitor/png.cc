#include "monitor/png.h"

#include <png.h>

#include "core/error.h"

namespace tessera {
namespace {

void check(const ImageView& image) {
  constexpr int kLargestSide = 16384;  // all rows together stay below 2^31 bytes
  if (image.channels != 1 && image.channels != 3 && image.channels != 4)
    throw Error("found an image of ", image.channels, " channels; expected 1, 3 or 4");
  if (image.width < 1 || image.height < 1 || image.width > kLargestSide || image.height > kLargestSide)
    throw Error("found an image of ", image.width, " x ", image.height, " pixels; expected sides from 1 to ",
                kLargestSide);
  const size_t wanted = static_cast<size_t>(image.channels) * static_cast<size_t>(image.width) *
                        static_cast<size_t>(image.height);
  if (image.pixels.size() != wanted)
    throw Error("found ", image.pixels.size(), " bytes for an image of ", image.width, " x ", image.height,
                " pixels and ", image.channels, " channels; expected ", wanted);
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
    throw Error("an image cannot be written as PNG: ", png.message);
  bytes.resize(size);
  return bytes;
}

}  // namespace tessera
