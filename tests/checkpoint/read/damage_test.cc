// Damaged files: damage is found and named before a wrong byte is returned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/hashed_files.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/checkpoint_files.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The error of opening and reading everything; empty when all bits are right.
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
  specs.push_back({.name = "big",
                   .shape = {80'000, 7},
                   .dtype = DType::kFloat32,
                   .trainable = true,
                   .group = 0,
                   .aliases = {}});
  return {specs, {.world_size = 2, .unit_numel = 1'000'000}, 5};
}

TEST(Damage, EveryFlippedBitIsFoundOrHarmless) {
  constexpr int kNumTrials = 300;
  const MemoryFolder folder;
  const SampleModel model = model_of_several_blocks();
  save_all(model, folder.path(), "a");
  std::vector<std::pair<fs::path, int64_t>> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder.path()))
    if (entry.is_regular_file()) files.emplace_back(entry.path(), entry.file_size());
  ASSERT_EQ(files.size(), 5u);
  std::mt19937 random(17);
  int num_load_errors = 0, num_verify_errors = 0;
  for (int trial = 0; trial < kNumTrials; ++trial) {
    const auto& [path, bytes] = files[random() % files.size()];
    const int64_t byte = static_cast<int64_t>(random() % bytes);
    const int bit = static_cast<int>(random() % 8);
    SCOPED_TRACE(str("bit ", bit, " of byte ", byte, " of ", path.filename()));
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
  EXPECT_EQ(num_verify_errors, kNumTrials);
  EXPECT_GT(num_load_errors, kNumTrials * 6 / 10);  // model.h5 and gaps between blocks are not read by a load
}

class DamagedFile : public ::testing::Test {
 protected:
  DamagedFile() : model_(model_of_several_blocks()) { save_all(model_, folder_.path(), "a"); }
  fs::path file(const std::string& name) const { return folder_.path() / "a" / name; }
  std::string load() const { return load_error(model_, folder_.path()); }
  std::vector<std::string> problems() const { return verify(folder_.path(), "").problems; }

  HashedFiles open_files() const {
    return {folder_.path() / "a", std::make_shared<const Manifest>(read_manifest(folder_.path() / "a"))};
  }
  static std::vector<std::byte> read_all(const HashedFiles& files, int rank, const DatasetRecord& dataset) {
    std::vector<std::byte> bytes(static_cast<size_t>(dataset.bytes));
    files.read(rank, dataset, 0, bytes);
    return bytes;
  }

  MemoryFolder folder_;
  SampleModel model_;
};

TEST_F(DamagedFile, IsNamedWithBlockAndDataset) {
  const Manifest manifest = read_manifest(folder_.path() / "a");
  const int unit = manifest.layout.parameters.back().unit;
  const DatasetRecord* dataset = manifest.rank_file(1).datasets.find(state_dataset("exp_avg", unit));
  ASSERT_NE(dataset, nullptr);
  const int64_t byte = dataset->offset + 1'100'000, block = byte / (1 << 20);
  flip_bit(file("rank_00001.h5"), byte, 3);
  EXPECT_THAT(load(), AllOf(HasSubstr(str("rank_00001.h5: block ", block, " (bytes ")),
                            HasSubstr("dataset " + dataset->name), HasSubstr("is damaged: found hash ")));
  EXPECT_THAT(problems(), ElementsAre(AllOf(HasSubstr(str("rank_00001.h5: block ", block, " (bytes ")),
                                            HasSubstr(dataset->name), HasSubstr("is damaged"))));
  // Another dataset of the same file is still good.
  const HashedFiles files = open_files();
  EXPECT_NO_THROW(read_all(files, 1, *manifest.rank_file(1).datasets.find("/parameter/unit_00001")));
  EXPECT_THROW(read_all(files, 1, *dataset), CheckpointError);
}

// One byte per block of every file: each read or check of a byte of the block fails, and no other.
TEST_F(DamagedFile, EveryBlockIsVerifiedByReadAndByCheck) {
  const Manifest manifest = read_manifest(folder_.path() / "a");
  for (int rank = 0; rank < manifest.world_size(); ++rank) {
    const FileRecord& record = manifest.rank_file(rank);
    const int64_t num_blocks = static_cast<int64_t>(record.block_hashes.size());
    ASSERT_GE(num_blocks, 2);
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t begin = block << 20, end = std::min(begin + (1 << 20), record.bytes);
      flip_bit(file(record.name), end - 1, 7);
      const HashedFiles files = open_files();
      for (const DatasetRecord& dataset : record.datasets) {
        if (dataset.bytes == 0) continue;
        SCOPED_TRACE(str(record.name, ", block ", block, " of ", num_blocks, ", ", dataset.name));
        const bool is_hit = dataset.offset < end && dataset.offset + dataset.bytes > begin;
        EXPECT_EQ(error_of([&] { read_all(files, rank, dataset); }).empty(), !is_hit);
        EXPECT_EQ(error_of([&] { files.check(rank, dataset, 0, dataset.bytes); }).empty(), !is_hit);
        std::byte last;
        const bool last_is_hit =
            dataset.offset + dataset.bytes > begin && dataset.offset + dataset.bytes <= end;
        EXPECT_EQ(error_of([&] { files.read(rank, dataset, dataset.bytes - 1, {&last, 1}); }).empty(),
                  !last_is_hit);
        EXPECT_EQ(error_of([&] { files.check(rank, dataset, dataset.bytes - 1, 1); }).empty(), !last_is_hit);
      }
      flip_bit(file(record.name), end - 1, 7);
    }
  }
}

