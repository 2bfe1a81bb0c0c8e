// The task: options, the split, batches, an evaluation that does not depend on the ranks, and pictures.
#include "examples/segmentation/task.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "engine/checkpointing.h"
#include "examples/segmentation/image_file.h"
#include "tests/support/errors.h"
#include "train/report/evaluate.h"

namespace tessera::examples {
namespace {

using nlohmann::json;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Bright squares on dark noise; their places depend only on the index.
class Squares final : public SegmentationData {
 public:
  explicit Squares(int64_t count, int64_t size = 16) : count_(count), size_(size) {}
  int64_t size() const override { return count_; }
  int64_t height() const override { return size_; }
  int64_t width() const override { return size_; }
  SegmentationSample sample(int64_t index) const override {
    SegmentationSample sample{at::zeros({3, size_, size_}, at::kByte), at::zeros({size_, size_}, at::kByte)};
    const int64_t edge = 3 + index % 5, top = index * 7 % (size_ - edge), left = index * 3 % (size_ - edge);
    const auto square = [&](const at::Tensor& plane) {
      return plane.narrow(-2, top, edge).narrow(-1, left, edge);
    };
    sample.image.add_(at::arange(size_, at::kByte)).add_(index);
    square(sample.image).fill_(200);
    square(sample.mask).fill_(1);
    return sample;
  }

 private:
  int64_t count_, size_;
};

SegmentationOptions small_options() {
  SegmentationOptions options;
  options.validation_fraction = 0.25;
  options.model = {.in_channels = 3, .num_classes = 2, .base_channels = 4, .depth = 2, .bilinear = false};
  return options;
}

EngineConfig engine_config(int stage, int64_t batch) {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = batch;
  config.optimizer.options = AdamWOptions{.lr = 0.02};
  config.zero.stage = stage;
  return config;
}

void train_steps(Segmentation& task, Engine& engine, int64_t steps, int64_t batch) {
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < batch; ++i)
      rows.push_back(((step * engine.world_size() + engine.rank()) * batch + i) % task.train_size());
    engine.backward(task.loss(task.train_batch(rows, {})));
    engine.step();
  }
}

TEST(SegmentationOptions, AreReadStrictly) {
  const config::Origins origins("run.json");
  const auto model_of = [&](const json& model) {
    const config::Section data(json{{"type", "fashion_composites"}}, "data", origins);
    return read_segmentation_options(config::Section(model, "model", origins), data).model;
  };
  const UNetOptions unet = model_of({{"type", "unet"},
                                     {"in_channels", 1},
                                     {"num_classes", 1},
                                     {"base_channels", 8},
                                     {"depth", 3},
                                     {"bilinear", true}});
  EXPECT_EQ(unet.in_channels * 1000 + unet.num_classes * 100 + unet.base_channels * 10 + unet.depth, 1183);
  EXPECT_TRUE(unet.bilinear);
  EXPECT_THAT(error_of<ConfigError>([&] { model_of({{"type", "unet"}, {"in_channels", 2}}); }),
              HasSubstr("model.in_channels: found 2"));
  EXPECT_THAT(error_of<ConfigError>([&] { model_of({{"type", "unet"}, {"depthh", 2}}); }),
              HasSubstr("did you mean \"depth\"?"));
  const auto data_of = [&](json data) { return config::Section(data, "data", origins); };
  EXPECT_THAT(error_of<ConfigError>([&] { read_composites_options(data_of({{"sise", 64}})); }),
              HasSubstr("did you mean \"size\"?"));
  EXPECT_THAT(error_of<ConfigError>([&] { read_image_folder_options(data_of({{"images", "a"}})); }),
              HasSubstr("data.masks"));
  EXPECT_THAT(error_of<ConfigError>([&] {
                read_image_folder_options(data_of({{"images", "a"}, {"masks", "b"}, {"size", {3}}}));
              }),
              HasSubstr("data.size: found 1 numbers; expected two"));
  train::Registry registry;
  register_segmentation(registry);
  EXPECT_THAT(error_of<ConfigError>([&] {
                registry.make(config::Section(json{{"type", "unet"}, {"num_classes", 3}}, "model", origins),
                              data_of({{"type", "fashion_composites"}}));
              }),
              HasSubstr("model.num_classes: found 3"));
}

