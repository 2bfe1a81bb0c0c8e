// TorchScript files that are read in place. (Archives of other programs and whole runs are in
// torchscript_files_test.py.)
#include "examples/torchscript/script_file.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint_error.h"
#include "comm/init/self.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "core/memory/process_memory.h"
#include "engine/engine.h"
#include "examples/torchscript/script_engine.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::jit::Module;

/// `num_layers` square weights of `size`, of which the first alone is trained and is tied to the last, a
/// buffer, and a constant.
Module make(int num_layers, int64_t size) {
  Module model("Model");
  std::string body;
  at::Tensor first;
  for (int layer = 0; layer < num_layers; ++layer) {
    const std::string name = "w" + std::to_string(layer);
    const at::Tensor weight =
        layer == num_layers - 1 ? first : at::randn({size, size}).set_requires_grad(layer == 0);
    if (layer == 0) first = weight;
    model.register_parameter(name, weight, /*is_buffer=*/false);
    body += "    x = torch.tanh(torch.matmul(x, self." + name + ")) + self.shift\n";
  }
  model.register_buffer("shift", at::randn({size}));
  model.define("def forward(self, x):\n" + body + "    return x\n");
  torch::jit::Graph& graph = *model.get_method("forward").graph();
  torch::jit::WithInsertPoint const here(graph.return_node());
  torch::jit::Value* const constant = graph.insertConstant(at::arange(size).to(at::kFloat));
  graph.return_node()->replaceInput(0,
                                    graph.insert(c10::aten::mul, {graph.return_node()->input(0), constant}));
  return model;
}

/// As torch writes an archive after set_crc32_options(False): zeros in headers and in the directory.
std::string without_sums(std::string content) {
  for (const auto& [signature, sum] : {std::pair("PK\3\4", 14), std::pair("PK\1\2", 16)})
    for (size_t at = 0; (at = content.find(signature, at)) != content.npos; ++at)
      content.replace(at + static_cast<size_t>(sum), 4, 4, '\0');
  return content;
}

class ScriptFileTest : public ::testing::Test {
 protected:
  std::string save(const Module& model) {
    const std::string path = (folder_.path() / "m.pt").string();
    model.save(path);
    return path;
  }
  /// With libtorch's own loader, for comparison.
  static void expect_as_libtorch_loads(const std::string& path, Module& model) {
    Module expected = torch::jit::load(path);
    const auto names = [](const auto& list) {
      std::vector<std::string> names;
      for (const auto& item : list) names.push_back(item.name);
      return names;
    };
    EXPECT_EQ(names(model.named_parameters()), names(expected.named_parameters()));
    EXPECT_EQ(names(model.named_buffers()), names(expected.named_buffers()));
    EXPECT_EQ(model.get_method("forward").graph()->toString(/*print_source_locations=*/false),
              expected.get_method("forward").graph()->toString(false));
    auto theirs = expected.parameters().begin();
    for (const at::Tensor& parameter : model.parameters()) {
      EXPECT_TRUE(parameter.equal(*theirs));
      EXPECT_EQ(parameter.requires_grad(), (*theirs).requires_grad());
      ++theirs;
    }
    const at::Tensor x = at::randn({2, model.attr("shift").toTensor().numel()});
    EXPECT_TRUE(model.forward({x}).toTensor().equal(expected.forward({x}).toTensor()));
  }

  TemporaryFolder folder_{"script_file"};
};

TEST_F(ScriptFileTest, TensorsLieInTheFileUntilTheyAreDetached) {
  const std::string path = save(make(3, 96));
  ScriptFile file(path);
  const auto model = file.load();
  const int64_t weight = int64_t{96} * 96 * 4;
  EXPECT_EQ(file.mapped_bytes(), 2 * weight + 2 * 96 * 4);
  EXPECT_TRUE(model->attr("w0").toTensor().is_same(model->attr("w2").toTensor())) << "tied";
  expect_as_libtorch_loads(path, *model);

  const at::Tensor kept = model->attr("w1").toTensor().clone();
  model->attr("w0").toTensor().set_data(at::ones({1}));  // as the engine moves parameters into its units
  EXPECT_EQ(file.mapped_bytes(), weight + 2 * 96 * 4);
  file.detach();
  EXPECT_EQ(file.mapped_bytes(), 0);
  std::filesystem::resize_file(path, 0);
  EXPECT_TRUE(model->attr("w1").toTensor().equal(kept));
}

