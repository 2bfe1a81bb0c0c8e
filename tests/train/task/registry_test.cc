#include "train/task/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "tests/support/errors.h"
#include "tests/train/blobs_task.h"

namespace tessera::train {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Registry registry() {
  Registry registry;
  register_blobs(registry);
  registry.add(
      "fashion_mnist", "fashion_mnist_cnn",
      [](const config::Section&, const config::Section&, const std::filesystem::path&) { return nullptr; });
  return registry;
}

std::unique_ptr<Task> make(const json& model, const json& data) {
  const config::Origins origins("run.json");
  return registry().make(config::Section(model, "model", origins), config::Section(data, "data", origins));
}

std::string error_of(const json& model, const json& data) {
  return tessera::testing::error_of<ConfigError>([&] { make(model, data); });
}

TEST(Registry, MakesWhatIsAskedFor) {
  const auto task = make({{"type", "mlp"}, {"hidden", 5}}, {{"type", "blobs"}, {"train_size", 77}});
  ASSERT_TRUE(task);
  EXPECT_EQ(task->name(), "blobs");
  EXPECT_EQ(task->train_size(), 77);
}

TEST(Registry, UnknownNamesListTheKnownAndTheNearest) {
  EXPECT_THAT(error_of({{"type", "mlp"}}, {{"type", "blob"}}),
              AllOf(HasSubstr("data.type: unknown data set \"blob\""), HasSubstr("did you mean \"blobs\"?"),
                    HasSubstr("known: blobs, fashion_mnist"), Not(HasSubstr("\n"))));
  EXPECT_THAT(
      error_of({{"type", "fashion_mnist_cn"}}, {{"type", "fashion_mnist"}}),
      AllOf(HasSubstr("model.type: unknown model \"fashion_mnist_cn\" for data.type \"fashion_mnist\""),
            HasSubstr("did you mean \"fashion_mnist_cnn\"?"), Not(HasSubstr("mlp"))));
  EXPECT_THAT(error_of({{"type", "mlp"}}, {{"type", "entirely different"}}), Not(HasSubstr("did you mean")));
}

TEST(Registry, MissingOrWronglyTypedNames) {
  EXPECT_THAT(error_of({{"type", "mlp"}}, json::object()), HasSubstr("data.type"));
  EXPECT_THAT(error_of(json::object(), {{"type", "blobs"}}), HasSubstr("model.type"));
  EXPECT_THAT(error_of({{"type", 3}}, {{"type", "blobs"}}), AllOf(HasSubstr("model.type"), HasSubstr("3")));
}

TEST(Registry, MistypedOptionsAreFound) {
  EXPECT_THAT(error_of({{"type", "mlp"}, {"hiden", 5}}, {{"type", "blobs"}}),
              AllOf(HasSubstr("model.hiden"), HasSubstr("did you mean \"hidden\"?")));
  EXPECT_THAT(error_of({{"type", "mlp"}, {"hidden", "five"}}, {{"type", "blobs"}}),
              HasSubstr("model.hidden"));
}

TEST(Registry, EmptyOneSaysSo) {
  const config::Section model(json{{"type", "a"}}, "model", config::Origins("run.json"));
  const config::Section data(json{{"type", "b"}}, "data", config::Origins("run.json"));
  EXPECT_THROW(Registry().make(model, data), ConfigError);
}

}  // namespace
}  // namespace tessera::train
