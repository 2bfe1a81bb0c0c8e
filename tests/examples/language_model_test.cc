// The language model's text windows, its task and its errors; it learns a text
// and counts every sample once.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "examples/language_model/task.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"
#include "train/report/evaluate.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class LanguageModelTest : public ::testing::Test {
 protected:
  std::string write(const std::string& text) const {
    std::ofstream(path_, std::ios::binary) << text;
    return path_.string();
  }
  const TemporaryFolder folder_{"language_model"};
  const std::filesystem::path path_ = folder_.path() / "text.txt";
};

TEST_F(LanguageModelTest, WindowsLieSideBySideAndKnowTheNextByte) {
  const ByteText text(write("abcdefghij\xff"), 5);
  EXPECT_EQ(text.num_windows(), 2);
  const at::Tensor rows = text.windows({1, 0});
  EXPECT_TRUE(at::equal(rows[1], at::tensor({'a', 'b', 'c', 'd', 'e', 'f'}, at::kLong)));
  EXPECT_TRUE(at::equal(rows[0], at::tensor({102, 103, 104, 105, 106, 255}, at::kLong)));
  EXPECT_EQ(ByteText(write("abcdef"), 5).num_windows(), 1);
}

TEST_F(LanguageModelTest, MistakesNameTheFile) {
  EXPECT_THAT(error_of<DataError>([&] { ByteText(path_.string(), 4); }),
              AllOf(HasSubstr(path_.string() + ": cannot be read"), Not(HasSubstr("\n"))));
  EXPECT_THAT(error_of<DataError>([&] { ByteText(path_.parent_path().string(), 4); }),
              HasSubstr("cannot be read"));
  EXPECT_THAT(error_of<DataError>([&] { ByteText(write("abcd"), 4); }),
              HasSubstr("has 4 bytes; expected at least 5"));
  EXPECT_THAT(error_of<DataError>([&] { ByteText(write(""), 4); }), HasSubstr("has 0 bytes"));
}

LanguageModelOptions small(const std::string& path) {
  LanguageModelOptions options;
  options.path = path;
  options.test_fraction = 0.25;
  options.sample = {.prompt = "abcd", .num_bytes = 4, .sequence = 8, .temperature = 0};
  options.model = {.dim = 16, .layers = 1, .heads = 2, .vocabulary = 256, .sequence = 8};
  return options;
}

TEST_F(LanguageModelTest, TheEndOfTheTextIsHeldOut) {
  const LanguageModel task(small(write("aaaaaaaabbbbbbbbccccccccdddddddde")));
  ASSERT_EQ(task.train_size(), 3);
  ASSERT_EQ(task.eval_size(), 1);
  EXPECT_TRUE(
      at::equal(task.train_batch({2, 0}, {}).inputs[0].select(1, 0), at::tensor({'c', 'a'}, at::kLong)));
  const train::Batch held_out = task.eval_batch({0});
  EXPECT_TRUE(at::equal(held_out.inputs[0], at::full({1, 8}, 'd', at::kLong)));
  EXPECT_EQ(held_out.target[0][7].item<int64_t>(), 'e');
}

TEST_F(LanguageModelTest, LearnsATextAtTheFirstAndTheLastStage) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "abcdefgh";
  write(text + "a");
  for (const int stage : {0, 3}) {  // parity_test has the others
    comm::run_threads(2, {}, [&](comm::CommunicatorPtr comm) {
      at::set_num_threads(1);
      LanguageModel task(small(path_.string()));
      EXPECT_EQ(task.train_size(), 45);
      EXPECT_EQ(task.eval_size(), 15);
      EngineConfig config;
      config.train_micro_batch_size_per_gpu = 5;
      config.optimizer.options = AdamWOptions{.lr = 0.03};
      config.zero.stage = stage;
      Engine& engine = task.initialize(config, comm, {});
      double loss = 0;
      for (int64_t step = 0; step < 40; ++step) {
        std::vector<int64_t> rows;
        for (int64_t i = 0; i < 5; ++i)
          rows.push_back((10 * step + 5 * comm->rank() + i) % task.train_size());
        const at::Tensor tensor = task.loss(task.train_batch(rows, {}));
        loss = tensor.item<double>();
        engine.backward(tensor);
        engine.step();
      }
      EXPECT_LT(loss, 0.2) << "every byte follows from the one before";
      const train::Evaluation evaluation = train::evaluate(task, engine, {.eval_batch_size = 4}, {});
      EXPECT_EQ(evaluation.num_samples, 15);
      ASSERT_EQ(evaluation.metrics.size(), 2u);
      EXPECT_EQ(evaluation.metrics[0].first, "loss");
      EXPECT_LT(evaluation.metrics[0].second, 0.2);
      EXPECT_EQ(evaluation.metrics[1].first, "perplexity");
      EXPECT_NEAR(evaluation.metrics[1].second, std::exp(evaluation.metrics[0].second), 1e-9);
      const std::filesystem::path samples = path_.string() + "_samples";
      task.write_samples(samples, 40);
      comm->barrier("written");
      EXPECT_EQ(read_text(samples / "step_00000040.txt"), "abcdefgh");
      comm->barrier("read");
      if (comm->rank() == 0) std::filesystem::remove_all(samples);
    });
  }
}

