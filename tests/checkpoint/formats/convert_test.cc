// Conversion between the types of files, against arithmetic in double.
#include "checkpoint/formats/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

namespace tessera::checkpoint {
namespace {

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values, DType from, DType to) {
  std::vector<To> out(values.size());
  convert(std::as_bytes(std::span(values)), from, std::as_writable_bytes(std::span(out)), to);
  return out;
}

double value_of_half(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0x1f)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(Convert, EveryHalfIsExactInFp32AndComesBack) {
  std::vector<uint16_t> all(65'536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto floats = converted<float>(all, DType::kFloat16, DType::kFloat32);
  const auto back = converted<uint16_t>(floats, DType::kFloat32, DType::kFloat16);
  for (size_t i = 0; i < all.size(); ++i) {
    const double expected = value_of_half(all[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(floats[i]));
      ASSERT_EQ(back[i] & 0x7fff, 0x7e00);
    } else {
      ASSERT_EQ(back[i], all[i]);
      ASSERT_EQ(floats[i], expected) << i;
      ASSERT_EQ(std::signbit(floats[i]), std::signbit(expected)) << i;
    }
  }
}

TEST(Convert, EveryBf16IsExactInFp32AndComesBack) {
  std::vector<uint16_t> all(65'536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto floats = converted<float>(all, DType::kBFloat16, DType::kFloat32);
  const auto back = converted<uint16_t>(floats, DType::kFloat32, DType::kBFloat16);
  for (size_t i = 0; i < all.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &floats[i], 4);
    ASSERT_EQ(bits, static_cast<uint32_t>(i) << 16);
    if (std::isnan(floats[i]))
      ASSERT_EQ(back[i] & 0x7fc0, 0x7fc0);
    else
      ASSERT_EQ(back[i], all[i]);
  }
}

TEST(Convert, RoundsToTheNearestBf16AndTiesToEven) {
  std::mt19937 source(1);
  std::vector<uint32_t> bits = {0,          0x80000000, 0x00000001, 0x00008000, 0x00008001,
                                0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7fffff,
                                0x7f7f7fff, 0x7f7f8000, 0x7f800000, 0xff800000};
  for (int i = 0; i < 200'000; ++i) bits.push_back(source() % 3 ? source() : source() << 15);
  std::vector<float> values(bits.size());
  std::memcpy(values.data(), bits.data(), bits.size() * 4);
  const auto rounded = converted<uint16_t>(values, DType::kFloat32, DType::kBFloat16);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_EQ(rounded[i] & 0x7fff, 0x7fc0);
      continue;
    }
    // The two neighbours by magnitude. Infinity counts as 2^128, the next value after the largest finite one.
    const auto magnitude = [](uint32_t high) {
      float value;
      const uint32_t wide = high << 16;
      std::memcpy(&value, &wide, 4);
      return std::isinf(value) ? 0x1p128 : static_cast<double>(value);
    };
    const uint32_t below = (bits[i] & 0x7fffffff) >> 16;
    const double value = std::isinf(values[i]) ? 0x1p128 : std::fabs(static_cast<double>(values[i]));
    const double down = value - magnitude(below), up = below == 0x7f80 ? 1.0 : magnitude(below + 1) - value;
    const uint32_t expected = down < up ? below : up < down ? below + 1 : below + (below & 1);
    ASSERT_EQ(rounded[i], (bits[i] >> 16 & 0x8000) | expected) << std::hex << bits[i];
  }
}

TEST(Convert, Fp64GoesByWayOfFp32) {
  const std::vector<double> values = {
      1.0, -0.0, 0.1, 1e300, -1e300, 1e-300, 1.0 + 0x1p-8 + 0x1p-30, std::numeric_limits<double>::infinity()};
  const auto floats = converted<float>(values, DType::kFloat64, DType::kFloat32);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(floats[i], static_cast<float>(values[i]));
  EXPECT_TRUE(std::signbit(floats[1]));
  EXPECT_EQ(converted<uint16_t>(values, DType::kFloat64, DType::kBFloat16)[6], 0x3f80)
      << "a tie in fp32, so to even";
}

TEST(Convert, RoundsToTheNearestHalfAndTiesToEven) {
  std::vector<float> values;
  std::vector<uint16_t> expected;
  const auto add = [&](double value, uint16_t bits) {
    values.push_back(static_cast<float>(value)), expected.push_back(bits);
    values.push_back(static_cast<float>(-value)), expected.push_back(bits | 0x8000);
  };
  // Between each two neighbours: the middle rounds to the even one, other values to the nearer one. Infinity
  // counts as 65536, the next value after 65504, the largest finite one.
  for (uint16_t below = 0; below < 0x7c00; ++below) {
    const double low = value_of_half(below),
                 high = below == 0x7bff ? 65536 : value_of_half(static_cast<uint16_t>(below + 1));
    const double middle = (low + high) / 2, little = (high - low) / 1024;
    add(middle, static_cast<uint16_t>(below + (below & 1)));
    add(middle - little, below);
    add(middle + little, static_cast<uint16_t>(below + 1));
  }
  for (const double large : {65536.0, 1e9, 3e38}) add(large, 0x7c00);
  EXPECT_EQ(converted<uint16_t>(values, DType::kFloat32, DType::kFloat16), expected);
}

TEST(Convert, CountsWhatHasBecomeInfinite) {
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {1, 65504, 65519, 65520, -70000, 3.4e38f, infinity, -infinity, nan};
  std::vector<uint16_t> halves(values.size());
  const auto to = std::as_writable_bytes(std::span(halves));
  EXPECT_EQ(convert(std::as_bytes(std::span(values)), DType::kFloat32, to, DType::kFloat16), 3);
  EXPECT_EQ(convert(std::as_bytes(std::span(values)), DType::kFloat32, to, DType::kBFloat16), 1)
      << "3.4e38 is nearer to 2^128";
  const std::vector<double> wide = {1e300, -1e39, 1e38, 65520, std::numeric_limits<double>::infinity()};
  std::vector<float> floats(wide.size());
  EXPECT_EQ(convert(std::as_bytes(std::span(wide)), DType::kFloat64,
                    std::as_writable_bytes(std::span(floats)), DType::kFloat32),
            2);
  EXPECT_EQ(convert(std::as_bytes(std::span(wide)), DType::kFloat64, to.first(10), DType::kFloat16), 4);
}

TEST(Convert, OtherTypesAreMistakesOfOurs) {
  std::vector<std::byte> data(8);
  EXPECT_THROW(convert(std::span(data).first(4), DType::kInt32, std::span(data).last(4), DType::kFloat32),
               std::logic_error);
  EXPECT_THROW(convert(std::span(data).first(4), DType::kFloat32, std::span(data).last(4), DType::kInt32),
               std::logic_error);
  EXPECT_THROW(convert(std::span(data).first(4), DType::kFloat32, std::span(data).last(4), DType::kBFloat16),
               std::logic_error);
}

}  // namespace
}  // namespace tessera::checkpoint
