// Reading PNG through libpng.
#include <png.h>

#include <csetjmp>
#include <cstring>
#include <string>

#include "core/error.h"
#include "examples/segmentation/codecs.h"

namespace tessera::examples::codecs {
namespace {

// Is the largest expansion of a deflate stream (RFC 1951: 258 bytes from 2 bits).
constexpr int64_t kMaxDeflateRatio = 1032;

/// The callbacks' state: the input, the position in it, and the first error.
struct Stream {
  Bytes input;
  size_t position = 0;
  char message[200] = "";
};

void on_error(png_structp png, png_const_charp message) {
  auto* stream = static_cast<Stream*>(png_get_error_ptr(png));
  std::strncpy(stream->message, message, sizeof stream->message - 1);
  png_longjmp(png, 1);
}

void on_warning(png_structp, png_const_charp) {}  // errors in the pixels are not warnings

void read_bytes(png_structp png, png_bytep to, size_t size) {
  auto* stream = static_cast<Stream*>(png_get_io_ptr(png));
  if (size > stream->input.size() - stream->position) png_error(png, "the file ends too early");
  std::memcpy(to, stream->input.data() + stream->position, size);
  stream->position += size;
}

/// Owns libpng's two structs.
class Reader {
 public:
  explicit Reader(Stream& stream)
      : png_(png_create_read_struct(PNG_LIBPNG_VER_STRING, &stream, on_error, on_warning)) {
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
    if (info_ != nullptr) return;
    png_destroy_read_struct(&png_, nullptr, nullptr);
    throw DataError("libpng cannot start: out of memory, or another version than it was compiled with");
  }
  ~Reader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  png_structp png() const { return png_; }
  png_infop info() const { return info_; }

 private:
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

/// Whether `body` ended without an error. It must not have objects with destructors.
template <class Body>
[[gnu::noinline]] bool guarded(png_structp png, const Body& body) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  body();
  return true;
}

/// Converts to 8 bits per channel and 1, 3 or 4 channels.
void ask_for_bytes(png_structp png, png_infop info, Palette palette) {
  const int type = png_get_color_type(png, info);
  png_set_scale_16(png);
  if (type == PNG_COLOR_TYPE_PALETTE && palette == Palette::kIndices) {
    png_set_packing(png);
  } else {
    png_set_expand(png);  // palettes to colours, fewer bits to 8, tRNS to alpha
    const bool has_alpha = (type & PNG_COLOR_MASK_ALPHA) != 0 || png_get_valid(png, info, PNG_INFO_tRNS) != 0;
    if ((type & PNG_COLOR_MASK_COLOR) == 0 && has_alpha) png_set_gray_to_rgb(png);
  }
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
}

}  // namespace

Image decode_png(const std::string& path, Bytes file, Palette palette, bool pixels) {
  Stream stream{.input = file};
  const Reader reader(stream);
  const png_structp png = reader.png();
  const png_infop info = reader.info();
  const auto damaged = [&] { return DataError(path, ": damaged PNG: ", stream.message); };

  const bool has_header = guarded(png, [&] {
    png_set_read_fn(png, &stream, read_bytes);
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr,
                                -1);  // texts and profiles, which may expand to gigabytes
    png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);  // check_size() limits the size
    png_read_info(png, info);
  });
  if (!has_header) throw damaged();
  check_size(path, png_get_image_width(png, info), png_get_image_height(png, info));
  const auto packed_bytes =
      static_cast<int64_t>(png_get_rowbytes(png, info)) * png_get_image_height(png, info);
  if (!guarded(png, [&] { ask_for_bytes(png, info, palette); })) throw damaged();

  Image image{
      png_get_image_width(png, info), png_get_image_height(png, info), png_get_channels(png, info), {}};
  if (!pixels) return image;
  if (packed_bytes / kMaxDeflateRatio > static_cast<int64_t>(file.size()))
    throw DataError(path, ": damaged PNG: its header says ", image.width, " x ", image.height,
                    " pixels, more than ", file.size(), " compressed bytes can hold");
  const size_t row_bytes = png_get_rowbytes(png, info);
  image.pixels.resize(row_bytes * static_cast<size_t>(image.height));
  std::vector<png_bytep> rows(static_cast<size_t>(image.height));
  for (size_t row = 0; row < rows.size(); ++row) rows[row] = image.pixels.data() + row * row_bytes;
  const bool complete = guarded(png, [&] {
    png_read_image(png, rows.data());
    png_read_end(png, nullptr);
  });
  if (!complete) throw damaged();
  return image;
}

}  // namespace tessera::examples::codecs
