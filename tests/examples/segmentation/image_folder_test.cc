// Folders of images and masks: pairs, sizes, values, and errors that name the file.
#include "examples/segmentation/image_folder.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/examples/segmentation/image_bytes.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class ImageFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"images", "masks"}) std::filesystem::create_directories(folder_ / name);
    options_.images = (folder_ / "images").string();
    options_.masks = (folder_ / "masks").string();
    options_.scale = 1;
  }

  void add(const std::string& name, int64_t width, int64_t height, int64_t channels,
           const Bytes& pixels) const {
    write_png((folder_ / name).string(), {width, height, channels, pixels});
  }
  /// 4 x 2 images a, b, c with masks of the values 0 and 255.
  void add_three() const {
    for (const std::string stem : {"a", "b", "c"}) {
      add("images/" + stem + ".png", 4, 2, 3, Bytes(24, static_cast<uint8_t>(stem[0])));
      add("masks/" + stem + "_mask.png", 4, 2, 1, {0, 0, 255, 255, 0, 0, 255, 255});
    }
  }
  std::string error() const {
    return error_of<DataError>([&] { ImageFolder{options_}; });
  }

  const TemporaryFolder temporary_{"image_folder"};
  const std::filesystem::path folder_ = temporary_.path();
  ImageFolderOptions options_;
};

TEST_F(ImageFolderTest, PairsByNameAndMapsValuesToClasses) {
  add_three();
  std::ofstream(folder_ / "images" / "notes.txt") << "no image";
  std::ofstream(folder_ / "images" / ".hidden.png") << "no image";
  const ImageFolder data(options_);
  EXPECT_EQ(data.size(), 3);
  EXPECT_THAT(data.mask_values(), ElementsAre(0, 255));
  const SegmentationSample sample = data.sample(1);
  EXPECT_TRUE(at::equal(sample.image, at::full({3, 2, 4}, 'b', at::kByte)));
  EXPECT_TRUE(at::equal(sample.mask, at::tensor({0, 0, 1, 1, 0, 0, 1, 1}, at::kByte).view({2, 4})));
}

TEST_F(ImageFolderTest, MaskValuesMayBeGivenOrColours) {
  add_three();
  options_.mask_values = {255, 0};
  options_.verify = false;
  EXPECT_EQ(ImageFolder(options_).sample(0).mask[0][0].item<int>(), 1) << "the order is that of the classes";
  options_.mask_values = {0, 7};
  EXPECT_THAT(error_of<DataError>([&] { ImageFolder(options_).sample(0); }),
              HasSubstr("a_mask.png: has the value 255; expected one of 0, 7"));
  options_.verify = true;
  EXPECT_THAT(error(), HasSubstr("a_mask.png: has the value 255; expected data.mask_values, 0, 7"))
      << "found beforehand";

  options_.mask_values = {};
  for (const char* stem : {"a", "b", "c"})
    add(std::string("masks/") + stem + "_mask.png", 4, 2, 3,
        {9, 8, 7, 9, 8, 7, 0, 0, 1, 0, 0, 1, 9, 8, 7, 9, 8, 7, 0, 0, 1, 0, 0, 1});
  const ImageFolder colours(options_);
  EXPECT_THAT(colours.mask_values(), ElementsAre(1, 9 * 65536 + 8 * 256 + 7));
  EXPECT_TRUE(at::equal(colours.sample(2).mask[0], at::tensor({1, 1, 0, 0}, at::kByte)));
}

TEST_F(ImageFolderTest, ScaleAndSize) {
  add_three();
  options_.scale = 0.5;
  const ImageFolder half(options_);
  EXPECT_EQ(half.height(), 1);
  EXPECT_EQ(half.width(), 2);
  EXPECT_TRUE(at::equal(half.sample(0).mask, at::tensor({0, 1}, at::kByte).view({1, 2})));
  EXPECT_EQ(half.sample(0).image.sizes(), (at::IntArrayRef{3, 1, 2}));
  options_.scale = 0.3;
  EXPECT_THAT(error(), HasSubstr("with data.scale 0.3 nothing would be left"));
  options_.size = {6, 8};
  add("images/b.png", 3, 3, 4, Bytes(36, 50));  // sizes may differ then, and transparency is ignored
  add("masks/b_mask.png", 3, 3, 1, Bytes(9, 255));
  add("images/c.png", 4, 2, 1, Bytes(8, 60));  // grey
  const ImageFolder resized(options_);
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(resized.sample(i).image.sizes(), (at::IntArrayRef{3, 6, 8}));
  EXPECT_TRUE(resized.sample(1).image.eq(50).all().item<bool>());
  EXPECT_TRUE(resized.sample(1).mask.eq(1).all().item<bool>());
  EXPECT_TRUE(resized.sample(2).image.eq(60).all().item<bool>());
}

