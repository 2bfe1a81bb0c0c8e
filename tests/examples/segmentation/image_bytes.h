// Writes PNG and JPEG files, valid ones and some that no library would write.
#pragma once

#include <cstdio>  // before jpeglib.h, which needs FILE

#include <jpeglib.h>
#include <zlib.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace tessera::examples {

using Bytes = std::vector<uint8_t>;

inline void put_32(Bytes& bytes, uint64_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(value >> shift));
}

inline void put_chunk(Bytes& png, const std::string& name, const Bytes& content) {
  put_32(png, content.size());
  const size_t begin = png.size();
  png.insert(png.end(), name.begin(), name.end());
  png.insert(png.end(), content.begin(), content.end());
  put_32(png, crc32(0, png.data() + begin, static_cast<uInt>(png.size() - begin)));
}

/// The contents of a PNG's header, and its further chunks.
struct PngParts {
  uint32_t width = 0, height = 0;
  uint8_t depth = 8, colour_type = 0;
  Bytes rows;  ///< each row with a leading 0 (no filter)
  Bytes palette = {}, transparency = {};
};

inline Bytes png_bytes(const PngParts& parts) {
  Bytes png = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
  Bytes header;
  put_32(header, parts.width);
  put_32(header, parts.height);
  header.insert(header.end(), {parts.depth, parts.colour_type, 0, 0, 0});
  put_chunk(png, "IHDR", header);
  if (!parts.palette.empty()) put_chunk(png, "PLTE", parts.palette);
  if (!parts.transparency.empty()) put_chunk(png, "tRNS", parts.transparency);
  Bytes packed(compressBound(static_cast<uLong>(parts.rows.size())));
  uLongf size = packed.size();
  compress(packed.data(), &size, parts.rows.data(), static_cast<uLong>(parts.rows.size()));
  packed.resize(size);
  put_chunk(png, "IDAT", packed);
  put_chunk(png, "IEND", {});
  return png;
}

/// `channels`: 1 grey, 3 RGB, 4 CMYK. `pixels`: height * width * channels.
inline Bytes jpeg_bytes(uint32_t width, uint32_t height, int channels, const Bytes& pixels,
                        bool progressive = false) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* out = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &out, &size);
  info.image_width = width;
  info.image_height = height;
  info.input_components = channels;
  info.in_color_space = channels == 1 ? JCS_GRAYSCALE : channels == 3 ? JCS_RGB : JCS_CMYK;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 95, TRUE);
  if (progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  for (uint32_t row = 0; row < height; ++row) {
    JSAMPROW from = const_cast<uint8_t*>(pixels.data()) +
                    static_cast<size_t>(row) * width * static_cast<size_t>(channels);
    jpeg_write_scanlines(&info, &from, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  Bytes bytes(out, out + size);
  std::free(out);
  return bytes;
}

}  // namespace tessera::examples
