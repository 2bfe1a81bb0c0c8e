// Tensors of files: what is mapped, what is read, and mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "checkpoint/formats/model_writer.h"
#include "core/error.h"
#include "core/temporary_folder.h"
#include "examples/torchscript/tensor_file.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::examples {
namespace {

namespace fs = std::filesystem;
using checkpoint::ElementType;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

class TensorFileTest : public ::testing::Test {
 protected:
  /// "x": (5, 3) fp32, 0 to 14; "y": (5) int64, 100 to 104.
  fs::path write(const std::string& name) const {
    std::vector<float> x(15);
    std::iota(x.begin(), x.end(), 0.0f);
    std::vector<int64_t> y(5);
    std::iota(y.begin(), y.end(), 100);
    const Disk disk;
    const auto writer = checkpoint::open_model_writer(
        disk, {.format = *checkpoint::model_format_of(name),
               .path = folder_ / name,
               .tensors = {{.name = "x", .shape = {5, 3}, .type = ElementType::kFloat32, .aliases = {}},
                           {.name = "y", .shape = {5}, .type = ElementType::kInt64, .aliases = {}}}});
    writer->append(std::as_bytes(std::span(x)));
    writer->append(std::as_bytes(std::span(y)));
    writer->finish();
    return folder_ / name;
  }

  const TemporaryFolder temporary_{"tensor_file"};
  const std::filesystem::path folder_ = temporary_.path();
};

template <class T>
std::vector<T> values(const StoredTensor& tensor, size_t count) {
  std::vector<T> copy(count);
  std::memcpy(copy.data(), tensor.data.get(), count * sizeof(T));
  return copy;
}

void expect_contents(const StoredTensor& x, const StoredTensor& y) {
  EXPECT_EQ(x.type, ElementType::kFloat32);
  EXPECT_EQ(x.shape, (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(values<float>(x, 15), (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}));
  EXPECT_EQ(y.type, ElementType::kInt64);
  EXPECT_EQ(y.shape, (std::vector<int64_t>{5}));
  EXPECT_EQ(values<int64_t>(y, 5), (std::vector<int64_t>{100, 101, 102, 103, 104}));
}

TEST_F(TensorFileTest, BothFormatsAreMappedAndOutliveTheFile) {
  for (const char* name : {"a.safetensors", "a.h5"}) {
    const fs::path path = write(name);
    StoredTensor x, y;
    {
      const TensorFile file(path);
      x = file.tensor("x");
      y = file.tensor("y");
    }
    fs::remove(path);
    EXPECT_TRUE(x.mapped && y.mapped) << name;
    expect_contents(x, y);
  }
}

TEST_F(TensorFileTest, WhatIsNotAlignedIsMappedToo) {
  const fs::path path = write("a.safetensors");
  std::string content = read_text(path);
  uint64_t length = 0;
  std::memcpy(&length, content.data(), sizeof length);
  content.insert(8 + length, " ");  // one more byte of header
  ++length;
  std::memcpy(content.data(), &length, sizeof length);
  std::ofstream(folder_ / "odd.safetensors", std::ios::binary) << content;
  const TensorFile file(folder_ / "odd.safetensors");
  EXPECT_TRUE(file.tensor("x").mapped);
  expect_contents(file.tensor("x"), file.tensor("y"));
}

TEST_F(TensorFileTest, MistakesNameFileAndTensor) {
  for (const char* name : {"a.safetensors", "a.h5"}) {
    const fs::path path = write(name);
    EXPECT_THAT(error_of<DataError>([&] { TensorFile(path).tensor("z"); }),
                HasSubstr(path.string() + ": has no tensor 'z'; it holds 'x', 'y'"));
    EXPECT_THAT(error_of<DataError>([&] { TensorFile(path).tensor(""); }), HasSubstr("has no tensor ''"));
    const fs::path missing = folder_ / "no" / name;
    EXPECT_THAT(error_of<DataError>([&] { TensorFile{missing}; }),
                AllOf(HasSubstr(missing.string()), HasSubstr("No such file or directory")));
    EXPECT_THAT(error_of<DataError>([&] { TensorFile{folder_}; }), HasSubstr("expected a .safetensors, .h5 or .hdf5 file"));
    fs::resize_file(path, 100);
    EXPECT_THAT(error_of<DataError>([&] { TensorFile{path}; }), HasSubstr(path.string()));
    fs::resize_file(path, 0);
    EXPECT_THAT(error_of<DataError>([&] { TensorFile{path}; }), HasSubstr(path.string()));
  }
}

}  // namespace
}  // namespace tessera::examples
