#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "comm/init/init.h"
#include "core/error.h"
#include "examples/fashion_mnist/dataset.h"
#include "examples/fashion_mnist/task.h"
#include "tests/examples/idx_files.h"

namespace tessera::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class FashionMnistTest : public IdxFolderTest {
 protected:
  // A small set in the same files: `count` images, labels 0..9 in turn.
  void write_set(uint32_t num_train = 40, uint32_t num_test = 20) const {
    write("train-images-idx3-ubyte.gz", gzipped(idx_bytes({num_train, 28, 28}, counting(num_train * 784))));
    write("train-labels-idx1-ubyte.gz", gzipped(idx_bytes({num_train}, counting(num_train, 10))));
    write("t10k-images-idx3-ubyte", idx_bytes({num_test, 28, 28}, counting(num_test * 784)));
    write("t10k-labels-idx1-ubyte", idx_bytes({num_test}, counting(num_test, 10)));
  }
  std::string load_error(Split split = Split::kTrain) const {
    try {
      load_split(folder_.string(), split);
    } catch (const DataError& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(FashionMnistTest, LoadsCompressedAndPlainFiles) {
  write_set();
  const LabelledImages train = load_split(folder_.string(), Split::kTrain);
  EXPECT_EQ(train.images.sizes(), (at::IntArrayRef{40, 1, 28, 28}));
  EXPECT_EQ(train.images[0][0][1][2].item<int>(), 30);
  EXPECT_EQ(train.labels[13].item<int>(), 3);
  EXPECT_EQ(load_split(folder_.string(), Split::kTest).size(), 20);
}

TEST_F(FashionMnistTest, NamesWhatIsMissing) {
  EXPECT_THAT(load_error(),
              AllOf(HasSubstr((folder_ / "train-images-idx3-ubyte").string() + "[.gz]: not found"),
                    HasSubstr("dataset-fashion-mnist"), Not(HasSubstr("\n"))));
  write("train-images-idx3-ubyte", idx_bytes({1, 28, 28}, counting(784)));
  EXPECT_THAT(load_error(), HasSubstr("train-labels-idx1-ubyte[.gz]: not found"));
}

TEST_F(FashionMnistTest, CountsMustAgree) {
  write_set();
  write("train-labels-idx1-ubyte.gz", gzipped(idx_bytes({39}, counting(39, 10))));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("39 labels"), HasSubstr("40 images")));
}

TEST_F(FashionMnistTest, LabelsMustBeInRange) {
  write_set();
  Bytes labels = counting(40, 10);
  labels[17] = 10;
  write("train-labels-idx1-ubyte.gz", gzipped(idx_bytes({40}, labels)));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("label 17 is 10"), HasSubstr("expected 0 to 9")));
}

TEST_F(FashionMnistTest, ImagesMustBe28By28) {
  write_set();
  write("train-images-idx3-ubyte.gz", gzipped(idx_bytes({10, 56, 56}, counting(10 * 56 * 56))));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("found 10 x 56 x 56"), HasSubstr("expected N x 28 x 28")));
}

TEST_F(FashionMnistTest, PixelStatisticsAreThoseOfTheImages) {
  write_set();
  const LabelledImages train = load_split(folder_.string(), Split::kTrain);
  const PixelStatistics statistics = pixel_statistics(train);
  const at::Tensor scaled = train.images.to(at::kDouble) / 255;
  EXPECT_NEAR(statistics.mean, scaled.mean().item<double>(), 1e-9);
  EXPECT_NEAR(statistics.std, scaled.std(/*unbiased=*/false).item<double>(), 1e-9);

  const LabelledImages black{at::zeros({2, 1, 28, 28}, at::kByte), at::zeros({2}, at::kByte)};
  EXPECT_EQ(pixel_statistics(black).std, 1) << "nothing is divided by zero";
}

TEST_F(FashionMnistTest, OptionsAreReadStrictly) {
  const auto read = [](const nlohmann::json& model, const nlohmann::json& data) {
    const config::Origins origins("run.json");
    return read_options(config::Section(model, "model", origins), config::Section(data, "data", origins));
  };
  const nlohmann::json model = {
      {"type", "fashion_mnist_cnn"}, {"channels", 8}, {"hidden", 16}, {"dropout", 0.25}};
  const auto options = read(model, {{"type", "fashion_mnist"}, {"path", "there"}, {"flip", true}});
  EXPECT_EQ(options.path, "there");
  EXPECT_TRUE(options.flip);
  EXPECT_EQ(options.model.channels, 8);
  EXPECT_EQ(options.model.hidden, 16);
  EXPECT_EQ(options.model.dropout, 0.25);
  EXPECT_THROW(read(model, {{"type", "fashion_mnist"}, {"labels", {"only", "two"}}}), ConfigError);
  EXPECT_THROW(read({{"type", "fashion_mnist_cnn"}, {"chanels", 8}}, {{"type", "fashion_mnist"}}),
               ConfigError);
  EXPECT_THROW(read({{"type", "fashion_mnist_cnn"}, {"dropout", 1.5}}, {{"type", "fashion_mnist"}}),
               ConfigError);
  EXPECT_THROW(read({{"type", "fashion_mnist_cnn"}}, {{"type", "fashion_mnist"}, {"root", "x"}}),
               ConfigError);
}