TEST(Segmentation, SplitIsRandomSeededAndWhole) {
  SegmentationOptions options = small_options();
  const auto split_of = [&] {
    const Segmentation task(options, std::make_unique<Squares>(41));
    EXPECT_EQ(task.eval_size(), 10);
    EXPECT_EQ(task.train_size(), 31);
    return task.validation_indices();
  };
  const std::vector<int64_t> split = split_of();
  EXPECT_EQ(split_of(), split);
  EXPECT_EQ(std::set<int64_t>(split.begin(), split.end()).size(), 10u);
  EXPECT_GT(*std::max_element(split.begin(), split.end()), 20) << "not the first ten";
  options.seed = 1;
  EXPECT_NE(split_of(), split);
}

TEST(Segmentation, ImagesMustBeLargeEnough) {
  SegmentationOptions options = small_options();
  options.model.depth = 5;
  EXPECT_THAT(
      error_of<ConfigError>([&] { Segmentation(options, std::make_unique<Squares>(8)); }),
      AllOf(HasSubstr("model.depth: found 5, which needs images of at least 32 x 32"), HasSubstr("16 x 16")));
}

TEST(Segmentation, FlipMirrorsImagesAndMasksAlike) {
  SegmentationOptions options = small_options();
  Segmentation plain(options, std::make_unique<Squares>(80));
  options.flip = true;
  Segmentation flipping(options, std::make_unique<Squares>(80));
  options.model.in_channels = 1;
  options.flip = false;
  Segmentation grey(options, std::make_unique<Squares>(80));
  std::vector<int64_t> all(60);
  std::iota(all.begin(), all.end(), 0);
  const train::Batch before = plain.train_batch(all, {}),
                     after = flipping.train_batch(all, at::make_generator<at::CPUGeneratorImpl>(uint64_t{1}));
  EXPECT_EQ(before.inputs[0].sizes(), (at::IntArrayRef{60, 3, 16, 16}));
  EXPECT_LE(before.inputs[0].max().item<float>(), 1);
  int num_same = 0, num_mirrored = 0;
  for (int64_t i = 0; i < 60; ++i) {
    num_same +=
        at::equal(after.inputs[0][i], before.inputs[0][i]) && at::equal(after.target[i], before.target[i]);
    num_mirrored += at::equal(after.inputs[0][i], before.inputs[0][i].flip(2)) &&
                    at::equal(after.target[i], before.target[i].flip(1));
  }
  EXPECT_EQ(num_same + num_mirrored, 60);
  EXPECT_GT(num_same, 10);
  EXPECT_GT(num_mirrored, 10);
  EXPECT_TRUE(at::equal(flipping.eval_batch({0, 1}).inputs[0], plain.eval_batch({0, 1}).inputs[0]))
      << "never in evaluation";
  const at::Tensor first = plain.eval_batch({0}).inputs[0][0];
  EXPECT_TRUE(at::allclose(grey.eval_batch({0}).inputs[0][0][0],
                           0.299 * first[0] + 0.587 * first[1] + 0.114 * first[2]));
}

class TrainedSegmentation : public ::testing::Test {
 protected:
  const TemporaryFolder temporary_{"segmentation"};
  const std::filesystem::path folder_ = temporary_.path() / "run";
};

