#include "examples/segmentation/composites.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "core/error.h"
#include "examples/fashion_mnist/dataset.h"

namespace tessera::examples {
namespace {

using Colour = std::array<double, 3>;  // RGB, 0 to 255

constexpr double kInk = 24;    // brighter pixels belong to the piece; darker ones around it are noise
constexpr double kGrain = 12;  // camera noise: the largest change of a value
constexpr int64_t kSmallestItem = 16;

/// Gives the same numbers on every machine and compiler.
class Random {
 public:
  Random(uint64_t seed, uint64_t index) : engine_(mixed(seed, index)) {}
  /// Returns a number in [0, 1).
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double between(double low, double high) { return low + (high - low) * unit(); }
  /// Returns a number in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  Colour colour() { return {between(0, 255), between(0, 255), between(0, 255)}; }

 private:
  static std::mt19937_64 mixed(uint64_t seed, uint64_t index) {
    std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                        static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)};
    return std::mt19937_64(words);
  }
  std::mt19937_64 engine_;
};

/// A picture being painted. Values leave 0 to 255 only in finish().
struct Canvas {
  explicit Canvas(int64_t edge)
      : size(edge), pixels(static_cast<size_t>(edge * edge)), mask(static_cast<size_t>(edge * edge)) {}
  size_t at(int64_t row, int64_t column) const { return static_cast<size_t>(row * size + column); }

  int64_t size;
  std::vector<Colour> pixels;
  std::vector<uint8_t> mask;
};

Colour mix(const Colour& a, const Colour& b, double part) {
  return {a[0] + (b[0] - a[0]) * part, a[1] + (b[1] - a[1]) * part, a[2] + (b[2] - a[2]) * part};
}

/// (row, column) in `grid`, a square of `edge` values a side, between its neighbours.
double interpolate(const double* grid, int64_t edge, double row, double column) {
  const auto r = std::min(static_cast<int64_t>(row), edge - 2),
             c = std::min(static_cast<int64_t>(column), edge - 2);
  const double down = row - static_cast<double>(r), right = column - static_cast<double>(c);
  const double* corner = grid + r * edge + c;
  const double upper = corner[0] + (corner[1] - corner[0]) * right;
  const double lower = corner[edge] + (corner[edge + 1] - corner[edge]) * right;
  return upper + (lower - upper) * down;
}

/// Where a background lies between its two colours, 0 to 1, by pixel: a gradient, a checker board, or clouds.
std::vector<double> texture(Random& random, int64_t size) {
  std::vector<double> parts(static_cast<size_t>(size * size));
  const int64_t kind = random.integer(0, 2);
  const double along_rows = random.between(-1, 1), along_columns = random.between(-1, 1);
  const int64_t cell = random.integer(4, std::max<int64_t>(4, size / 4));
  const int64_t shift_rows = random.integer(0, cell - 1), shift_columns = random.integer(0, cell - 1);
  const int64_t edge = size / cell + 2;
  std::vector<double> clouds(static_cast<size_t>(edge * edge));
  for (double& value : clouds) value = random.unit();
  for (int64_t row = 0; row < size; ++row) {
    for (int64_t column = 0; column < size; ++column) {
      const double r = static_cast<double>(row), c = static_cast<double>(column),
                   scale = static_cast<double>(cell);
      double& part = parts[static_cast<size_t>(row * size + column)];
      if (kind == 0) part = 0.5 + 0.5 * (along_rows * r + along_columns * c) / static_cast<double>(size);
      if (kind == 1)
        part = static_cast<double>(((row + shift_rows) / cell + (column + shift_columns) / cell) % 2);
      if (kind == 2) part = interpolate(clouds.data(), edge, r / scale, c / scale);
    }
  }
  return parts;
}

void paint_background(Random& random, Canvas& canvas) {
  const Colour one = random.colour(), other = random.colour();
  const std::vector<double> parts = texture(random, canvas.size);
  for (size_t i = 0; i < parts.size(); ++i) canvas.pixels[i] = mix(one, other, parts[i]);
}

/// Draws one piece of clothing, fully inside the picture. `item`: 28 x 28.
void paint_item(Random& random, Canvas& canvas, const uint8_t* item) {
  std::array<double, kImageSize * kImageSize> ink{};
  std::copy_n(item, ink.size(), ink.begin());
  const Colour tint = random.colour();
  const int64_t edge = random.integer(std::min(kSmallestItem, canvas.size),
                                      std::max(std::min(kSmallestItem, canvas.size), canvas.size / 2));
  const int64_t top = random.integer(0, canvas.size - edge), left = random.integer(0, canvas.size - edge);
  const bool mirrored = random.integer(0, 1) == 1;
  const double step =
      static_cast<double>(kImageSize - 1) / static_cast<double>(std::max<int64_t>(edge - 1, 1));
  for (int64_t row = 0; row < edge; ++row) {
    for (int64_t column = 0; column < edge; ++column) {
      const int64_t from = mirrored ? edge - 1 - column : column;
      const double value = interpolate(ink.data(), kImageSize, static_cast<double>(row) * step,
                                       static_cast<double>(from) * step);
      if (value <= kInk) continue;
      const size_t place = canvas.at(top + row, left + column);
      canvas.pixels[place] = mix({0, 0, 0}, tint, 0.25 + 0.75 * value / 255);
      canvas.mask[place] = 1;
    }
  }
}

SegmentationSample finish(Random& random, const Canvas& canvas) {
  SegmentationSample sample{at::empty({3, canvas.size, canvas.size}, at::kByte),
                            at::empty({canvas.size, canvas.size}, at::kByte)};
  std::copy(canvas.mask.begin(), canvas.mask.end(), sample.mask.data_ptr<uint8_t>());
  uint8_t* to = sample.image.data_ptr<uint8_t>();
  for (size_t channel = 0; channel < 3; ++channel) {
    for (const Colour& colour : canvas.pixels)
      *to++ = static_cast<uint8_t>(std::clamp(colour[channel] + random.between(-kGrain, kGrain), 0.0, 255.0));
  }
  return sample;
}

}  // namespace

FashionComposites::FashionComposites(const CompositesOptions& options)
    : options_(options), items_(load_split(options.path, Split::kTrain).images.squeeze(1)) {
  if (options.num_images > items_.size(0) / options.max_items)
    throw ConfigError("data.num_images: found ", options.num_images, " pictures of up to ", options.max_items,
                      " items (data.max_items), but ", options.path, " has ", items_.size(0),
                      " items and none is used twice; expected at most ", items_.size(0) / options.max_items);
}

SegmentationSample FashionComposites::sample(int64_t index) const {
  Random random(options_.seed, static_cast<uint64_t>(index));
  Canvas canvas(options_.size);
  paint_background(random, canvas);
  const int64_t num_items = random.integer(1, options_.max_items);
  for (int64_t i = 0; i < num_items; ++i)
    paint_item(random, canvas,
               items_.const_data_ptr<uint8_t>() + (index * options_.max_items + i) * kImageSize * kImageSize);
  return finish(random, canvas);
}

}  // namespace tessera::examples
