// What the tests of SpillFile share: aligned memory, the ways it can work, and its file seen from outside.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <string>

#include "core/async_io/spill_file.h"
#include "core/files/file_descriptor.h"

namespace tessera::testing {

inline constexpr int64_t kBlock = SpillFile::kAlignment;

/// Memory at a multiple of SpillFile::kAlignment, filled with `value`.
class AlignedMemory {
 public:
  explicit AlignedMemory(int64_t bytes, int value = 0)
      : bytes_(static_cast<size_t>(bytes)),
        data_(static_cast<std::byte*>(std::aligned_alloc(kBlock, bytes_)), &std::free) {
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get(), value, bytes_);
  }

  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  std::span<std::byte> part(int64_t offset, int64_t bytes) const {
    return span().subspan(static_cast<size_t>(offset), static_cast<size_t>(bytes));
  }
  bool operator==(const AlignedMemory& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_.get(), other.data_.get(), bytes_) == 0;
  }

 private:
  size_t bytes_;
  std::unique_ptr<std::byte, decltype(&std::free)> data_;
};

template <class Random>
void fill_random(std::span<std::byte> bytes, Random& random) {
  for (size_t at = 0; at + sizeof(uint64_t) <= bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }
}

/// The descriptor of this process's open file without a name in `directory`; -1: there is none.
inline int descriptor_in(const std::filesystem::path& directory) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (!error && target.starts_with(directory.string() + "/") && target.ends_with(" (deleted)"))
      return std::stoi(entry.path().filename().string());
  }
  return -1;
}

/// Each test is run with O_DIRECT and without.
class SpillFileTest : public ::testing::TestWithParam<bool> {
 protected:
  SpillFileOptions options(const std::filesystem::path& directory, int64_t bytes) const {
    SpillFileOptions options;
    options.directory = directory.string();
    options.bytes = bytes;
    options.purpose = "optimizer state of rank 3";
    options.direct = GetParam();
    return options;
  }
};

#define TESSERA_BOTH_WAYS(Suite)                           \
  INSTANTIATE_TEST_SUITE_P(Ways, Suite, ::testing::Bool(), \
                           [](const auto& info) { return info.param ? "direct" : "buffered"; })

}  // namespace tessera::testing
