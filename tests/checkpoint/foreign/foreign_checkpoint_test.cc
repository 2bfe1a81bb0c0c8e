// Runs of tensors in files, their elements, and what check() complains of.
#include "checkpoint/foreign/foreign_checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <numeric>

#include "checkpoint/checkpoint_error.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using Shape = std::vector<int64_t>;
using Runs = std::vector<Run>;  // a test of GoogleTest has a Run of its own
using ::tessera::testing::error_of;

/// A file whose n-th element of four bytes is n.
class Files : public ::testing::Test {
 protected:
  std::filesystem::path make(const std::string& name, int64_t elements) {
    std::vector<int32_t> values(static_cast<size_t>(elements));
    std::iota(values.begin(), values.end(), 0);
    std::ofstream(folder_.path() / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), elements * 4);
    return folder_.path() / name;
  }

  static std::vector<int32_t> read(const ForeignFiles& files, const ForeignTensor& tensor, int64_t begin,
                                   int64_t numel) {
    std::vector<int32_t> out(static_cast<size_t>(numel), -1);
    files.read(tensor, begin, std::as_writable_bytes(std::span(out)));
    return out;
  }

  TemporaryFolder folder_{"tessera_foreign"};
};

/// What the elements of a tensor with these strides would be in Files' file.
std::vector<int32_t> expected(const Shape& shape, const Shape& strides, int64_t offset) {
  std::vector<int32_t> out = {static_cast<int32_t>(offset)};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int32_t> next;
    for (const int32_t from : out)
      for (int64_t i = 0; i < shape[d]; ++i) next.push_back(from + static_cast<int32_t>(i * strides[d]));
    out = next;
  }
  return out;
}

TEST_F(Files, StridedTensorsAreReadFromEveryElementOn) {
  const struct {
    Shape shape, strides;
    size_t runs;
  } cases[] = {{{3, 4, 5}, {20, 5, 1}, 1},
               {{}, {}, 1},
               {{7}, {1}, 1},
               {{4, 3}, {1, 4}, 3},
               {{2, 3, 4}, {1, 2, 6}, 6},
               {{5, 3}, {6, 1}, 1},
               {{2, 3, 2, 2}, {12, 1, 6, 3}, 6},
               {{3, 4}, {0, 1}, 1},
               {{6}, {0}, 1},
               {{1, 5, 1}, {99, 2, 77}, 1},
               {{4, 1, 6}, {6, 1, 1}, 1}};
  const ForeignFiles files({make("a", 200)});
  for (const auto& one : cases) {
    const ForeignTensor tensor{DType::kInt32, one.shape,
                               runs_of_strided(0, 12, DType::kInt32, one.shape, one.strides)};
    EXPECT_EQ(tensor.runs.size(), one.runs) << ::testing::PrintToString(one.shape);
    const std::vector<int32_t> all = expected(one.shape, one.strides, 3);
    for (int64_t begin = 0; begin <= tensor.numel(); ++begin)
      for (int64_t end = begin; end <= tensor.numel(); ++end)
        EXPECT_EQ(read(files, tensor, begin, end - begin),
                  std::vector<int32_t>(all.begin() + begin, all.begin() + end));
  }
}

