// JPEG through libjpeg (libjpeg-turbo).
#include <cstddef>
#include <cstdio>  // before jpeglib.h, which needs FILE

#include <jerror.h>
#include <jpeglib.h>

#include <csetjmp>
#include <string>

#include "core/error.h"
#include "examples/segmentation/codecs.h"

namespace tessera::examples::codecs {
namespace {

constexpr int kMaxScans = 500;  // a progressive file with many tiny scans would otherwise take minutes

/// libjpeg finds its callbacks through the first member.
struct ErrorManager {
  jpeg_error_mgr manager;
  std::jmp_buf jump;
  char message[JMSG_LENGTH_MAX] = "";
};

[[noreturn]] void on_error(j_common_ptr info) {
  auto* errors = reinterpret_cast<ErrorManager*>(info->err);
  info->err->format_message(info, errors->message);
  std::longjmp(errors->jump, 1);
}

// libjpeg fills missing pixels with grey and only warns. Extra bytes are harmless.
void on_message(j_common_ptr info, int level) {
  if (level < 0 && info->err->msg_code != JWRN_EXTRANEOUS_DATA) on_error(info);
}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMaxScans) return;
  auto* errors = reinterpret_cast<ErrorManager*>(info->err);
  std::snprintf(errors->message, sizeof errors->message, "it has more than %d scans", kMaxScans);
  std::longjmp(errors->jump, 1);
}

/// Owns libjpeg's decompressor.
class Jpeg {
 public:
  Jpeg() {
    info.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = on_error;
    errors.manager.emit_message = on_message;
    errors.manager.output_message = [](j_common_ptr) {};
  }
  ~Jpeg() { jpeg_destroy_decompress(&info); }  // does nothing if it was not created
  Jpeg(const Jpeg&) = delete;
  Jpeg& operator=(const Jpeg&) = delete;

  jpeg_decompress_struct info{};
  ErrorManager errors{};
  jpeg_progress_mgr progress{};
};

/// Whether `body` ended without an error. It must not have objects with destructors.
template <class Body>
[[gnu::noinline]] bool guarded(Jpeg& jpeg, const Body& body) {
  if (setjmp(jpeg.errors.jump) != 0) return false;
  body();
  return true;
}

}  // namespace

Image decode_jpeg(const std::string& path, Bytes file, bool pixels) {
  Jpeg jpeg;
  jpeg_decompress_struct& info = jpeg.info;
  const auto damaged = [&] { return DataError(path, ": damaged JPEG: ", jpeg.errors.message); };

  const bool has_header = guarded(jpeg, [&] {
    jpeg_create_decompress(&info);
    jpeg.progress.progress_monitor = on_progress;
    info.progress = &jpeg.progress;
    jpeg_mem_src(&info, file.data(), file.size());
    jpeg_read_header(&info, TRUE);
  });
  if (!has_header) throw damaged();
  check_size(path, info.image_width, info.image_height);
  if (info.num_components != 1 && info.num_components != 3)
    throw DataError(path, ": a JPEG with ", info.num_components,
                    " components (CMYK has 4); expected 1 (grey) or 3 (colour)");

  Image image{info.image_width, info.image_height, info.num_components, {}};
  if (!pixels) return image;
  const size_t row_bytes = static_cast<size_t>(image.width * image.channels);
  image.pixels.resize(row_bytes * static_cast<size_t>(image.height));
  const bool complete = guarded(jpeg, [&] {
    info.out_color_space = info.num_components == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_start_decompress(&info);
    while (info.output_scanline < info.output_height) {
      JSAMPROW row = image.pixels.data() + info.output_scanline * row_bytes;
      jpeg_read_scanlines(&info, &row, 1);
    }
    jpeg_finish_decompress(&info);
  });
  if (!complete) throw damaged();
  return image;
}

}  // namespace tessera::examples::codecs
