// PNG and JPEG files: what is written, and damaged ones. segmentation_libraries_test.py owns what is in a
// file, beside Pillow.
#include "examples/segmentation/image_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/examples/segmentation/image_bytes.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ImageFileTest : public ::testing::Test {
 protected:
  std::string write(const Bytes& bytes, const std::string& name = "image") const {
    const std::string path = (folder_ / name).string();
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return path;
  }
  std::string read_error(const Bytes& bytes) const {
    const std::string path = write(bytes);
    const std::string error = error_of<DataError>([&] { read_image(path); });
    EXPECT_TRUE(error.empty() || error.starts_with(path + ": ")) << error;
    EXPECT_THAT(error, Not(HasSubstr("\n")));
    return error;
  }
  const TemporaryFolder temporary_{"image_file"};
  const std::filesystem::path folder_ = temporary_.path();
};

Bytes counting(size_t count) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(7 * i + i / 5);
  return bytes;
}

TEST_F(ImageFileTest, WhatIsWrittenIsRead) {
  for (const int64_t channels : {1, 3, 4}) {
    const Image image{5, 3, channels, counting(static_cast<size_t>(15 * channels))};
    const std::string path = (folder_ / "written.png").string();
    write_png(path, image);
    write_png(path, image);  // replaces it
    const Image read = read_image(path);
    EXPECT_EQ(read.width, 5);
    EXPECT_EQ(read.height, 3);
    EXPECT_EQ(read.channels, channels);
    EXPECT_EQ(read.pixels, image.pixels);
    const Image header = read_image_header(path);
    EXPECT_EQ(header.width * header.height * header.channels, 15 * channels);
    EXPECT_TRUE(header.pixels.empty());
  }
  EXPECT_THAT(
      error_of<DataError>([&] { write_png((folder_ / "no" / "where.png").string(), {1, 1, 1, {0}}); }),
      HasSubstr("where.png"));
  EXPECT_THAT(
      error_of<DataError>([&] { write_png((folder_ / "grey_alpha.png").string(), {1, 1, 2, {0, 0}}); }),
      AllOf(HasSubstr("grey_alpha.png"), HasSubstr("2 channels; expected 1, 3 or 4")));
}

TEST_F(ImageFileTest, OtherDepthsBecomeBytes) {
  EXPECT_EQ(
      read_image(write(png_bytes({.width = 4, .height = 1, .depth = 1, .rows = {0, 0b10100000}}))).pixels,
      (Bytes{255, 0, 255, 0}));
  EXPECT_EQ(read_image(write(png_bytes({.width = 2, .height = 1, .depth = 4, .rows = {0, 0x3f}}))).pixels,
            (Bytes{0x33, 0xff}));
  EXPECT_EQ(read_image(
                write(png_bytes({.width = 2, .height = 1, .depth = 16, .rows = {0, 0x12, 0x00, 0xff, 0xff}})))
                .pixels,
            (Bytes{0x12, 0xff}));
  const Image grey_alpha = read_image(
      write(png_bytes({.width = 1, .height = 1, .depth = 8, .colour_type = 4, .rows = {0, 50, 60}})));
  EXPECT_EQ(grey_alpha.pixels, (Bytes{50, 50, 50, 60}));
}

TEST_F(ImageFileTest, WhatIsNoImageIsNamed) {
  EXPECT_THAT(error_of<DataError>([&] { read_image((folder_ / "none.png").string()); }),
              AllOf(HasSubstr("none.png: cannot be opened: No such file"), HasSubstr("expected")));
  EXPECT_THAT(error_of<DataError>([&] { read_image(folder_.string()); }),
              HasSubstr("Is a directory; expected"));
  EXPECT_THAT(read_error({}), HasSubstr("is empty"));
  EXPECT_THAT(read_error({'G', 'I', 'F', '8', '9', 'a'}), HasSubstr("neither PNG nor JPEG"));
  EXPECT_THAT(read_error(jpeg_bytes(8, 8, 4, Bytes(256, 9))), HasSubstr("4 components (CMYK has 4)"));
}