// Two ranks have different samples, so their batch statistics differ: an evaluation must use
// those of one rank, and a checkpoint must store the same.
TEST_F(TrainedSegmentation, EvaluationIsThatOfOneRankOnAnyNumber) {
  std::map<std::string, std::pair<double, double>> found;
  const auto evaluate_on = [&](int world_size, int stage, bool from_checkpoint) {
    comm::run_threads(world_size, {}, [&](comm::CommunicatorPtr comm) {
      at::set_num_threads(1);
      Segmentation task(small_options(), std::make_unique<Squares>(54));  // 13 to evaluate
      Engine& engine = task.initialize(engine_config(stage, 4), comm, {});
      if (from_checkpoint) {
        engine.load_checkpoint(folder_.string());
      } else {
        train_steps(task, engine, 5, 4);
        engine.save_checkpoint(folder_.string());
      }
      const train::Evaluation evaluation = train::evaluate(task, engine, {.eval_batch_size = 2}, {});
      EXPECT_EQ(evaluation.num_samples, 13);
      if (comm->rank() == 0)
        found[std::to_string(world_size) + (from_checkpoint ? " loaded" : "")] = {
            evaluation.metrics[0].second, evaluation.metrics[1].second};
    });
  };
  evaluate_on(2, 2, false);
  for (const int world_size : {1, 2, 3}) evaluate_on(world_size, world_size == 3 ? 3 : 0, true);
  ASSERT_EQ(found.size(), 4u);
  const auto [dice, loss] = found.at("2");
  EXPECT_GT(dice, 0);
  for (const auto& [where, numbers] : found) {
    EXPECT_NEAR(numbers.first, dice, 1e-9) << where;
    EXPECT_NEAR(numbers.second, loss, 1e-9) << where;
  }
}

TEST_F(TrainedSegmentation, LearnsAndDrawsWhatItFinds) {
  for (const int64_t num_classes : {1, 2}) {
    comm::run_threads(2, {}, [&](comm::CommunicatorPtr comm) {
      at::set_num_threads(1);
      SegmentationOptions options = small_options();
      options.model.num_classes = num_classes;
      options.model.bilinear = num_classes == 1;
      Segmentation task(options, std::make_unique<Squares>(60));
      Engine& engine = task.initialize(engine_config(3, 8), comm, {});
      train_steps(task, engine, 150, 8);  // enough for any initial weights
      const train::Evaluation evaluation = train::evaluate(task, engine, {.eval_batch_size = 8}, {});
      EXPECT_EQ(evaluation.metrics[0].first, "dice");
      EXPECT_GT(evaluation.metrics[0].second, 0.95);
      task.write_samples(folder_ / "samples", 60);
      engine.train();
      train_steps(task, engine, 1, 8);  // training continues
    });
    const Image picture = read_image((folder_ / "samples" / "step_00000060.png").string());
    EXPECT_EQ(picture.width, 3 * (160 + 8));
    EXPECT_EQ(picture.height, 4 * (160 + 8));
    // The first sample's mask and, nearly, the same again as its prediction: white on black.
    const auto part_white = [&](int64_t column) {
      int64_t white = 0;
      for (int64_t row = 4; row < 164; ++row)
        for (int64_t x = 0; x < 160; ++x)
          white +=
              picture.pixels[static_cast<size_t>((row * picture.width + column * 168 + 4 + x) * 3)] == 255;
      return static_cast<double>(white) / (160 * 160);
    };
    EXPECT_GT(part_white(1), 0.02);
    EXPECT_NEAR(part_white(2), part_white(1), 0.02);
    std::filesystem::remove_all(folder_);
  }
}

TEST_F(TrainedSegmentation, PicturesThatCannotBeWrittenNameTheirPlace) {
  std::filesystem::create_directories(folder_);
  write_png((folder_ / "samples").string(), {1, 1, 1, {0}});  // a file where the folder should be
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
    Segmentation task(small_options(), std::make_unique<Squares>(12));
    Engine& engine = task.initialize(engine_config(0, 4), comm, {});
    engine.eval();
    EXPECT_THAT(error_of<DataError>([&] { task.write_samples(folder_ / "samples", 1); }),
                HasSubstr("step_00000001.png"));
    engine.train();
    train_steps(task, engine, 1, 4);
  });
}

}  // namespace
}  // namespace tessera::examples
