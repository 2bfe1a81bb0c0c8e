// The states that an interrupted save may leave.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint::testing {

/// `latest` opens, verifies and equals one of the two models; so does every tag.
inline void expect_whole(const std::filesystem::path& directory, const SampleModel& before,
                         const SampleModel& after) {
  std::vector<std::string> tags = list_checkpoints(directory);
  tags.push_back("");  // what latest names
  for (const std::string& tag : tags) {
    SCOPED_TRACE(tag);
    const std::string error = tessera::testing::error_of([&] {
      const Checkpoint checkpoint = Checkpoint::open(directory, tag);
      EXPECT_THAT(verify(directory, tag).problems, ::testing::IsEmpty());
      const bool is_after = checkpoint.manifest().state.at("global_step") == 2;
      EXPECT_EQ((is_after ? after : before).difference(checkpoint), "");
    });
    EXPECT_EQ(error, "");
  }
}

}  // namespace tessera::checkpoint::testing