TEST_F(LanguageModelTest, TheLossInChunksIsAKeyOfItsModel) {
  write(std::string(40, 'a') + "bcdefghijklmnopqrstuvwxyz");
  const auto result_with = [&](int chunk_rows) {
    const nlohmann::json model = {{"type", "gpt"}, {"dim", 16},     {"layers", 1},
                                  {"heads", 2},    {"sequence", 8}, {"loss_chunk_rows", chunk_rows}};
    const nlohmann::json data = {{"type", "text"}, {"path", path_.string()}};
    const config::Origins origins("run.json");
    const LanguageModelOptions options = read_language_model_options(config::Section(model, "model", origins),
                                                                     config::Section(data, "data", origins));
    EXPECT_EQ(options.model.loss != nullptr, chunk_rows > 0);
    std::pair<double, at::Tensor> result;
    comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
      at::manual_seed(1);
      LanguageModel task(options);
      EngineConfig config;
      config.train_micro_batch_size_per_gpu = 4;
      Engine& engine = task.initialize(config, comm, {});
      const at::Tensor loss = task.loss(task.train_batch({2, 3, 4, 5}, {}));
      engine.backward(loss);
      result = {loss.item<double>(), engine.full_gradient("head.weight")};
    });
    return result;
  };
  const auto [plain, plain_gradient] = result_with(0);
  const auto [chunked, gradient] = result_with(5);
  EXPECT_NEAR(chunked, plain, 1e-6);
  EXPECT_TRUE(at::allclose(gradient, plain_gradient, 0, 1e-6));
  EXPECT_FALSE(at::equal(gradient, plain_gradient)) << "sums of 5 rows, then of chunks: other rounding";
}

TEST_F(LanguageModelTest, SamplesAreWholeOrAbsent) {
  write(std::string(100, 'a'));
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
    LanguageModel task(small(path_.string()));
    EngineConfig config;
    config.train_micro_batch_size_per_gpu = 1;
    task.initialize(config, comm, {}).eval();
    const std::filesystem::path samples = folder_.path() / "samples", file = samples / "step_00000001.txt";
    std::filesystem::create_directory(samples);
    std::ofstream(file) << "before";
    std::filesystem::create_hard_link(file, folder_.path() / "kept");
    ASSERT_EQ(task.write_samples(samples, 1).size(), 1u);
    EXPECT_EQ(std::filesystem::file_size(file), 8u);
    EXPECT_EQ(std::filesystem::file_size(folder_.path() / "kept"), 6u)
        << "written in place, where a kill leaves half of it";
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(samples), {}), 1);
    std::filesystem::create_directory(samples / "step_00000002.txt");
    EXPECT_THAT(error_of<DataError>([&] { task.write_samples(samples, 2); }), HasSubstr("step_00000002.txt"));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(samples), {}), 2);
  });
}

/// A model whose next byte is certain, or one of two with the given odds; bytes up
/// to 255 of a vocabulary of 300.
at::Tensor logits_of_next(const at::Tensor& bytes, double odds) {
  at::Tensor logits = at::full({1, bytes.size(1), 300}, -100.0);
  logits.narrow(2, 256, 44).fill_(100.0);  // not bytes
  for (int64_t k = 0; k < bytes.size(1); ++k) {
    const int64_t next = (bytes[0][k].item<int64_t>() + 1) % 256;
    logits[0][k][next] = std::log(odds);
    logits[0][k][(next + 1) % 256] = std::log(1 - odds);
  }
  return logits;
}

TEST(SampleText, GoesOnFromThePromptWithinTheSequence) {
  int64_t longest = 0;
  const auto logits = [&](const at::Tensor& bytes) {
    longest = std::max(longest, bytes.size(1));
    return logits_of_next(bytes, 0.75);
  };
  EXPECT_EQ(sample_text(logits, {.prompt = "ab", .num_bytes = 6, .sequence = 4, .temperature = 0}), "cdefgh");
  EXPECT_EQ(longest, 4);
  EXPECT_EQ(sample_text(logits, {.prompt = "\xff", .num_bytes = 2, .temperature = 0}),
            std::string("\0\x01", 2));
  EXPECT_EQ(sample_text(logits, {.num_bytes = 0}), "");
}

TEST(SampleText, DrawsWithTheModelsOdds) {
  const auto share_of_ones = [](double temperature, uint64_t seed) {
    const std::string text = sample_text(
        [](const at::Tensor& bytes) { return logits_of_next(bytes, 0.75); },
        {.prompt = "a", .num_bytes = 2000, .sequence = 1, .temperature = temperature, .seed = seed});
    int ones = 0;
    unsigned char last = 'a';
    for (const char byte : text) {
      const int step = static_cast<unsigned char>(static_cast<unsigned char>(byte) - last);
      EXPECT_TRUE(step == 1 || step == 2);
      ones += step == 1 ? 1 : 0;
      last = static_cast<unsigned char>(byte);
    }
    return ones / 2000.0;
  };
  EXPECT_NEAR(share_of_ones(1.0, 1), 0.75, 0.04);  // 4 standard deviations
  EXPECT_NEAR(share_of_ones(0.5, 2), 0.9, 0.03);   // odds of 3 to 1, squared
  EXPECT_EQ(share_of_ones(1.0, 3), share_of_ones(1.0, 3));
  EXPECT_NE(share_of_ones(1.0, 3), share_of_ones(1.0, 4));
}

}  // namespace
}  // namespace tessera::examples