TEST_F(ImageFileTest, ShortFilesAreErrorsAtEveryLength) {
  Bytes noise(20 * 20 * 3);
  std::mt19937 random(1);
  for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
  write_png((folder_ / "whole.png").string(), {20, 20, 3, noise});
  std::ifstream file(folder_ / "whole.png", std::ios::binary);
  const Bytes png{std::istreambuf_iterator<char>(file), {}};
  ASSERT_EQ(read_error(png), "");
  const auto beginning = [](const Bytes& bytes, size_t size) {
    return Bytes(bytes.begin(), bytes.begin() + static_cast<int64_t>(size));
  };
  for (size_t size = 0; size < png.size(); size += 1 + size / 20)
    EXPECT_NE(read_error(beginning(png, size)), "") << size;
  for (const bool progressive : {false, true}) {
    const Bytes jpeg = jpeg_bytes(20, 20, 3, noise, progressive);
    ASSERT_EQ(read_error(jpeg), "");
    // Without the last two bytes only the end marker is missing.
    for (size_t size = 0; size + 3 < jpeg.size(); size += 1 + size / 20)
      EXPECT_NE(read_error(beginning(jpeg, size)), "") << size;
  }
}

TEST_F(ImageFileTest, DamageIsAnErrorOrHarmlessAndNeverMore) {
  const Bytes noise = counting(16 * 16 * 3);
  const PngParts palette{.width = 3,
                         .height = 2,
                         .depth = 2,
                         .colour_type = 3,
                         .rows = {0, 0b00011000, 0, 0b10010000},
                         .palette = counting(9),
                         .transparency = {1}};
  const std::vector<Bytes> files = {png_bytes(palette), jpeg_bytes(16, 16, 3, noise),
                                    jpeg_bytes(16, 16, 3, noise, true), jpeg_bytes(16, 16, 1, noise)};
  std::mt19937 random(2);
  int num_errors = 0, num_tried = 0;
  for (const Bytes& whole : files) {
    for (int round = 0; round < 400; ++round, ++num_tried) {
      Bytes damaged = whole;
      for (uint32_t times = 1 + random() % 4; times > 0; --times)
        damaged[4 + random() % (damaged.size() - 4)] = static_cast<uint8_t>(random());
      num_errors += read_error(damaged) != "";
    }
  }
  EXPECT_GT(num_errors, num_tried / 3);
}

TEST_F(ImageFileTest, SizesThatLieCostNothing) {
  EXPECT_THAT(read_error(png_bytes({.width = 100000, .height = 100000, .rows = {0}})),
              HasSubstr("header says 100000 x 100000 pixels; expected at least 1 and at most 67108864"));
  EXPECT_THAT(read_error(png_bytes({.width = 0x7fffffff, .height = 0x7fffffff, .rows = {0}})),
              HasSubstr("at most 67108864"));
  EXPECT_THAT(read_error(png_bytes({.width = 8000, .height = 8000, .rows = {0}})),
              HasSubstr("more than 66 compressed bytes can hold"));
  EXPECT_NE(read_error(png_bytes({.width = 0, .height = 4, .rows = {0}})), "");
  EXPECT_THAT(read_error(png_bytes({.width = 4, .height = 4, .rows = {0, 1, 2, 3, 4}})),
              HasSubstr("damaged PNG: "));
  Bytes jpeg = jpeg_bytes(16, 16, 1, counting(256));
  for (size_t i = 0; i + 8 < jpeg.size(); ++i) {
    if (jpeg[i] == 0xff && jpeg[i + 1] == 0xc0) {  // the frame header: height and width
      for (size_t place = i + 5; place < i + 9; ++place) jpeg[place] = 0xfe;
      break;
    }
  }
  EXPECT_THAT(read_error(jpeg), HasSubstr("header says 65278 x 65278 pixels"));
}

}  // namespace
}  // namespace tessera::examples