// Blocks are cached; a damaged block must not be cached under the key of the block it replaces.
TEST_F(DamagedFile, IsNotKeptInPlaceOfAnotherBlock) {
  const Manifest manifest = read_manifest(folder_.path() / "a");
  const HashedFiles files = open_files();
  struct Part {
    int rank;
    const DatasetRecord* dataset;
    int64_t begin;  // byte of the dataset
    std::vector<std::byte> right;
  };
  std::vector<Part> parts;  // one for each block that a dataset has bytes in
  for (int rank = 0; rank < 2; ++rank) {
    std::set<int64_t> seen;
    for (const DatasetRecord& dataset : manifest.rank_file(rank).datasets)
      for (int64_t begin = 0; begin + 4 <= dataset.bytes; begin += 4)
        if (seen.insert((dataset.offset + begin) >> 20).second)
          parts.push_back({rank, &dataset, begin, std::vector<std::byte>(4)});
  }
  ASSERT_GE(parts.size(), 6u);
  const auto read = [](const HashedFiles& from, const Part& part) {
    std::vector<std::byte> found(4);
    from.read(part.rank, *part.dataset, part.begin, found);
    return found;
  };
  for (Part& part : parts) part.right = read(files, part);
  for (const Part& damaged : parts) {
    const int64_t byte = damaged.dataset->offset + damaged.begin;
    flip_bit(file(rank_file_name(damaged.rank)), byte, 0);
    const HashedFiles fresh = open_files();
    for (int round = 0; round < 3; ++round)
      for (const Part& part : parts) {
        SCOPED_TRACE(str("round ", round, ", ", part.dataset->name, " of rank ", part.rank));
        if (&part == &damaged)
          EXPECT_THROW(read(fresh, part), CheckpointError);
        else
          EXPECT_EQ(read(fresh, part), part.right);
        // The damaged bytes are now in the place of the least recently used block.
        if (&part != &damaged) continue;
        for (const Part& other : parts) {
          if (&other != &damaged) {
            EXPECT_EQ(read(fresh, other), other.right);
          }
        }
      }
    flip_bit(file(rank_file_name(damaged.rank)), byte, 0);
  }
}

TEST_F(DamagedFile, RenamedIsNoCheckpointOfThatName) {
  fs::rename(folder_.path() / "a", folder_.path() / "b");
  std::ofstream(folder_.path() / "latest") << "b\n";
  const auto says = AllOf(HasSubstr("b: holds the checkpoint a under another name"), HasSubstr("mv "));
  EXPECT_THAT(load(), says);
  EXPECT_THAT(error_of([&] { verify(folder_.path(), ""); }), says);
  EXPECT_THAT(error_of([&] { verify(folder_.path(), "b"); }), says);
  fs::rename(folder_.path() / "b", folder_.path() / "a");
  std::ofstream(folder_.path() / "latest") << "a\n";
  EXPECT_EQ(load(), "");
  fs::rename(folder_.path() / "a",
             folder_.path() / "elsewhere");  // the link's name and its target's name are both accepted
  fs::create_directory_symlink("elsewhere", folder_.path() / "a");
  EXPECT_EQ(load(), "");
}

// A copy under another name is neither listed as a checkpoint nor deleted as an old one.
TEST_F(DamagedFile, ACopyUnderAnotherNameIsLeftAlone) {
  fs::copy(folder_.path() / "a", folder_.path() / "a_backup");
  EXPECT_THAT(list_checkpoints(folder_.path()), ElementsAre("a"));
  save_all(model_, folder_.path(), "c");
  EXPECT_THAT(keep_last(folder_.path(), {.num = 1, .protect = {}}, Disk({.sync = false, .probe = {}})),
              ElementsAre("a"));
  EXPECT_THAT(names_in(folder_.path()), ElementsAre("a_backup", "c", "latest"));
}

TEST_F(DamagedFile, Missing) {
  fs::remove(file("rank_00001.h5"));
  EXPECT_THAT(load(), AllOf(HasSubstr("rank_00001.h5: cannot be read: No such file")));
  EXPECT_THAT(problems(),
              ElementsAre(AllOf(HasSubstr("rank_00001.h5: cannot open "), HasSubstr("No such file"))));
}

TEST_F(DamagedFile, CutOffOrLonger) {
  const auto bytes = fs::file_size(file("rank_00000.h5"));
  fs::resize_file(file("rank_00000.h5"), bytes - 1);
  EXPECT_THAT(load(),
              HasSubstr(str("rank_00000.h5: found ", bytes - 1, " bytes; expected ", bytes, ", as saved")));
  EXPECT_THAT(problems(), ElementsAre(HasSubstr(str("rank_00000.h5: found ", bytes - 1, " bytes; expected ",
                                                    bytes, ": it is cut off"))));
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
  EXPECT_EQ(found.size(),
            static_cast<size_t>(read_manifest(folder_.path() / "a").rank_file(0).block_hashes.size()));
}

TEST_F(DamagedFile, VerifyReportsBytes) {
  const VerifyReport report = verify(folder_.path(), "a");
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.bytes, read_manifest(folder_.path() / "a").total_bytes());
}

}  // namespace
}  // namespace tessera::checkpoint::testing
