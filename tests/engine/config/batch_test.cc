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

TEST(ConfigBatch, ErrorsPrintTheEquationAndWhatWouldDo) {
  auto error = [](const GivenBatch& given, int world) {
    return config_error([&] { resolve_batch(given, world, "c.json"); });
  };
  EXPECT_EQ(error({.train = 30, .micro = 8, .accumulation = 2}, 2),
            "c.json: train_batch_size 30 != train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 2 "
            "x world size 2 = 32; "
            "train_batch_size 32 would do");
  EXPECT_EQ(
      error({.train = 64, .micro = 8, .accumulation = 2}, 2),
      "c.json: train_batch_size 64 != train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 2 x "
      "world size 2 = 32; "
      "train_batch_size 32, or train_micro_batch_size_per_gpu 16, or gradient_accumulation_steps 4 would do");
  EXPECT_EQ(error({.train = 30, .micro = 8}, 2),
            "c.json: train_batch_size 30 is no multiple of train_micro_batch_size_per_gpu 8 x world size 2 = "
            "16, so that no "
            "gradient_accumulation_steps fits; train_batch_size 16 or 32 would do");
  EXPECT_EQ(error({.train = 3}, 4),
            "c.json: train_batch_size 3 is no multiple of gradient_accumulation_steps 1 x world size 4 = 4, "
            "so that no "
            "train_micro_batch_size_per_gpu fits; train_batch_size 4 would do");
  EXPECT_EQ(error({}, 2),
            "c.json: neither train_batch_size nor train_micro_batch_size_per_gpu is given; expected at least "
            "one of them");
  EXPECT_EQ(error({.accumulation = 2}, 2),
            "c.json: neither train_batch_size nor train_micro_batch_size_per_gpu is given; expected at least "
            "one of them");
  EXPECT_EQ(error({.micro = 1'000'000'000, .accumulation = 1'000'000'000}, 1000),
            "c.json: train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size = 1000000000 "
            "x 1000000000 x 1000 is too large");
  EXPECT_EQ(error({.micro = 1}, 0), "c.json: world size 0; expected at least 1");
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
