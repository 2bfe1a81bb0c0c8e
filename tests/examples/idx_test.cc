#include "examples/fashion_mnist/idx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "core/error.h"
#include "tests/examples/idx_files.h"

namespace tessera::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<int64_t> kShape = {kAnySize, 28, 28};

class IdxTest : public IdxFolderTest {
 protected:
  std::string error_of(const Bytes& bytes, const std::vector<int64_t>& shape = kShape) const {
    const std::string path = write("file", bytes);
    try {
      read_idx(path, shape);
    } catch (const DataError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.rfind(path + ": ", 0), 0u) << "the file comes first: " << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
      return text;
    }
    return "accepted";
  }
};

Bytes images(uint32_t count) { return idx_bytes({count, 28, 28}, counting(count * 784)); }

TEST_F(IdxTest, ReadsPlainAndCompressed) {
  for (uint32_t count : {1u, 3u, 700u}) {  // 700 images are more than one block
    for (const Bytes& bytes : {images(count), gzipped(images(count))}) {
      const IdxArray array = read_idx(write("file", bytes), kShape);
      EXPECT_EQ(array.shape, (std::vector<int64_t>{count, 28, 28}));
      EXPECT_EQ(Bytes(array.values.begin(), array.values.end()), counting(count * 784));
    }
  }
  const IdxArray labels = read_idx(write("labels", idx_bytes({5}, {9, 8, 7, 6, 5})), {kAnySize});
  EXPECT_THAT(labels.values, testing::ElementsAre(9, 8, 7, 6, 5));
}

TEST_F(IdxTest, APlainFileIsSharedAndACompressedOneRead) {
  const std::string plain = write("plain", images(3)), compressed = write("compressed", gzipped(images(3)));
  const IdxArray mapped = read_idx(plain, kShape), read = read_idx(compressed, kShape);
  for (const std::string& path : {plain, compressed}) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(16);
    file.put(77);
  }
  EXPECT_EQ(mapped.values[0], 77) << "the file itself";
  EXPECT_EQ(read.values[0], counting(1)[0]);
}

TEST_F(IdxTest, Missing) {
  const std::string path = (folder_ / "nowhere").string();
  try {
    read_idx(path, kShape);
    FAIL();
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr(path), HasSubstr("No such file"), HasSubstr("expected an IDX file")));
  }
  EXPECT_THROW(read_idx(folder_.string(), kShape), DataError) << "a folder";
}

TEST_F(IdxTest, Truncated) {
  const std::string expected = "expected 2352 bytes of values, found 2351";
  Bytes bytes = images(3);
  bytes.pop_back();
  EXPECT_THAT(error_of(bytes), AllOf(HasSubstr("truncated"), HasSubstr("3 x 28 x 28"), HasSubstr(expected)));
  EXPECT_THAT(error_of(gzipped(bytes)), HasSubstr(expected));

  Bytes compressed = gzipped(images(3));
  compressed.resize(compressed.size() / 2);
  EXPECT_THAT(error_of(compressed), HasSubstr("truncated: the gzip stream ends in the middle"));
  compressed = gzipped(images(3));
  compressed.pop_back();  // within the checksum at its end
  EXPECT_THAT(error_of(compressed), HasSubstr("truncated"));

  EXPECT_THAT(error_of({}), HasSubstr("ends before its 4-byte IDX header"));
  EXPECT_THAT(error_of({0, 0, 8, 3, 0, 0}), HasSubstr("ends within its IDX header"));
}

TEST_F(IdxTest, TrailingBytes) {
  Bytes bytes = images(3);
  bytes.push_back(0);
  EXPECT_THAT(error_of(bytes), AllOf(HasSubstr("trailing bytes"), HasSubstr("expected 2352")));
  EXPECT_THAT(error_of(gzipped(bytes)), HasSubstr("trailing bytes"));
  bytes = gzipped(images(3));
  bytes.push_back('x');
  EXPECT_THAT(error_of(bytes), HasSubstr("bytes after the end of the gzip stream"));
}

TEST_F(IdxTest, OtherKindsOfFiles) {
  const std::string text = "<!DOCTYPE html><html>404</html>";
  EXPECT_THAT(error_of(Bytes(text.begin(), text.end())),
              AllOf(HasSubstr("starts with 0x3c21444f, not with 0x00000803"),
                    HasSubstr("unsigned bytes of shape N x 28 x 28")));
  EXPECT_THAT(error_of(gzipped(Bytes(text.begin(), text.end()))), HasSubstr("(decompressed)"));
  EXPECT_THAT(error_of(idx_bytes({4}, counting(4))), HasSubstr("0x00000801, not with 0x00000803"))
      << "labels for images";
  EXPECT_THAT(error_of(images(2), {kAnySize}), HasSubstr("0x00000803, not with 0x00000801"))
      << "images for labels";
  EXPECT_THAT(error_of(idx_bytes({1, 28, 28}, counting(784 * 4), 0x0d)), HasSubstr("0x00000d03")) << "floats";
}

TEST_F(IdxTest, WrongShapes) {
  EXPECT_THAT(error_of(idx_bytes({1, 32, 32}, counting(1024))),
              AllOf(HasSubstr("found 1 x 32 x 32"), HasSubstr("expected N x 28 x 28")));
  EXPECT_THAT(error_of(idx_bytes({0, 28, 28}, {})), HasSubstr("impossible shape"));
}

TEST_F(IdxTest, ALyingHeaderAllocatesNothing) {
  // 4,294,967,295 images would be 3 TB; 5,000,000 are 3.9 GB, which is allowed but not in the file.
  EXPECT_THAT(error_of(idx_bytes({0xffffffffu, 28, 28}, counting(10))), HasSubstr("impossible shape"));
  EXPECT_THAT(error_of(idx_bytes({5'000'000u, 28, 28}, counting(10))),
              AllOf(HasSubstr("truncated"), HasSubstr("found 10")));
}

TEST_F(IdxTest, DamagedGzip) {
  Bytes bytes = gzipped(images(3));
  bytes[bytes.size() - 6] ^= 1;  // the checksum
  EXPECT_THAT(error_of(bytes),
              AllOf(HasSubstr("damaged: not a valid gzip stream"), HasSubstr("incorrect data check")));
}

// 5000 mutations of both forms: flips, cuts and insertions. Each is read correctly,
// or is a DataError.
TEST_F(IdxTest, NoMutationDoesWorseThanADataError) {
  std::mt19937 random(1);
  const auto below = [&](size_t bound) { return static_cast<size_t>(random() % bound); };
  const Bytes plain = images(2);
  const Bytes compressed = gzipped(plain);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    Bytes bytes = i % 2 == 0 ? plain : compressed;
    for (size_t flips = below(4); flips > 0; --flips) {
      const size_t at = below(2) == 0 ? below(20) : below(bytes.size());  // the headers matter most
      bytes[at] ^= static_cast<uint8_t>(1u << below(8));
    }
    if (below(4) == 0) bytes.resize(below(bytes.size()));
    if (below(8) == 0)
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1)),
                   static_cast<uint8_t>(random()));
    try {
      const IdxArray array = read_idx(write("mutant", bytes), kShape);
      ASSERT_EQ(array.shape.size(), 3u);
      ASSERT_EQ(static_cast<int64_t>(array.values.size()), array.shape[0] * 784);
    } catch (const DataError& error) {
      ++refused;
      ASSERT_THAT(error.what(), Not(HasSubstr("\n")));
    }
  }
  EXPECT_GT(refused, 2000);
  EXPECT_LT(refused, 5000);
}

}  // namespace
}  // namespace tessera::examples
