// The text classification task: parts, batches, options, errors; it learns.
#include "examples/text_classification/task.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"
#include "train/report/classification.h"
#include "train/report/evaluate.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;
using nlohmann::json;

class TextClassificationTest : public ::testing::Test {
 protected:
  // A text is positive when 好 is in it, somewhere among other characters; all texts differ.
  TextClassificationOptions small() const {
    std::ofstream negative(folder_ / "neg.txt"), positive(folder_ / "pos.txt");
    for (int i = 0; i < 60; ++i) {
      const std::string filler = std::string(static_cast<size_t>(i % 7), 'x') + std::to_string(i);
      negative << "书" << filler << "坏\n";
      positive << (i % 2 == 0 ? "好" + filler : filler + "好") << "\n";
    }
    TextClassificationOptions options;
    options.path = folder_.string();
    options.max_length = 16;
    options.parts = {.validation_fraction = 0.2, .test_fraction = 0.1, .seed = 3};
    options.model = {.vocab_size = 0,
                     .hidden_size = 16,
                     .num_hidden_layers = 1,
                     .num_attention_heads = 2,
                     .intermediate_size = 32,
                     .max_position_embeddings = 16,
                     .hidden_dropout_prob = 0,
                     .attention_probs_dropout_prob = 0,
                     .classifier_dropout = 0};
    return options;
  }

  static EngineConfig config(int64_t micro_batch, int stage = 0) {
    EngineConfig config;
    config.train_micro_batch_size_per_gpu = micro_batch;
    config.optimizer.options = AdamWOptions{.lr = 0.01};
    config.zero.stage = stage;
    return config;
  }

  const TemporaryFolder temporary_{"text_classification"};
  const std::filesystem::path folder_ = temporary_.path();
};

TEST_F(TextClassificationTest, BatchesArePaddedToTheirLongest) {
  EncodedTexts texts;
  texts.add(std::vector<int32_t>{2, 7, 3});
  texts.add(std::vector<int32_t>{2, 5, 5, 5, 5, 5, 5, 5, 3});
  const PaddedTexts one = texts.batch({0}, 9, 20);
  EXPECT_TRUE(at::equal(one.input_ids, at::tensor({2, 7, 3, 9, 9, 9, 9, 9}, at::kLong).view({1, 8})));
  EXPECT_TRUE(at::equal(one.attention_mask.sum(1), at::tensor({3}, at::kLong)));
  EXPECT_EQ(texts.batch({1, 0}, 0, 20).input_ids.sizes(), (at::IntArrayRef{2, 16})) << "a multiple of 8";
  const PaddedTexts both = texts.batch({1, 0}, 0, 12);
  EXPECT_EQ(both.input_ids.sizes(), (at::IntArrayRef{2, 12}))
      << "but not more than the model has positions for";
  EXPECT_TRUE(at::equal(both.attention_mask.sum(1), at::tensor({9, 3}, at::kLong)));
  EXPECT_TRUE(at::equal(both.input_ids.ne(0), both.attention_mask));
}

TEST_F(TextClassificationTest, PartsAndVocabularyComeFromTheData) {
  TextClassificationOptions options = small();
  const TextClassification task(options);
  EXPECT_EQ(task.train_size(), 84);
  EXPECT_EQ(task.eval_size(), 24);
  EXPECT_EQ(task.test_size(), 12);
  const auto files = task.files();
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(files[0].first, "vocab.txt");
  EXPECT_EQ(files[0].second.substr(0, 26), "[PAD]\n[UNK]\n[CLS]\n[SEP]\nx\n") << "x is the most frequent";

  std::ofstream(folder_ / "vocab.txt") << files[0].second;
  options.vocab = (folder_ / "vocab.txt").string();
  options.min_frequency = 1000;  // has no effect on a given vocabulary
  EXPECT_EQ(TextClassification(options).tokenizer().vocabulary().tokens(),
            task.tokenizer().vocabulary().tokens());
}

TEST_F(TextClassificationTest, PaddingChangesNoLogits) {
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
    TextClassification task(small());
    Engine& engine = task.initialize(config(4), comm, {});
    engine.eval();
    const at::NoGradGuard no_grad;
    const train::Batch batch = task.eval_batch({0, 1, 2, 3, 4, 5, 6, 7});
    const at::Tensor together = task.engine().forward(batch.inputs[0], batch.inputs[1]);
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t length = batch.inputs[1][i].sum().item<int64_t>();
      const at::Tensor ids = batch.inputs[0].narrow(0, i, 1).narrow(1, 0, length);
      EXPECT_TRUE(at::allclose(task.engine().forward(ids)[0], together[i], 1e-5, 1e-6)) << i;
    }
  });
}

