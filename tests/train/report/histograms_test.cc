// Histograms counted shard by shard equal those of the whole tensors.
#include "train/report/histograms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <span>

#include "comm/init/init.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "tests/train/blobs_task.h"

namespace tessera::train {
namespace {

Histogram of(std::span<const float> values) {
  HistogramCounts counts;
  counts.add(values);
  return counts.histogram();
}

Histogram of(const at::Tensor& whole) {
  const at::Tensor values = whole.contiguous();
  return of({values.const_data_ptr<float>(), static_cast<size_t>(values.numel())});
}

void expect_equal(const Histogram& mine, const Histogram& whole) {
  EXPECT_EQ(mine.min, whole.min);
  EXPECT_EQ(mine.max, whole.max);
  EXPECT_EQ(mine.num, whole.num);
  EXPECT_EQ(mine.bucket_limit, whole.bucket_limit);
  EXPECT_EQ(mine.bucket, whole.bucket);
  EXPECT_NEAR(mine.sum, whole.sum, 1e-12 * whole.num);
  EXPECT_NEAR(mine.sum_squares, whole.sum_squares, 1e-12 * whole.sum_squares);
}

void compare(const std::string& precision, int stage, int world_size) {
  SCOPED_TRACE(str(precision, ", stage ", stage, ", ", world_size, " ranks"));
  const std::string config = str(
      R"({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.01,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"unit_numel": 70, "stage": )",
      stage, "}", precision, "}");
  comm::run_threads(world_size, {}, [&](comm::CommunicatorPtr comm) {
    BlobsTask task({});
    Engine& engine = task.initialize(parse_engine_config(config, {.world_size = world_size}), comm, {});
    for (int64_t first : {0, 8, 16, 24}) {
      std::vector<int64_t> samples(8);
      for (size_t i = 0; i < 8; ++i) samples[i] = first + static_cast<int64_t>(i) + 32 * comm->rank();
      engine.backward(task.loss(task.train_batch(samples, {})));
      engine.step();
    }
    const std::vector<NamedHistogram> histograms = histograms_of(engine);
    ASSERT_EQ(histograms.size(), 12u);  // of two layers and a norm, each with weight and bias
    for (const NamedHistogram& one : histograms) {
      SCOPED_TRACE(one.name);
      const auto [kind, name] =
          std::pair(one.name.substr(0, one.name.find('/')), one.name.substr(one.name.find('/') + 1));
      ASSERT_TRUE(kind == "parameters" || kind == "gradients");
      const at::Tensor whole =
          kind == "parameters" ? engine.full_parameter(name) : engine.full_gradient(name);
      expect_equal(one.histogram, of(whole));
    }
    EXPECT_EQ(histograms[0].name, "parameters/first.weight");
    EXPECT_EQ(histograms[1].name, "gradients/first.weight");
    EXPECT_EQ(histograms[0].histogram.num, 32);
  });
}

TEST(Histograms, AreThoseOfTheWholeTensors) {
  for (const auto& [stage, world_size] : {std::pair(0, 1), {0, 2}, {1, 2}, {2, 3}, {3, 3}})
    compare("", stage, world_size);
}

TEST(Histograms, OfMasterWeightsAndUnscaledGradients) {
  for (int stage : {0, 3}) compare(R"(, "fp16": {"enabled": true, "initial_scale_power": 8})", stage, 2);
}

TEST(Histograms, PartsAddUpInAnyOrder) {
  const std::vector<float> values = {0.0f,   -0.0f, 1e-12f, -1e-12f,  3.5f, -3.5f,
                                     1e-30f, 3e38f, -3e38f, INFINITY, NAN,  1.1f};
  HistogramCounts parts;
  for (size_t i = values.size(); i-- > 0;) parts.add({&values[i], 1});
  const Histogram whole = of(std::span(values));
  EXPECT_EQ(whole.num, 10);
  EXPECT_EQ(parts.histogram().bucket, whole.bucket);
  EXPECT_EQ(parts.histogram().bucket_limit, whole.bucket_limit);
  EXPECT_TRUE(HistogramCounts().histogram().bucket.empty());
}

}  // namespace
}  // namespace tessera::train
