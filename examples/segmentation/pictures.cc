#include "examples/segmentation/pictures.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::examples {
namespace {

constexpr int64_t kBorder = 4;       // pixels around every picture
constexpr int64_t kMinEdge = 160;    // smaller pictures are enlarged
constexpr int64_t kMaxEdge = 512;    // larger ones are subsampled
constexpr int kBackgroundGrey = 96;  // neither black nor white

/// (B, H, W) int64 -> (B, 3, H, W) uint8
at::Tensor coloured(const at::Tensor& classes) {
  static constexpr uint8_t kColours[][3] = {{0, 0, 0},   {255, 255, 255}, {255, 0, 0},   {0, 255, 0},
                                            {0, 0, 255}, {255, 255, 0},   {255, 0, 255}, {0, 255, 255}};
  constexpr int64_t kNumColours = sizeof kColours / sizeof kColours[0];
  const at::Tensor table = at::empty({kNumColours, 3}, at::kByte);
  std::memcpy(table.data_ptr<uint8_t>(), kColours, sizeof kColours);
  return table.index_select(0, classes.remainder(kNumColours).flatten())
      .view({classes.size(0), classes.size(1), classes.size(2), 3})
      .permute({0, 3, 1, 2});
}

/// (B, 3, H, W) uint8 in a size to look at, with a border.
at::Tensor framed(const at::Tensor& pictures) {
  const int64_t longest = std::max(pictures.size(2), pictures.size(3));
  const int64_t step = (longest + kMaxEdge - 1) / kMaxEdge;
  const int64_t factor = std::max<int64_t>((kMinEdge + longest - 1) / longest, 1);
  const at::Tensor seen = pictures.slice(2, 0, std::nullopt, step).slice(3, 0, std::nullopt, step);
  const at::Tensor enlarged = seen.repeat_interleave(factor, 2).repeat_interleave(factor, 3);
  return at::constant_pad_nd(enlarged, {kBorder, kBorder, kBorder, kBorder}, kBackgroundGrey);
}

}  // namespace

Image side_by_side(const at::Tensor& images, const at::Tensor& masks, const at::Tensor& predictions) {
  const at::Tensor columns =
      at::cat({framed(images), framed(coloured(masks)), framed(coloured(predictions))}, 3);  // (B, 3, h, 3 w)
  const at::Tensor page =
      columns.permute({0, 2, 3, 1}).reshape({-1, columns.size(3), 3}).contiguous();  // (B h, 3 w, 3)
  const uint8_t* bytes = page.const_data_ptr<uint8_t>();
  return {page.size(1), page.size(0), 3, std::vector<uint8_t>(bytes, bytes + page.numel())};
}

}  // namespace tessera::examples
