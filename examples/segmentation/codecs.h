// Image decoding with libpng and libjpeg, for image_file.cc. Both report errors by longjmp, which must not
// skip destructors. So all calls of these libraries are in `guarded` bodies without objects that need a
// destructor; owners of memory live outside of these bodies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "examples/segmentation/image_file.h"

namespace tessera::examples::codecs {

using Bytes = std::span<const uint8_t>;

/// `file`: the content of `path`, which is used in messages only. Without `pixels` only the image's
/// size is set. Throws DataError.
Image decode_png(const std::string& path, Bytes file, Palette palette, bool pixels);
Image decode_jpeg(const std::string& path, Bytes file, bool pixels);

/// Throws DataError if the image has too many pixels, or none.
void check_size(const std::string& path, uint64_t width, uint64_t height);

}  // namespace tessera::examples::codecs