TEST_F(Files, BoxesOfManyFilesMakeATensor) {
  // A tensor of [4, 5, 6], cut at 2 of the first dimension, 3 of the second and 1 of the third.
  const Shape shape = {4, 5, 6};
  std::vector<std::filesystem::path> paths;
  ForeignTensor tensor{DType::kInt32, shape, {}};
  std::vector<int32_t> wanted(120);
  for (const auto& [a, a_size] : {std::pair{0, 2}, {2, 2}})
    for (const auto& [b, b_size] : {std::pair{0, 3}, {3, 2}})
      for (const auto& [c, c_size] : {std::pair{0, 1}, {1, 5}}) {
        const auto file = static_cast<int>(paths.size());
        paths.push_back(make(std::to_string(file), 60));
        const Shape sizes = {a_size, b_size, c_size}, strides = {b_size * c_size, c_size, 1};
        for (const checkpoint::Run& run :
             runs_of_box(file, 4 * file, DType::kInt32, shape, {a, b, c}, sizes, strides))
          tensor.runs.push_back(run);
        for (int i = 0; i < a_size; ++i)
          for (int j = 0; j < b_size; ++j)
            for (int k = 0; k < c_size; ++k)
              wanted[static_cast<size_t>((a + i) * 30 + (b + j) * 6 + c + k)] =
                  (i * b_size + j) * c_size + k + file;
      }
  std::reverse(tensor.runs.begin(), tensor.runs.end());  // in no order
  const ForeignFiles files(paths);
  for (int64_t begin = 0; begin < 120; begin += 7)
    EXPECT_EQ(read(files, tensor, begin, 120 - begin),
              std::vector<int32_t>(wanted.begin() + begin, wanted.end()));
  ForeignCheckpoint checkpoint;
  checkpoint.path = "folder";
  checkpoint.files = paths;
  checkpoint.buffers.emplace_back("whole", tensor);
  EXPECT_NO_THROW(check(checkpoint));
  checkpoint.buffers[0].second.runs.pop_back();
  EXPECT_NE(error_of<CheckpointError>([&] { check(checkpoint); }).find("no file has element"),
            std::string::npos);
}

