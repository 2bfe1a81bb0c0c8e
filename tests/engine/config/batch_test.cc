// The batch triple.
#include "engine/config/batch.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/config/parse.h"
#include "tests/engine/config/config_testing.h"

namespace tessera::config {
namespace {

void expect(const GivenBatch& given, int world, int64_t train, int64_t micro, int64_t accumulation) {
  Batch batch = resolve_batch(given, world, "c.json");
  EXPECT_EQ(batch.train, train);
  EXPECT_EQ(batch.micro, micro);
  EXPECT_EQ(batch.accumulation, accumulation);
}

TEST(ConfigBatch, AnyTwoGiveTheThird) {
  expect({.train = 64, .micro = 8, .accumulation = 4}, 2, 64, 8, 4);
  expect({.train = 64, .micro = 8}, 2, 64, 8, 4);
  expect({.train = 64, .accumulation = 4}, 2, 64, 8, 4);
  expect({.micro = 8, .accumulation = 4}, 2, 64, 8, 4);
}

TEST(ConfigBatch, OneAloneMeansOneStep) {
  expect({.train = 64}, 4, 64, 16, 1);
  expect({.micro = 16}, 4, 64, 16, 1);
}

TEST(ConfigBatch, AutoFillsWhatIsOpen) {
  expect({.any_auto = true}, 2, 16, 8, 1);
  expect({.accumulation = 3, .any_auto = true}, 2, 48, 8, 3);
  expect({.micro = 4, .any_auto = true}, 2, 8, 4, 1);
}

TEST(ConfigBatch, ThereIsAtLeastOneRank) {
  EXPECT_EQ(config_error([] { resolve_batch({.micro = 1}, 0, "c.json"); }),
            "c.json: world size 0; expected at least 1");
}

TEST(ConfigBatch, EveryResolvedTripleSatisfiesTheEquation) {
  for (int world = 1; world <= 5; ++world)
    for (int64_t train = 1; train <= 40; ++train)
      for (int64_t micro = 1; micro <= 8; ++micro) {
        bool possible = train % (micro * world) == 0;
        auto resolve = [&] {
          Batch batch = resolve_batch({.train = train, .micro = micro}, world, "c.json");
          EXPECT_EQ(batch.micro * batch.accumulation * world, batch.train);
        };
        EXPECT_EQ(config_error(resolve).empty(), possible) << train << " " << micro << " " << world;
      }
}

TEST(ConfigBatch, TheSameBatchOnOtherWorlds) {
  for (int world = 1; world <= 6; ++world)
    for (int64_t train = 1; train <= 60; ++train)
      for (int64_t micro = 1; micro <= 12; ++micro) {
        const auto batch = divide_batch(train, micro, world);
        ASSERT_EQ(batch.has_value(), train % world == 0) << train << " " << micro << " " << world;
        if (!batch) continue;
        EXPECT_EQ(batch->train, train);
        EXPECT_EQ(batch->micro * batch->accumulation * world, train);
        EXPECT_LE(batch->micro, micro);
        // No larger micro-batch would do.
        for (int64_t larger = batch->micro + 1; larger <= micro; ++larger)
          EXPECT_NE(train % (larger * world), 0) << train << " " << micro << " " << world;
      }
  EXPECT_FALSE(divide_batch(12, 4, 0));
}

}  // namespace
}  // namespace tessera::config