TEST_F(ScriptFileTest, WhatIsWrittenIntoATensorDoesNotReachTheFile) {
  const std::string path = save(make(3, 96));
  const std::string before = read_text(path);
  ScriptFile file(path);
  const auto model = file.load();
  const at::NoGradGuard no_grad;
  const at::Tensor before_it = model->attr("w0").toTensor().clone();
  model->attr("w1").toTensor().fill_(3);
  EXPECT_TRUE(read_text(path) == before);
  file.detach();
  EXPECT_EQ(model->attr("w1").toTensor().sum().item<float>(), 3 * 96 * 96);
  EXPECT_TRUE(model->attr("w0").toTensor().equal(before_it));
}

TEST_F(ScriptFileTest, AFileThatWasWrittenToSinceIsNamed) {
  const std::string path = save(make(3, 8));
  ScriptFile file(path);
  const auto model = file.load();
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
  EXPECT_THAT(error_of<DataError>([&] { file.detach(); }), HasSubstr("m.pt: was written to while"));

  ScriptFile replaced(save(make(3, 8)));
  replaced.load();
  std::filesystem::rename(path, path + ".old");  // what is mapped is the old file still
  save(make(3, 16));
  replaced.detach();
}

TEST_F(ScriptFileTest, ATensorThatExceedsItsRecordIsNamed) {
  const std::string path = save(make(3, 100));
  std::string content = read_text(path);
  // The tuple (100, 100) in the pickle: MARK, BININT1 100, BININT1 100, TUPLE.
  const std::string shape = "(KdKdt", wrong = "(K\xffK\xfft";
  const size_t place = content.find(shape);
  ASSERT_NE(place, content.npos);
  content.replace(place, shape.size(), wrong);
  write_text(path, content);
  EXPECT_THAT(error_of<CheckpointError>([&] { ScriptFile(path).load(); }), HasSubstr("CRC-32"));
  write_text(path, without_sums(content));
  EXPECT_THAT(
      error_of<DataError>([&] { ScriptFile(path).load(); }),
      HasSubstr("m.pt: a tensor of shape [255, 255] has a record of 40000 bytes; the file is damaged"));
}

TEST_F(ScriptFileTest, AChangedByteIsFoundBeforeLibtorchReadsIt) {
  const std::string path = save(make(3, 100)), content = read_text(path);
  const Module saved = torch::jit::load(path);
  int num_found = 0;
  for (const at::Tensor& tensor : {saved.attr("w0").toTensor(), saved.attr("w1").toTensor()})
    for (const size_t byte : {0, 3, 20'001, 39'999}) {
      const std::string_view bytes(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
      const size_t place = content.find(bytes);
      ASSERT_NE(place, content.npos);
      std::string changed = content;
      changed[place + byte] ^= 0x40;
      write_text(path, changed);
      EXPECT_THAT(error_of<CheckpointError>([&] { ScriptFile(path).load(); }),
                  AllOf(HasSubstr("m.pt: entry '"), HasSubstr("is damaged: its CRC-32 is ")));
      EXPECT_NO_THROW(torch::jit::load(path)) << "libtorch takes it";
      write_text(path, without_sums(changed));
      EXPECT_NO_THROW(ScriptFile(path).load()) << "its writer left the sums out";
      ++num_found;
    }
  EXPECT_EQ(num_found, 8);
}

TEST_F(ScriptFileTest, AnEngineIsMadeWithAShardAndTwoUnits) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory for a while";
#endif
  constexpr int kLayers = 33, kRanks = 16;
  constexpr int64_t kSize = 1024, kWeight = kSize * kSize * 4, kAll = (kLayers - 1) * kWeight;  // 128 MiB
  const std::string path = save(make(kLayers, kSize));
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.zero.stage = 3;
  config.zero.unit_numel = kSize * kSize;
  const auto peak = [&](bool in_place) {
    const double before = own_bytes();
    std::unique_ptr<TypedEngine<Module>> engine;
    std::unique_ptr<ScriptFile> file;
    return peak_own_bytes(
               [&] {
                 std::shared_ptr<Module> model;
                 if (in_place) {
                   file = std::make_unique<ScriptFile>(path);
                   model = file->load();
                 } else {
                   model = std::make_shared<Module>(torch::jit::load(path));
                 }
                 engine = tessera::initialize(std::move(model), config,
                                              std::make_shared<comm::SelfCommunicator>(
                                                  comm::SimulatedGroup{.rank = 0, .size = kRanks}),
                                              {});
                 if (file) file->detach();
               },
               std::chrono::milliseconds(1)) -
           before;
  };
  peak(true);  // what is allocated once
  const double mapped = peak(true), read = peak(false);
  RecordProperty("mapped", std::to_string(mapped / kWeight));
  RecordProperty("read", std::to_string(read / kWeight));
  EXPECT_GT(read, kAll);
  EXPECT_LT(mapped, kAll / kRanks + 3.5 * kWeight);  // units of the trained weight, and of a frozen one
}

}  // namespace
}  // namespace tessera::examples
