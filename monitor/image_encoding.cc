// Monitors::image(): apart from the other members, so that a program which encodes no image needs no libpng.
#include "monitor/monitors.h"

namespace tessera {

void Monitors::image(const std::string& name, int64_t step, const ImageView& image) {
  or_warn(name, [&] {
    const std::string png = encode_png(image);
    tell([&, view = png_view(png)](Monitor& monitor) { monitor.image(name, step, view); });
  });
}

}  // namespace tessera
