#include "train/run/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

class RunDirectoryTest : public ::testing::Test {
 protected:
  const TemporaryFolder temporary_{"run_directory"};
  const fs::path root_ = temporary_.path() / "run";

  static std::string error_of(const fs::path& folder) {
    return tessera::testing::error_of<ConfigError>([&] { RunDirectory directory(folder); });
  }
};

TEST_F(RunDirectoryTest, WritesWholeFilesAndLines) {
  RunDirectory directory(root_ / "a" / "b");
  directory.begin();
  directory.write("config.json", "{}\n");
  directory.append_metrics({{"step", 1}});
  directory.append_metrics({{"step", 2}, {"loss", std::nan("")}});
  EXPECT_EQ(read_text(root_ / "a/b/config.json"), "{}\n");
  EXPECT_EQ(read_text(root_ / "a/b/metrics.jsonl"), "{\"step\":1}\n{\"step\":2,\"loss\":null}\n")
      << "readable during the run";
  size_t num_files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(root_ / "a/b")) ++num_files;
  EXPECT_EQ(num_files, 3u) << "with .lock; no temporary files are left";
}

TEST_F(RunDirectoryTest, EarlierResultsAreNotTakenForThisRuns) {
  {
    RunDirectory earlier(root_);
    earlier.begin();
    for (int step : {1, 2, 3}) earlier.append_metrics({{"step", step}});
    earlier.append_metrics({{"step", "three"}});  // not a valid record
    earlier.write("all_results.json", "{}");
  }
  RunDirectory directory(root_);
  EXPECT_TRUE(fs::exists(root_ / kResultsName)) << "opening it changes nothing yet";
  EXPECT_EQ(read_text(root_ / "metrics.jsonl"),
            "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":\"three\"}\n");
  EXPECT_THAT(directory.resume(2), HasSubstr("metrics.jsonl: 1 of its 4 lines cannot be read (line 4)"));
  EXPECT_FALSE(fs::exists(root_ / kResultsName));
  EXPECT_EQ(read_text(root_ / "metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n");
  directory.begin();
  directory.append_metrics({{"step", 7}});
  EXPECT_EQ(read_text(root_ / "metrics.jsonl"), "{\"step\":7}\n");
}

TEST_F(RunDirectoryTest, WhatCannotBeReplacedIsSaidBeforeAnythingIsRemoved) {
  fs::create_directories(root_ / kRunIdName);
  std::ofstream(root_ / kModelName) << "weights";
  EXPECT_THAT(error_of(root_), HasSubstr("run_id cannot be written: it is not a regular file"));
  EXPECT_EQ(read_text(root_ / kModelName), "weights");
  fs::remove(root_ / kRunIdName);
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THAT(error_of(root_), HasSubstr("model.safetensors cannot be written: it is no file of a run"));
  EXPECT_EQ(read_text(root_ / kModelName), "weights") << "the user's own";
  std::ofstream(root_ / kMetricsName) << "{\"step\":1}\n";
  EXPECT_EQ(error_of(root_), "") << "of a run before there were ids";
}

TEST_F(RunDirectoryTest, ARunsIdIsSixteenDigitsOrNone) {
  fs::create_directories(root_);
  EXPECT_EQ(read_run_id(root_), "");
  std::ofstream(root_ / "run_id") << "0123456789abcdef\n";
  EXPECT_EQ(read_run_id(root_), "0123456789abcdef");
  for (const char* damaged : {"", "0123456789abcdeg\n", "0123456789abcde\n", "0123456789abcdef0\n"}) {
    std::ofstream(root_ / "run_id") << damaged;
    EXPECT_THROW(read_run_id(root_), Error) << damaged;
  }
}

TEST_F(RunDirectoryTest, SaysWhyItCannotBeWritten) {
  fs::create_directories(root_);
  std::ofstream(root_ / "file") << "x";
  for (const fs::path& folder : {root_ / "file", root_ / "file" / "below"})
    EXPECT_THAT(error_of(folder),
                AllOf(HasSubstr("trainer.output_dir: " + folder.string()), Not(HasSubstr("\n"))));
  if (geteuid() != 0) {  // root may write anywhere
    fs::permissions(root_, fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_THROW(RunDirectory(root_ / "new"), ConfigError);
    fs::permissions(root_, fs::perms::owner_all);
  }
}

}  // namespace
}  // namespace tessera::train