TEST_F(Files, MoreFilesThanMayBeOpen) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit few{100, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<std::filesystem::path> paths;
  ForeignTensor tensor{DType::kInt32, {500}, {}};
  for (int i = 0; i < 500; ++i) {
    paths.push_back(make(std::to_string(i), 1));
    tensor.runs.push_back({.file = i, .offset = 0, .begin = i, .numel = 1});
  }
  const ForeignFiles files(paths);
  EXPECT_EQ(read(files, tensor, 0, 500), std::vector<int32_t>(500, 0));
  EXPECT_EQ(read(files, tensor, 3, 2), std::vector<int32_t>(2, 0));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(Files, AFileThatEndsEarly) {
  const ForeignFiles files({make("short", 10)});
  const ForeignTensor tensor{DType::kInt32, {20}, {{.file = 0, .offset = 0, .begin = 0, .numel = 20}}};
  const std::string error = error_of<CheckpointError>([&] { read(files, tensor, 0, 20); });
  EXPECT_NE(error.find("short ends at byte 40; expected 80"), std::string::npos) << error;
  EXPECT_THROW(read(files, tensor, 15, 6), std::logic_error);
}

TEST_F(Files, StridesAndBoxesThatCannotBe) {
  EXPECT_THROW(runs_of_strided(0, 0, DType::kInt32, {2, 2}, {1, -1}), CheckpointError);
  EXPECT_THROW(runs_of_box(0, 0, DType::kInt32, {4}, {2}, {3}, {1}), CheckpointError);
  EXPECT_THROW(runs_of_strided(0, 0, DType::kInt32, {1 << 30, 1 << 30, 1 << 30}, {1, 1, 1}), CheckpointError);
  EXPECT_THROW(runs_of_strided(0, 0, DType::kInt32, {5000, 5000, 5000}, {1, 3, 2}), CheckpointError);
  EXPECT_TRUE(runs_of_strided(0, 0, DType::kInt32, {3, 0}, {5, 1}).empty());
}

/// What check() says of a tensor [10] with these runs of a file of 20 elements.
class Check : public Files {
 protected:
  std::string complaint(Runs runs, const Shape& shape = {10}) {
    ForeignCheckpoint checkpoint;
    checkpoint.path = "folder";
    checkpoint.files = {make("file", 20)};
    checkpoint.parameters.emplace_back();
    checkpoint.parameters[0].name = "w";
    checkpoint.parameters[0].weights = {DType::kInt32, shape, std::move(runs)};
    return error_of<CheckpointError>([&] { check(checkpoint); });
  }
};

TEST_F(Check, RunsThatDoNotFit) {
  EXPECT_EQ(complaint({{.begin = 0, .numel = 4}, {.begin = 5, .numel = 5}}),
            "folder: parameter 'w': no file has element 4 of 10; expected each once");
  EXPECT_EQ(complaint({{.begin = 0, .numel = 7}, {.begin = 5, .numel = 5}}),
            "folder: parameter 'w': the files have elements 5 to 6 of 10 twice; expected each once");
  EXPECT_EQ(complaint({{.begin = 0, .numel = 9}}),
            "folder: parameter 'w': no file has element 9 of 10; expected each once");
  EXPECT_EQ(complaint({}), "folder: parameter 'w': no file has elements 0 to 9 of 10; expected each once");
  EXPECT_NE(complaint({{.begin = 0, .numel = 11}}).find("elements up to 11; expected 10"), std::string::npos);
  EXPECT_NE(complaint({{.offset = 41, .begin = 0, .numel = 10}}).find("which has 80 bytes; expected 81"),
            std::string::npos);
  EXPECT_NE(complaint({{.file = 1, .begin = 0, .numel = 10}}).find("file 1 of 1"), std::string::npos);
  EXPECT_NE(complaint({{.offset = -4, .begin = 0, .numel = 10}}).find("rows that do not overlap"),
            std::string::npos);
  // Two rows of five that begin four apart.
  EXPECT_NE(
      complaint({{.begin = 0, .numel = 5, .rows = 2, .tensor_step = 4, .file_step = 20}}).find("4 apart"),
      std::string::npos);
  EXPECT_NE(
      complaint(
          {{.begin = 0, .numel = 1, .rows = INT64_MAX, .tensor_step = INT64_MAX, .file_step = INT64_MAX}})
          .find("elements up to"),
      std::string::npos);
  EXPECT_NE(complaint({}, {-1}).find("sizes from 0 on"), std::string::npos);
  EXPECT_NE(complaint({}, {1 << 30, 1 << 30, 1 << 30}).find("too large"), std::string::npos);
}

TEST_F(Check, RowsThatAreWoven) {
  // Columns 0 and 1, 2 to 3 and 4 of rows of five.
  ForeignCheckpoint checkpoint;
  checkpoint.path = "folder";
  checkpoint.files = {make("file", 20)};
  checkpoint.buffers.emplace_back(
      "b", ForeignTensor{DType::kInt32,
                         {2, 5},
                         {{.begin = 4, .numel = 1, .rows = 2, .tensor_step = 5, .file_step = 4},
                          {.begin = 0, .numel = 2, .rows = 2, .tensor_step = 5, .file_step = 8},
                          {.begin = 2, .numel = 2, .rows = 2, .tensor_step = 5, .file_step = 8}}});
  EXPECT_NO_THROW(check(checkpoint));
  checkpoint.buffers[0].second.runs[0].rows = 1;
  EXPECT_EQ(error_of<CheckpointError>([&] { check(checkpoint); }),
            "folder: buffer 'b': no file has element 9 of 10; expected each once");
}

TEST_F(Check, NamesAndShapes) {
  ForeignCheckpoint checkpoint;
  checkpoint.path = "folder";
  checkpoint.files = {make("file", 20)};
  checkpoint.parameters.resize(1);
  ForeignParameter& one = checkpoint.parameters[0];
  one.name = "w";
  one.weights = {DType::kInt32, {2, 5}, {{.begin = 0, .numel = 10}}};
  one.states["exp_avg"] = {DType::kInt32, {10}, {{.begin = 0, .numel = 10}}};
  EXPECT_EQ(error_of<CheckpointError>([&] { check(checkpoint); }),
            "folder: parameter 'w', state 'exp_avg': has the shape [10]; expected that of the parameter, "
            "[2, 5]");
  one.states["exp_avg"].shape = {2, 5};
  EXPECT_NO_THROW(check(checkpoint));
  one.aliases = {"w"};
  EXPECT_NE(error_of<CheckpointError>([&] { check(checkpoint); }).find("is there twice"), std::string::npos);
  one.aliases.clear();
  checkpoint.groups.resize(1);
  one.group = 1;
  EXPECT_NE(error_of<CheckpointError>([&] { check(checkpoint); }).find("of group 1; there are 1 groups"),
            std::string::npos);
  one.group = 0;
  checkpoint.files = {folder_.path() / "none"};
  EXPECT_NE(error_of<CheckpointError>([&] { check(checkpoint); }).find("none: cannot be read"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::checkpoint
