// Files of torch.save, put together by hand and written by ours. That torch's are read as torch reads them is
// in torch_file_library_test.py, damaged and hostile ones are in hostile_pickles_test.py.
#include "checkpoint/formats/torch_file.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/formats/torch_file_testing.h"

namespace tessera::checkpoint {
namespace {

TEST(TorchFile, ReadsBothFormats) {
  const TestFolder folder;
  const std::string data = "0123456789abcdef";
  const std::filesystem::path path = folder / "a.pt";
  for (const std::string& content : {torch_archive(proto(small_tensor()), {{"0", data}}),
                                     torch_archive(proto(small_tensor()), {{"0", data}}, false),
                                     legacy_file(proto(small_tensor()), 4, data)}) {
    write_text(path, content);
    EXPECT_TRUE(TorchFile::recognizes(path));
    const TorchFile file(path);
    const auto tensor = file.tensor(file.root());
    ASSERT_TRUE(tensor.has_value());
    EXPECT_EQ(tensor->type, DType::kFloat32);
    EXPECT_EQ(tensor->shape, (std::vector<int64_t>{2, 2}));
    EXPECT_EQ(tensor->strides, (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(content.substr(static_cast<size_t>(tensor->offset), 16), data);
    EXPECT_EQ(tensor->storage, "0");
    EXPECT_TRUE(tensor->is_contiguous());
    EXPECT_FALSE(tensor->is_parameter || tensor->requires_grad);
    EXPECT_FALSE(file.tensor(*file.root().callable).has_value());
  }
}

TEST(TorchFile, ReadsWhatOursWrites) {
  const TestFolder folder;
  ModelWriterOptions options;
  options.format = ModelFormat::kTorch;
  options.path = folder / "model.pt";
  options.tensors = small_model();
  write_model(Disk({.sync = false, .probe = {}}), options, 7);
  const TorchFile file(folder / "model.pt");
  EXPECT_TRUE(file.verify());
  for (const ModelTensor& expected : small_model()) {
    std::vector<std::string> names = expected.aliases;
    names.push_back(expected.name);
    for (const std::string& name : names) {
      const PickleValue* value = file.root().find(name);
      ASSERT_NE(value, nullptr) << name;
      const auto tensor = file.tensor(*value);
      ASSERT_TRUE(tensor.has_value()) << name;
      EXPECT_EQ(tensor->type, expected.type);
      EXPECT_EQ(tensor->shape, expected.shape);
      EXPECT_TRUE(lies_within(*tensor, file));
    }
  }
}

TEST(TorchFile, VerifyFindsDamage) {
  const TestFolder folder;
  std::string content = torch_archive(proto(small_tensor()), {{"0", "0123456789abcdef"}});
  content[content.find("789a")] ^= 1;
  write_text(folder / "a.pt", content);
  const TorchFile file(folder / "a.pt");
  EXPECT_NE(error_of<Error>([&] { file.verify(); }).find("entry 'archive/data/0' is damaged: its CRC-32 is"),
            std::string::npos);
}

// A mapping would end the process by a signal.
TEST(TorchFile, AFileThatIsCutWhileItIsReadIsAnError) {
  const TestFolder folder;
  const std::filesystem::path path = folder / "a.pt";
  const std::string data = "0123456789abcdef";
  for (const std::string& content :
       {torch_archive(proto(small_tensor()), {{"0", data}}), legacy_file(proto(small_tensor()), 4, data)}) {
    write_text(path, content);
    const TorchFile file(path);
    const TorchTensor tensor = file.tensor(file.root()).value();
    EXPECT_EQ(file.read(tensor.offset, 4), "0123");
    std::filesystem::resize_file(path, 100);
    EXPECT_NE(error_of<DiskError>([&] { file.read(tensor.offset, 4); }).find("a.pt"), std::string::npos);
    if (content.starts_with("PK")) {
      EXPECT_NE(error_of<DiskError>([&] { file.verify(); }).find("a.pt"), std::string::npos);
    }
  }
}

TEST(TorchFile, NamesOfTypes) {
  EXPECT_EQ(torch_dtype("torch.float32"), DType::kFloat32);
  EXPECT_EQ(torch_dtype("torch.bfloat16"), DType::kBFloat16);
  EXPECT_EQ(torch_dtype("torch.uint16"), DType::kUInt16);
  EXPECT_EQ(torch_dtype("torch.float8_e4m3fn"), DType::kFloat8E4m3fn);
  for (const char* other : {"torch.fp32", "torch.quint8", "float32", "torch.", "", "numpy.float32"})
    EXPECT_EQ(torch_dtype(other), std::nullopt) << other;
}

TEST(TorchFile, FilesThatCannotBeOpened) {
  const TestFolder folder;
  EXPECT_NE(error_of<DiskError>([&] { TorchFile(folder / "none.pt"); }).find("No such file"),
            std::string::npos);
  EXPECT_NE(error_of<DiskError>([&] { TorchFile file(folder.path()); }), "");
  EXPECT_FALSE(TorchFile::recognizes(folder / "none.pt"));
  write_text(folder / "empty.pt", "");
  EXPECT_NE(
      error_of<CheckpointError>([&] { TorchFile(folder / "empty.pt"); }).find("is no file of torch.save"),
      std::string::npos);
}

}  // namespace
}  // namespace tessera::checkpoint