TEST_F(ImageFolderTest, PairsThatAreNoneAreNamed) {
  EXPECT_THAT(error(), HasSubstr("images: has no PNG or JPEG files"));
  add_three();
  std::filesystem::remove(folder_ / "masks" / "b_mask.png");
  EXPECT_THAT(error(), AllOf(HasSubstr("b.png: has no mask; expected "),
                             HasSubstr("b_mask.png, .jpg or .jpeg"), Not(HasSubstr("found"))));
  std::ofstream(folder_ / "masks" / "b_mask.gif") << "GIF89a";
  EXPECT_THAT(error(), HasSubstr("found b_mask.gif, which is neither"));
  std::filesystem::remove(folder_ / "images" / "b.png");
  EXPECT_EQ(error(), "");
  std::filesystem::remove(folder_ / "images" / "c.png");
  EXPECT_THAT(error(),
              AllOf(HasSubstr("c_mask.png: is the mask of no image"), HasSubstr("data.mask_suffix")));
  options_.mask_suffix = "_maske";
  EXPECT_THAT(error(), HasSubstr("a_maske.png, .jpg or .jpeg"));
  std::ofstream(folder_ / "images" / "a.JPG") << "another a";
  EXPECT_THAT(error(),
              AllOf(HasSubstr("a.png: has the same name as "), HasSubstr("a.JPG but for the ending")));
  options_.masks = (folder_ / "nowhere").string();
  std::filesystem::remove(folder_ / "images" / "a.JPG");
  EXPECT_THAT(
      error(),
      HasSubstr("nowhere: cannot be read: No such file or directory; expected a folder (data.masks)"));
}

TEST_F(ImageFolderTest, ContentThatDoesNotFitIsNamed) {
  add_three();
  add("masks/b_mask.png", 4, 3, 1, Bytes(12, 0));
  EXPECT_THAT(error(),
              AllOf(HasSubstr("b_mask.png: has 4 x 3 pixels, but its image "), HasSubstr("b.png has 4 x 2")));
  add("images/b.png", 4, 3, 3, Bytes(36, 0));
  EXPECT_THAT(error(), AllOf(HasSubstr("b.png: has 4 x 3 pixels, but "), HasSubstr("a.png has 4 x 2"),
                             HasSubstr("data.size")));
  add("images/b.png", 4, 2, 3, Bytes(24, 0));
  add("masks/b_mask.png", 4, 2, 1, {0, 1, 2, 3, 0, 0, 255, 255});
  EXPECT_THAT(error(), AllOf(HasSubstr("its masks have 5 values (0, 1, 2, 3, 255); expected at most 2"),
                             HasSubstr("model.num_classes")));
  options_.num_classes = 6;
  EXPECT_THAT(error(), HasSubstr("masks have 5 values (0, 1, 2, 3, 255) for 6 classes (model.num_classes); "
                                 "expected data.mask_values"));
  options_.mask_values = {0, 1, 2, 3, 4, 255};
  EXPECT_EQ(error(), "") << "a class may be absent";
  options_.mask_values = {};
  add("masks/b_mask.png", 4, 2, 3, Bytes(24, 0));
  EXPECT_THAT(error(), HasSubstr("b_mask.png: has 3 channels, but "));
  std::ofstream(folder_ / "masks" / "b_mask.png") << "text";
  std::ofstream(folder_ / "images" / "c.png") << "text";
  EXPECT_THAT(error(), HasSubstr("b_mask.png: is neither PNG nor JPEG"))
      << "the first in order, on any number of threads";
  std::filesystem::resize_file(folder_ / "images" / "a.png", 60);
  EXPECT_THAT(error(), HasSubstr("a.png: damaged PNG: "));
}

}  // namespace
}  // namespace tessera::examples