TEST_F(TextClassificationTest, LearnsAtTheFirstAndTheLastStage) {
  const TextClassificationOptions options = small();
  for (const int stage : {0, 3}) {  // parity_test has the others
    comm::run_threads(2, {}, [&](comm::CommunicatorPtr comm) {
      at::set_num_threads(1);
      TextClassification task(options);
      Engine& engine = task.initialize(config(10, stage), comm, {});
      at::Tensor loss;
      for (int64_t step = 0; step < 60; ++step) {
        std::vector<int64_t> rows(10);
        std::iota(rows.begin(), rows.end(), 20 * step + 10 * comm->rank());
        for (int64_t& row : rows) row %= task.train_size();
        loss = task.loss(task.train_batch(rows, {}));
        engine.backward(loss);
        engine.step();
      }
      const train::Evaluation on_the_way = train::evaluate(task, engine, {.eval_batch_size = 5}, {});
      EXPECT_EQ(on_the_way.num_samples, 24);
      EXPECT_EQ(on_the_way.set, "validation");
      const train::Evaluation test =
          train::evaluate(task, engine, {.eval_batch_size = 5}, {}, train::EvaluationSet::kTest);
      EXPECT_EQ(test.num_samples, 12);
      ASSERT_EQ(test.metrics.size(), 3u);
      EXPECT_EQ(test.metrics[0], std::pair(std::string("accuracy"), 1.0)) << "one character says it";
      EXPECT_EQ(test.metrics[1], std::pair(std::string("f1"), 1.0));
      EXPECT_EQ(test.metrics[2].first, "loss");
      EXPECT_LT(test.metrics[2].second, 0.1);
      EXPECT_THAT(test.report, AllOf(HasSubstr("\n         neg     1.0000"), HasSubstr("macro avg")));
    });
  }
}

TEST_F(TextClassificationTest, HuggingFacesInitialisation) {
  BertOptions options;
  options.vocab_size = 500;
  options.num_labels = 3;
  const BertForSequenceClassification model(options);
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    const at::Tensor& weight = item.value();
    if (weight.dim() == 1) {
      const double expected = name.ends_with("LayerNorm.weight") ? 1 : 0;
      EXPECT_TRUE(weight.eq(expected).all().item<bool>()) << name;
    } else if (weight.numel() > 1000) {
      EXPECT_NEAR(weight.std().item<double>(), 0.02, 0.002) << name;
    }
  }
  EXPECT_EQ(model->bert->embeddings->word_embeddings->weight[0].abs().sum().item<double>(), 0) << "padding";
  EXPECT_EQ(model->classifier->weight.size(0), 3);
}

class TextOptionsTest : public ::testing::Test {
 protected:
  static TextClassificationOptions read(const json& model, const json& data) {
    const config::Origins origins("run.json");
    json whole_model = {{"type", "bert"}}, whole_data = {{"type", "labelled_text"}, {"path", "there"}};
    if (model.is_object()) whole_model.update(model);  // {} is null to this library
    if (data.is_object()) whole_data.update(data);
    return read_text_classification_options(config::Section(whole_model, "model", origins),
                                            config::Section(whole_data, "data", origins));
  }
  static std::string error(const json& model, const json& data) {
    return error_of<ConfigError>([&] { read(model, data); });
  }
};

TEST_F(TextOptionsTest, AreReadStrictly) {
  const TextClassificationOptions options =
      read({{"hidden_size", 12}, {"num_attention_heads", 3}, {"hidden_dropout_prob", 0.25}},
           {{"labels", {"a", "b", "c"}}, {"split_seed", 7}});
  EXPECT_EQ(options.model.num_labels, 3);
  EXPECT_EQ(options.model.intermediate_size, 48) << "4 times hidden_size";
  EXPECT_EQ(options.model.classifier_dropout, 0.25) << "hidden_dropout_prob's";
  EXPECT_EQ(options.parts.seed, 7u);
  EXPECT_EQ(options.max_length, 128);
  EXPECT_EQ(read({{"max_position_embeddings", 20}}, {}).max_length, 20);
  EXPECT_THAT(error({{"hiden_size", 8}}, {}),
              HasSubstr("model.hiden_size: unknown key (did you mean \"hidden_size\"?)"));
  EXPECT_THAT(error({{"num_attention_heads", 3}}, {}),
              HasSubstr("model.num_attention_heads: found 3, which does not divide model.hidden_size, 128"));
  EXPECT_THAT(error({}, {{"max_length", 600}}),
              HasSubstr("data.max_length: found 600 tokens, but the model has positions for 512"));
  EXPECT_THAT(error({}, {{"tokenizer", "wordpiece"}}),
              AllOf(HasSubstr("data.vocab: not found"), HasSubstr("expected the file vocab.txt")));
  EXPECT_THAT(error({}, {{"tokenizer", "bytes"}}), HasSubstr("data.tokenizer"));
  EXPECT_THAT(error({}, {{"labels", {"a"}}}), HasSubstr("data.labels: found a; expected at least two"));
  EXPECT_THAT(error({}, {{"labels", {"a", "a"}}}), HasSubstr("each once"));
  EXPECT_THAT(error({}, {{"validation_fraction", 0.5}, {"test_fraction", 0.5}}),
              HasSubstr("data.test_fraction: found 0.5 beside"));
}

TEST_F(TextClassificationTest, TheModelsVocabularyMustHoldTheTokenizers) {
  TextClassificationOptions options = small();
  options.model.vocab_size = 5;
  EXPECT_THAT(error_of<ConfigError>([&] { TextClassification task(options); }),
              HasSubstr("model.vocab_size: found 5, but the vocabulary has "));
  options.model.vocab_size = 1000;
  EXPECT_EQ(TextClassification(options).train_size(), 84);
}

}  // namespace
}  // namespace tessera::examples
