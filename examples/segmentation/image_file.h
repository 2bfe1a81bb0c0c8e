// Reading PNG and JPEG files, and writing PNG. Without libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// 8 bits a channel, rows from the top, pixels from the left, channels together: 1 is grey, 3 RGB, 4 RGBA.
struct Image {
  int64_t width = 0, height = 0, channels = 0;
  std::vector<uint8_t> pixels;  ///< height * width * channels
};

enum class Palette {
  kColours,  ///< a palette's colours: 3 channels (4 with transparency)
  kIndices,  ///< the indices as they stand in the file: 1 channel, as numpy.asarray of Pillow's mode P. For
             ///< masks
};

/// More pixels than this are refused before memory is taken: 8192 x 8192.
inline constexpr int64_t kMaxPixels = int64_t{1} << 26;

/// Local. A whole image, its kind known by its first bytes. Grey, RGB, RGBA and palette PNG of any depth (16
/// bits are rounded to 8, grey with transparency becomes RGBA), grey and colour JPEG. Gamma, colour profiles
/// and EXIF rotation are left alone, as Pillow's Image.open does. Throws DataError naming the file: it is
/// missing, of another kind (CMYK too), damaged, truncated, or too large.
Image read_image(const std::string& path, Palette palette = Palette::kColours);

/// Local. The same without pixels: only what comes before them is read and checked.
Image read_image_header(const std::string& path, Palette palette = Palette::kColours);

/// Local. 1, 3 or 4 channels. Replaces the file as a whole. Throws DataError
/// naming the file when it cannot be written.
void write_png(const std::string& path, const Image& image);

}  // namespace tessera::examples
