// PNG files (ISO/IEC 15948), for images in monitors.
#pragma once

#include <string>

#include "engine/monitor/monitor.h"

namespace tessera {

/// Local. The bytes of a PNG file, 8 bits a channel. Throws tessera::Error when the size is not positive or does not fit the pixels.
std::string encode_png(const ImageView& image);

/// Local. "images/val_mask_300.png" for val/mask at step 300.
std::string image_file(std::string name, int64_t step);

}  // namespace tessera
