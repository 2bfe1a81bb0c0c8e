// Damaged files: what is wrong is found and named, before a wrong byte is handed out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/verify.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void flip_bit(const fs::path& path, int64_t byte, int bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(byte);
  const char old = static_cast<char>(file.get());
  file.seekp(byte);
  file.put(static_cast<char>(old ^ (1 << bit)));
  ASSERT_TRUE(file.good()) << path;
}

/// What opening and reading everything says; empty when all of it is right to the bit.
std::string load_error(const SampleModel& model, const fs::path& directory) {
  try {
    return model.difference(Checkpoint::open(directory)).empty() ? "" : "WRONG DATA";
  } catch (const CheckpointError& error) {
    return error.what();
  }
}

bool verifies(const fs::path& directory) {
  try {
    return verify(directory, "").ok();
  } catch (const CheckpointError&) {
    return false;
  }
}

SampleModel model_of_several_blocks() {
  std::vector<zero::ParameterSpec> specs = sample_specs();
  specs.push_back(
      {.name = "big", .shape = {130'000, 7}, .dtype = DType::kFloat32, .trainable = true, .group = 0, .aliases = {}});
  return {specs, {.world_size = 2, .unit_numel = 1'000'000}, 5};
}

TEST(Damage, EveryFlippedBitIsFoundOrHarmless) {
  const TemporaryFolder folder;
  const SampleModel model = model_of_several_blocks();
  save_all(model, folder.path(), "a");
  std::vector<std::pair<fs::path, int64_t>> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder.path()))
    if (entry.is_regular_file()) files.emplace_back(entry.path(), entry.file_size());
  ASSERT_EQ(files.size(), 5u);
  std::mt19937 random(17);
  int num_load_errors = 0, num_verify_errors = 0;
  for (int trial = 0; trial < 1'000; ++trial) {
    const auto& [path, bytes] = files[random() % files.size()];
    const int64_t byte = static_cast<int64_t>(random() % bytes);
    const int bit = static_cast<int>(random() % 8);
    SCOPED_TRACE(str("bit ", bit, " of byte ", byte, " of ", path.filename().string()));
    flip_bit(path, byte, bit);
    const std::string error = load_error(model, folder.path());
    EXPECT_NE(error, "WRONG DATA");
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    num_load_errors += !error.empty();
    const bool found = !verifies(folder.path());
    num_verify_errors += found;
    EXPECT_TRUE(found) << "all bytes of all files are verified";
    flip_bit(path, byte, bit);
  }
  EXPECT_EQ(load_error(model, folder.path()), "");
  EXPECT_EQ(num_verify_errors, 1'000);
  EXPECT_GT(num_load_errors, 600);  // model.h5 and gaps between blocks are not read by a load
}

class DamagedFile : public ::testing::Test {
 protected:
  DamagedFile() : model_(model_of_several_blocks()) { save_all(model_, folder_.path(), "a"); }
  fs::path file(const std::string& name) const { return folder_.path() / "a" / name; }
  std::string load() const { return load_error(model_, folder_.path()); }
  std::vector<std::string> problems() const { return verify(folder_.path(), "").problems; }

  TemporaryFolder folder_;
  SampleModel model_;
};

TEST_F(DamagedFile, IsNamedWithBlockAndDataset) {
  const Manifest manifest = read_manifest(folder_.path() / "a");
  const int unit = manifest.layout.parameters.back().unit;
  const DatasetRecord* dataset = manifest.rank_file(1).find(state_dataset("exp_avg", unit));
  ASSERT_NE(dataset, nullptr);
  const int64_t byte = dataset->offset + 1'500'000, block = byte / (1 << 20);
  flip_bit(file("rank_00001.h5"), byte, 3);
  EXPECT_THAT(load(), AllOf(HasSubstr(str("rank_00001.h5: block ", block, " (bytes ")),
                            HasSubstr("dataset " + dataset->name), HasSubstr("is damaged: found hash ")));
  EXPECT_THAT(problems(), ElementsAre(AllOf(HasSubstr(str("rank_00001.h5: block ", block, " (bytes ")),
                                            HasSubstr(dataset->name), HasSubstr("is damaged"))));
  // Another dataset of the same file is still good.
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_NO_THROW(checkpoint.read_all(1, checkpoint.dataset(1, "/parameter/unit_00001")));
  EXPECT_THROW(checkpoint.read_all(1, *dataset), CheckpointError);
}

TEST_F(DamagedFile, Missing) {
  fs::remove(file("rank_00001.h5"));
  EXPECT_THAT(load(), AllOf(HasSubstr("rank_00001.h5: cannot be read: No such file")));
  EXPECT_THAT(problems(), ElementsAre(AllOf(HasSubstr("rank_00001.h5: cannot open "), HasSubstr("No such file"))));
}

TEST_F(DamagedFile, CutOffOrLonger) {
  const auto bytes = fs::file_size(file("rank_00000.h5"));
  fs::resize_file(file("rank_00000.h5"), bytes - 1);
  EXPECT_THAT(load(), HasSubstr(str("rank_00000.h5: found ", bytes - 1, " bytes; expected ", bytes, ", as saved")));
  EXPECT_THAT(
      problems(),
      ElementsAre(HasSubstr(str("rank_00000.h5: found ", bytes - 1, " bytes; expected ", bytes, ": it is cut off"))));
  fs::resize_file(file("rank_00000.h5"), bytes + 1);
  EXPECT_THAT(load(), HasSubstr(str("found ", bytes + 1, " bytes")));
  EXPECT_THAT(problems(), ::testing::Contains(HasSubstr("bytes were added at its end")));
}

TEST_F(DamagedFile, ModelFileMattersToVerifyOnly) {
  fs::remove(file("model.h5"));
  EXPECT_EQ(load(), "");
  EXPECT_THAT(problems(), ElementsAre(HasSubstr("model.h5: cannot open ")));
}

TEST_F(DamagedFile, ManyBlocksAreCounted) {
  const fs::path path = file("rank_00000.h5");
  const auto bytes = fs::file_size(path);
  fs::resize_file(path, 0);
  fs::resize_file(path, bytes);
  const std::vector<std::string> found = problems();
  EXPECT_EQ(found.size(), static_cast<size_t>(read_manifest(folder_.path() / "a").rank_file(0).block_hashes.size()));
}

TEST_F(DamagedFile, VerifyReportsProgressAndBytes) {
  int64_t last = 0, all = 0;
  const VerifyReport report = verify(folder_.path(), "a", [&](int64_t done, int64_t total) {
    EXPECT_GT(done, last);
    last = done;
    all = total;
  });
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.num_files, 3);
  EXPECT_EQ(report.bytes, read_manifest(folder_.path() / "a").total_bytes());
  EXPECT_EQ(last, all);
  EXPECT_EQ(last, report.bytes);
}

}  // namespace
}  // namespace tessera::checkpoint::testing
