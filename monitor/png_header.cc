// png_view(): apart from png.cc, so that a program which encodes no image needs no libpng.
#include <array>

#include "core/error.h"
#include "monitor/png.h"

namespace tessera {

PngView png_view(std::string_view bytes) {
  constexpr std::string_view kSignature("\x89PNG\r\n\x1a\n", 8);
  constexpr size_t kHeaderEnd = 33;  // signature, and IHDR with its length and CRC
  constexpr size_t kWidth = 16, kHeight = 20, kColourType = 25;
  constexpr std::array<int, 7> kChannels = {1, 0, 3, 3, 2, 0, 4};  // by colour type
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(bytes[at]); };
  const auto number = [&](size_t at) {
    return byte(at) << 24 | byte(at + 1) << 16 | byte(at + 2) << 8 | byte(at + 3);
  };
  if (bytes.size() < kHeaderEnd || !bytes.starts_with(kSignature) || bytes.substr(12, 4) != "IHDR" ||
      byte(kColourType) >= kChannels.size())
    throw Error("found no PNG header; expected a PNG file");
  const PngView view{.width = number(kWidth),
                     .height = number(kHeight),
                     .channels = kChannels[byte(kColourType)],
                     .bytes = bytes};
  if (view.width < 1 || view.height < 1 || view.channels == 0)
    throw Error("found a PNG header of ", view.width, " x ", view.height, " pixels and ", view.channels,
                " channels; expected some");
  return view;
}

}  // namespace tessera
