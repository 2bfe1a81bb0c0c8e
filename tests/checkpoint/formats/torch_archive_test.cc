// The arithmetic of torch's zip, on both sides of 4 GiB. That torch and Python
// read it is in python_libraries_test.py.
#include "checkpoint/formats/torch_archive.h"

#include <gtest/gtest.h>

namespace tessera::checkpoint {
namespace {

constexpr int64_t kLimit = 0xffffffff;

uint64_t number(std::string_view text, size_t at, size_t num_bytes) {
  uint64_t value = 0;
  for (size_t i = num_bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(text[at + i]);
  return value;
}

// The bytes of a whole archive, but for the data, at their places: offset -> text.
TEST(TorchZip, PiecesMeetWithoutGapOrOverlap) {
  for (const int64_t first : {int64_t{0}, kLimit - 100, kLimit + 100}) {
    TorchZip zip(first);
    for (const int64_t bytes : {int64_t{1}, int64_t{0}, int64_t{63}, int64_t{64}, kLimit - 1, kLimit,
                                int64_t{0}, kLimit * 5, int64_t{7}})
      zip.add("data/" + std::to_string(zip.entries().size()), bytes);
    const std::vector<uint32_t> crcs(zip.entries().size(), 0xabcdef01);
    int64_t position = first;
    for (size_t i = 0; i < zip.entries().size(); ++i) {
      const TorchZip::Entry& entry = zip.entries()[i];
      const std::string between = zip.between(i, 0xabcdef01);
      EXPECT_EQ(position + static_cast<int64_t>(between.size()), entry.data_offset);
      EXPECT_EQ(entry.data_offset % 64, 0);
      const auto header = static_cast<size_t>(entry.header_offset - position);
      EXPECT_EQ(between.substr(header, 4), "PK\3\4");
      const size_t name_bytes = number(between, header + 26, 2),
                   extra_bytes = number(between, header + 28, 2);
      EXPECT_EQ(between.substr(header + 30, name_bytes), entry.name);
      EXPECT_EQ(header + 30 + name_bytes + extra_bytes, between.size());
      position = zip.data_end(i);
    }
    EXPECT_EQ(zip.file_bytes(), position + static_cast<int64_t>(zip.tail(crcs).size()));
  }
}

TEST(TorchZip, CentralDirectorySaysWhereAndHowLarge) {
  TorchZip zip;
  zip.add("small", 10);
  zip.add("large", kLimit);
  zip.add("far", 3);
  const std::vector<uint32_t> crcs = {1, 2, 3};
  const std::string tail = zip.tail(crcs);
  size_t at = tail.find("PK\1\2");
  ASSERT_EQ(at, 24u) << "the descriptor of an entry beyond 4 GiB has 64-bit sizes";
  for (size_t i = 0; i < 3; ++i) {
    const TorchZip::Entry& entry = zip.entries()[i];
    ASSERT_EQ(tail.substr(at, 4), "PK\1\2");
    EXPECT_EQ(number(tail, at + 16, 4), crcs[i]);
    const bool large = entry.bytes >= kLimit, far = entry.header_offset >= kLimit;
    EXPECT_EQ(number(tail, at + 20, 4), large ? 0xffffffffu : static_cast<uint64_t>(entry.bytes));
    EXPECT_EQ(number(tail, at + 24, 4), large ? 0xffffffffu : static_cast<uint64_t>(entry.bytes));
    EXPECT_EQ(number(tail, at + 42, 4), far ? 0xffffffffu : static_cast<uint64_t>(entry.header_offset));
    const size_t name_bytes = number(tail, at + 28, 2), extra_bytes = number(tail, at + 30, 2);
    EXPECT_EQ(extra_bytes, large ? 20u : far ? 12u : 0u);
    const size_t extra = at + 46 + name_bytes;
    if (large || far) {
      EXPECT_EQ(number(tail, extra + 4, 8), static_cast<uint64_t>(large ? entry.bytes : entry.header_offset));
    }
    at = extra + extra_bytes;
  }
  EXPECT_GT(zip.entries()[2].header_offset, kLimit);
  ASSERT_EQ(tail.substr(at, 4), "PK\6\6");
  EXPECT_EQ(number(tail, at + 24, 8), 3u);
  const uint64_t directory_offset = number(tail, at + 48, 8);
  EXPECT_EQ(directory_offset, static_cast<uint64_t>(zip.data_end(2)) + 24);
  EXPECT_EQ(number(tail, at + 40, 8), at - 24);
  EXPECT_EQ(number(tail, at + 56 + 8, 8), directory_offset + at - 24);
  EXPECT_EQ(tail.size(), at + 56 + 20 + 22);
}

}  // namespace
}  // namespace tessera::checkpoint
