// What image_file.cc asks of libpng and libjpeg. Both report errors by longjmp, which must not pass
// a destructor: every call of theirs stands in a `guarded` body that has nothing to destroy, and
// what owns memory lives outside of it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "examples/segmentation/image_file.h"

namespace tessera::examples::codecs {

using Bytes = std::span<const uint8_t>;

/// Local. `file` is the content of `path`, which is only named. Without `pixels` the image stays
/// empty but for its size. Throws DataError.
Image decode_png(const std::string& path, Bytes file, Palette palette, bool pixels);
Image decode_jpeg(const std::string& path, Bytes file, bool pixels);

/// Local. Throws DataError when the image has too many pixels (or none).
void check_size(const std::string& path, uint64_t width, uint64_t height);

}  // namespace tessera::examples::codecs
