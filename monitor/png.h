// Writing PNG files (ISO/IEC 15948), and reading their headers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// An image. Borrows its pixels.
struct ImageView {
  int width = 0, height = 0;
  int channels = 3;                 ///< 1 is grey, 3 RGB, 4 RGBA
  std::span<const uint8_t> pixels;  ///< (height, width, channels)
};

/// A PNG file's content. Borrows it.
struct PngView {
  int width = 0, height = 0;
  int channels = 0;  ///< 1 is grey, 2 grey with alpha, 3 RGB (palettes too), 4 RGBA
  std::string_view bytes;
  std::filesystem::path file = {};  ///< a file with these bytes, which stays there; empty: none
};

/// The bytes of a PNG file, 8 bits a channel. Throws tessera::Error for another number of
/// channels, and for a size that is not positive or does not fit the pixels.
std::string encode_png(const ImageView& image);

/// Reads the header only. Throws tessera::Error when there is none.
PngView png_view(std::string_view bytes);

}  // namespace tessera
