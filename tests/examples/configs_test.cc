// The configurations in configs/: the task of each reads all of its keys, and the GPTs
// have the sizes in their names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/fashion_mnist/task.h"
#include "examples/language_model/task.h"
#include "examples/segmentation/task.h"
#include "examples/text_classification/task.h"
#include "examples/torchscript/task.h"
#include "tests/support/errors.h"
#include "train/task/trainer_config.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

const std::filesystem::path kConfigs = TESSERA_SOURCE_DIR "/configs";

std::vector<std::string> config_files() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs))
    if (entry.path().extension() == ".json" && entry.path().filename() != "schema.json")
      files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

train::Registry all_tasks() {
  train::Registry registry;
  register_fashion_mnist(registry);
  register_language_model(registry);
  register_segmentation(registry);
  register_text_classification(registry);
  register_torchscript(registry);
  return registry;
}

TEST(Configs, AreReadByTheirTasks) {
  int num_with_a_task = 0;
  for (const std::string& file : config_files()) {
    SCOPED_TRACE(file);
    const train::RunConfig as_it_is = train::load_run_config(file, 1);
    if (!as_it_is.model.has("type")) continue;  // for a program of the user's own
    ++num_with_a_task;
    EXPECT_TRUE(as_it_is.report.warnings.empty()) << as_it_is.report.warnings.front();
    const train::RunConfig run = train::load_run_config(file, 2, {"data.path=/not/there"});
    // A task reads all keys of its sections before its data.
    EXPECT_THAT(error_of<DataError>([&] { all_tasks().make(run.model, run.data); }), HasSubstr("/not/there"));
  }
  EXPECT_GE(num_with_a_task, 5);
}

int64_t num_parameters(GptOptions options, int64_t layers) {
  options.layers = layers;
  int64_t numel = 0;
  for (const at::Tensor& parameter : Gpt(options)->parameters()) numel += parameter.numel();
  return numel;
}

TEST(Configs, GptsHaveTheSizesInTheirNames) {
  const auto size_of = [](const char* name) {
    const train::RunConfig run = train::load_run_config((kConfigs / name).string(), 1);
    const GptOptions gpt = read_language_model_options(run.model, run.data).model;
    // Every layer has the same number, so the large model (440 MB) need not be made.
    const int64_t first = num_parameters(gpt, 1), second = num_parameters(gpt, 2) - first;
    return first + (gpt.layers - 1) * second;
  };
  EXPECT_EQ(size_of("gpt_33m.json"), 33'674'240);
  EXPECT_EQ(size_of("gpt_110m.json"), 110'320'128);
}

}  // namespace
}  // namespace tessera::examples
