#include "examples/segmentation/image_file.h"

#include <algorithm>
#include <array>
#include <span>

#include "core/error.h"
#include "core/files/disk.h"
#include "examples/segmentation/codecs.h"
#include "monitor/png.h"

namespace tessera::examples {
namespace {

constexpr std::array<uint8_t, 8> kPngSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr std::array<uint8_t, 3> kJpegSignature = {0xff, 0xd8, 0xff};
constexpr int64_t kMaxFile_bytes = int64_t{1} << 30;  // 67 million incompressible pixels are a quarter of it

std::vector<uint8_t> read_file(const std::string& path) {
  try {
    const InputFile file(path);
    if (file.bytes() > kMaxFile_bytes)
      throw DataError(path, ": has ", file.bytes(), " bytes; expected an image of at most ", kMaxFile_bytes);
    std::vector<uint8_t> bytes(static_cast<size_t>(file.bytes()));
    file.read_at(0, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  } catch (const DiskError& error) {
    throw DataError(path, ": cannot be opened: ", error.reason(), "; expected a PNG or JPEG image");
  }
}

template <size_t kSize>
bool starts_with(const std::vector<uint8_t>& bytes, const std::array<uint8_t, kSize>& signature) {
  return bytes.size() >= kSize && std::equal(signature.begin(), signature.end(), bytes.begin());
}

Image decode(const std::string& path, Palette palette, bool pixels) {
  const std::vector<uint8_t> bytes = read_file(path);
  if (starts_with(bytes, kPngSignature)) return codecs::decode_png(path, bytes, palette, pixels);
  if (starts_with(bytes, kJpegSignature)) return codecs::decode_jpeg(path, bytes, pixels);
  throw DataError(path, bytes.empty() ? ": is empty" : ": is neither PNG nor JPEG by its first bytes",
                  "; expected one of the two");
}

}  // namespace

void codecs::check_size(const std::string& path, uint64_t width, uint64_t height) {
  if (width > 0 && height > 0 && width <= static_cast<uint64_t>(kMaxPixels) / height) return;
  throw DataError(path, ": its header says ", width, " x ", height,
                  " pixels; expected at least 1 and at most ", kMaxPixels);
}

Image read_image(const std::string& path, Palette palette) { return decode(path, palette, /*pixels=*/true); }

Image read_image_header(const std::string& path, Palette palette) {
  return decode(path, palette, /*pixels=*/false);
}

void write_png(const std::string& path, const Image& image) {
  const ImageView view{.width = static_cast<int>(image.width),
                       .height = static_cast<int>(image.height),
                       .channels = static_cast<int>(image.channels),
                       .pixels = image.pixels};
  try {
    replace_file(path, encode_png(view));
  } catch (const DiskError& error) {
    throw DataError(error.what());
  } catch (const Error& error) {
    throw DataError(path, ": cannot be written as PNG: ", error.what());
  }
}

}  // namespace tessera::examples
