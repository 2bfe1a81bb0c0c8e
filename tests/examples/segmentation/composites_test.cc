// Synthetic pictures: their masks are right, and they are the same on every machine.
#include "examples/segmentation/composites.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/examples/idx_files.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

class CompositesTest : public IdxFolderTest {
 protected:
  /// Fashion-MNIST with `items` (N x 784).
  CompositesOptions options_for(const Bytes& items) const {
    const auto count = static_cast<uint32_t>(items.size() / 784);
    write("train-images-idx3-ubyte", idx_bytes({count, 28, 28}, items));
    write("train-labels-idx1-ubyte", idx_bytes({count}, counting(count, 10)));
    return {.path = folder_.string(), .num_images = count, .size = 64, .max_items = 1, .seed = 3};
  }
};

/// The first and last row and column in which a mask is not 0.
struct Box {
  explicit Box(const at::Tensor& mask) {
    const at::Tensor places = mask.nonzero();
    const at::Tensor low = std::get<0>(places.min(0)), high = std::get<0>(places.max(0));
    top = low[0].item<int64_t>(), left = low[1].item<int64_t>(), bottom = high[0].item<int64_t>(),
    right = high[1].item<int64_t>();
  }
  at::Tensor of(const at::Tensor& plane) const {
    return plane.slice(-2, top, bottom + 1).slice(-1, left, right + 1);
  }
  int64_t height() const { return bottom - top + 1; }
  int64_t width() const { return right - left + 1; }
  int64_t top, left, bottom, right;
};

TEST_F(CompositesTest, AWhiteItemIsASquareOfOneColour) {
  const FashionComposites data(options_for(Bytes(50 * 784, 255)));
  EXPECT_EQ(data.size(), 50);
  std::set<int64_t> edges, tops;
  for (int64_t i = 0; i < data.size(); ++i) {
    const SegmentationSample sample = data.sample(i);
    ASSERT_EQ(sample.image.sizes(), (at::IntArrayRef{3, 64, 64}));
    ASSERT_EQ(sample.mask.sizes(), (at::IntArrayRef{64, 64}));
    const Box box(sample.mask);
    EXPECT_EQ(box.height(), box.width());
    EXPECT_TRUE(box.of(sample.mask).eq(1).all().item<bool>());
    EXPECT_EQ(sample.mask.sum().item<int64_t>(), box.height() * box.width()) << "and nothing outside";
    EXPECT_GE(box.height(), 16);
    EXPECT_LE(box.height(), 32);
    edges.insert(box.height());
    tops.insert(box.top);
    const at::Tensor inside = box.of(sample.image).to(at::kInt).flatten(1);
    EXPECT_LE((std::get<0>(inside.max(1)) - std::get<0>(inside.min(1))).max().item<int64_t>(), 25)
        << "one colour, but for grain";
  }
  EXPECT_GT(edges.size(), 8u);
  EXPECT_GT(tops.size(), 15u);
}

TEST_F(CompositesTest, AMaskHasTheItemsShape) {
  Bytes left_half(30 * 784, 0);
  for (size_t i = 0; i < left_half.size(); ++i)
    if (i % 28 < 14) left_half[i] = 200;
  const FashionComposites data(options_for(left_half));
  for (int64_t i = 0; i < data.size(); ++i) {
    const Box box(data.sample(i).mask);
    EXPECT_NEAR(static_cast<double>(box.width()), static_cast<double>(box.height()) / 2, 1.1);
  }
  const FashionComposites dust(options_for(Bytes(3 * 784, 20)));
  EXPECT_EQ(dust.sample(0).mask.sum().item<int64_t>(), 0) << "faint pixels belong to no item";
}

TEST_F(CompositesTest, SeveralItemsAndNoneTwice) {
  CompositesOptions options = options_for(counting(80 * 784));
  options.num_images = 20;
  options.max_items = 4;
  const FashionComposites data(options);
  EXPECT_EQ(data.sample(19).mask.max().item<int64_t>(), 1);
  options.num_images = 21;
  EXPECT_THAT(error_of<ConfigError>([&] { FashionComposites{options}; }),
              HasSubstr("data.num_images: found 21 pictures of up to 4 items"));
}

TEST_F(CompositesTest, PicturesDependOnSeedAndNumberAlone) {
  CompositesOptions options = options_for(counting(40 * 784));
  const auto checksum = [](const SegmentationSample& sample) {
    const uLong of_image =
        crc32(0, sample.image.const_data_ptr<uint8_t>(), static_cast<uInt>(sample.image.numel()));
    return crc32(of_image, sample.mask.const_data_ptr<uint8_t>(), static_cast<uInt>(sample.mask.numel()));
  };
  const FashionComposites data(options), again(options);
  const std::vector<uLong> expected = {3587729078, 2559523045, 3355913649};  // on every machine
  for (int64_t i : {2, 0, 1}) {
    EXPECT_EQ(checksum(data.sample(i)), expected[static_cast<size_t>(i)]) << i;
    EXPECT_EQ(checksum(again.sample(i)), checksum(data.sample(i)));
  }
  options.num_images = 2;
  EXPECT_EQ(checksum(FashionComposites(options).sample(1)), checksum(data.sample(1)))
      << "not on how many there are";
  options.seed = 4;
  EXPECT_NE(checksum(FashionComposites(options).sample(1)), checksum(data.sample(1)));
}

}  // namespace
}  // namespace tessera::examples