TEST_F(FashionMnistTest, BatchesAreNormalisedAndLossAndStatisticsAgree) {
  write_set();
  FashionMnistOptions options;
  options.path = folder_.string();
  options.model.channels = 4;
  options.model.dropout = 0;
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
    FashionMnist task(options);
    EXPECT_EQ(task.train_size(), 40);
    EXPECT_EQ(task.eval_size(), 20);
    EngineConfig config;
    config.train_batch_size = config.train_micro_batch_size_per_gpu = 20;
    task.initialize(config, comm, {});

    std::vector<int64_t> all(40);
    std::iota(all.begin(), all.end(), 0);
    const train::Batch train = task.train_batch(all, {});
    EXPECT_EQ(train.inputs[0].sizes(), (at::IntArrayRef{40, 1, 28, 28}));
    EXPECT_NEAR(train.inputs[0].mean().item<double>(), 0, 1e-5);
    EXPECT_NEAR(train.inputs[0].std(false).item<double>(), 1, 1e-5);

    const train::Batch batch = task.eval_batch({3, 1, 4, 1, 5});
    EXPECT_TRUE(at::equal(batch.target, at::tensor({3, 1, 4, 1, 5}, at::kLong)));
    const at::NoGradGuard no_grad;
    const at::Tensor sums = task.statistics(batch);
    EXPECT_EQ(sums[0].item<double>(), 5);
    EXPECT_NEAR(sums[1].item<double>() / 5, task.loss(batch).item<double>(), 1e-6);
    EXPECT_THAT(task.report(sums),
                AllOf(HasSubstr("precision    recall  f1-score   support\n"), HasSubstr("\n           9 ")));
  });
}

TEST_F(FashionMnistTest, FlipMirrorsSomeImagesAndKeepsTheRest) {
  write_set();
  FashionMnistOptions options;
  options.path = folder_.string();
  options.model.channels = 4;
  FashionMnist plain(options);
  options.flip = true;
  FashionMnist flipping(options);
  std::vector<int64_t> all(40);
  std::iota(all.begin(), all.end(), 0);
  const auto generator = [] { return at::make_generator<at::CPUGeneratorImpl>(uint64_t{1}); };
  const at::Tensor before = plain.train_batch(all, generator()).inputs[0];
  const at::Tensor after = flipping.train_batch(all, generator()).inputs[0];
  EXPECT_TRUE(at::equal(flipping.train_batch(all, generator()).inputs[0], after))
      << "the generator alone decides";
  int num_same = 0, num_mirrored = 0;
  for (int64_t i = 0; i < 40; ++i) {
    num_same += at::equal(after[i], before[i]);
    num_mirrored += at::equal(after[i], before[i].flip(2));
  }
  EXPECT_EQ(num_same + num_mirrored, 40);
  EXPECT_GT(num_same, 5);
  EXPECT_GT(num_mirrored, 5);
  EXPECT_TRUE(at::equal(flipping.eval_batch(all = {0, 1}).inputs[0], plain.eval_batch({0, 1}).inputs[0]))
      << "never in tests";
}

// The real data set, if Debian's package is installed.
TEST(FashionMnistData, TheRealSetIsAsPublished) {
  const std::string path = FashionMnistOptions{}.path;
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "Debian package dataset-fashion-mnist is not installed";
  const LabelledImages train = load_split(path, Split::kTrain);
  const LabelledImages test = load_split(path, Split::kTest);
  EXPECT_EQ(train.size(), 60000);
  EXPECT_EQ(test.size(), 10000);
  for (int64_t label = 0; label < 10; ++label) {
    EXPECT_EQ(train.labels.eq(label).sum().item<int64_t>(), 6000);
    EXPECT_EQ(test.labels.eq(label).sum().item<int64_t>(), 1000);
  }
  EXPECT_NEAR(pixel_statistics(train).mean, 0.2860, 1e-4);
  EXPECT_NEAR(pixel_statistics(train).std, 0.3530, 1e-4);
}

}  // namespace
}  // namespace tessera::examples
