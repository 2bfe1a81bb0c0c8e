// Reading PNG and JPEG files, and writing PNG. Without libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// 8 bits per channel, in order row, column, channel. 1 channel is grey, 3 are RGB, 4 RGBA.
struct Image {
  int64_t width = 0, height = 0, channels = 0;
  std::vector<uint8_t> pixels;  ///< height * width * channels
};

enum class Palette {
  kColours,  ///< a palette's colours: 3 channels (4 with transparency)
  kIndices,  ///< the indices in the file: 1 channel, as numpy.asarray of Pillow's mode P; for masks
};

/// Larger images are an error, before memory is allocated: 8192 x 8192 pixels.
inline constexpr int64_t kMaxPixels = int64_t{1} << 26;

/// Reads an image; its format is determined by its first bytes. Grey, RGB, RGBA and palette PNG of any
/// depth (16 bits are rounded to 8, grey with transparency becomes RGBA), grey and colour JPEG. Gamma, colour
/// profiles and EXIF rotation are ignored, as by Pillow's Image.open. Throws DataError naming the file if it
/// is missing, of another format (CMYK included), damaged, truncated or too large.
Image read_image(const std::string& path, Palette palette = Palette::kColours);

/// The same without pixels: reads and checks the header only.
Image read_image_header(const std::string& path, Palette palette = Palette::kColours);

/// Image: 1, 3 or 4 channels. Replaces the file atomically. Throws DataError naming the file if it
/// cannot be written.
void write_png(const std::string& path, const Image& image);

}  // namespace tessera::examples
