// Checkpoints that are removed or replaced while they are read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using tessera::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MemoryFolder;
using testing::sample_model;
using testing::SampleModel;
using testing::save_all;

class ReadingTest : public ::testing::Test {
 protected:
  void save(const std::string& tag) const {
    for (const std::string& error : save_all(model_, folder_.path(), tag)) ASSERT_EQ(error, "");
  }
  void remove(const std::string& tag) const { fs::remove_all(folder_.path() / tag); }
  std::string path(const std::string& tag) const { return (folder_.path() / tag).string(); }

  MemoryFolder folder_;
  SampleModel model_ = sample_model(2, 7);
};

TEST_F(ReadingTest, WhatIsOpenStaysReadable) {
  save("a");
  const Checkpoint opened = Checkpoint::open(folder_.path());
  const Checkpoint part = Checkpoint::open_part(folder_.path(), "a");
  remove("a");
  EXPECT_EQ(model_.difference(opened), "");
  EXPECT_THAT(opened.elements().verify().problems, IsEmpty());
  EXPECT_THROW(part.elements().read_all(TensorId::weights(0)), CheckpointError);
}

TEST(Reading, MoreFilesThanMayBeOpen) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(150, 7);
  EXPECT_THAT(save_all(model, folder.path(), "a"), ::testing::Each(IsEmpty()));
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit few{100, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  {
    const Checkpoint opened = Checkpoint::open(folder.path());
    EXPECT_EQ(model.difference(opened), "");
    EXPECT_THAT(opened.elements().verify().problems, IsEmpty());
  }
  EXPECT_THAT(verify(folder.path(), "").problems, IsEmpty());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(ReadingTest, TheNextIsReadInPlaceOfOneThatIsRemoved) {
  save("a");
  std::vector<std::string> read, said;
  read_latest_checkpoint(
      folder_.path(), "", [&](const std::string& line) { said.push_back(line); },
      [&](const std::string& tag) {
        read.push_back(tag);
        if (tag == "c") return;
        save(tag == "a" ? "b" : "c");
        remove(tag);
        throw CheckpointError("stale");
      });
  EXPECT_THAT(read, ElementsAre("a", "b", "c"));
  EXPECT_THAT(
      said,
      ElementsAre(
          str(path("a"), " was removed by its run while it was read; ", path("b"), " is read instead"),
          str(path("b"), " was removed by its run while it was read; ", path("c"), " is read instead")));
}

TEST_F(ReadingTest, OneThatIsReplacedIsReadAnew) {
  save("a");
  int num_reads = 0;
  std::vector<std::string> said;
  read_latest_checkpoint(
      folder_.path(), "", [&](const std::string& line) { said.push_back(line); },
      [&](const std::string&) {
        if (++num_reads == 2) return;
        save("a");
        throw CheckpointError("another hash");
      });
  EXPECT_THAT(said, ElementsAre(HasSubstr("was replaced by its run while it was read")));
}

TEST_F(ReadingTest, AnErrorOfAnotherKindIsAnError) {
  save("a");
  const auto never = [](const std::string& line) { FAIL() << line; };
  const auto fail = [](const std::string&) { throw CheckpointError("damaged"); };
  EXPECT_EQ(error_of<CheckpointError>([&] { read_latest_checkpoint(folder_.path(), "", never, fail); }),
            "damaged");
  const auto take_away = [&](const std::string& tag) {
    save("b");
    remove(tag);
    throw CheckpointError("gone");
  };
  EXPECT_EQ(error_of<CheckpointError>([&] { read_latest_checkpoint(folder_.path(), "a", never, take_away); }),
            "gone")
      << "a tag that was given is not replaced by another";
}

}  // namespace
}  // namespace tessera::checkpoint
