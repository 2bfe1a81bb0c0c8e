// Section: free-form objects, read as strictly as the tables.
#include "engine/config/section.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/engine/config/config_testing.h"

namespace tessera::config {
namespace {

using nlohmann::json;

struct Model {
  Document document = parse_document(
      "{\n\"model\": {\n\"hidden\": 128, \"rate\": 5e-1, \"deep\": true,\n\"kind\": \"GELU\", \"sizes\": [1, "
      "2e1], \"inner\": {\"x\": 1}, \"_why\": 1}}",
      "c.json");
  Section section{(*document.json)["model"], "model", document.origins};
};

TEST(ConfigSection, TypedGettersAndDefaults) {
  Model m;
  EXPECT_EQ(m.section.integer("hidden", 1, 1, 1000), 128);
  EXPECT_EQ(m.section.integer("layers", 3, 1, 10), 3);
  EXPECT_EQ(m.section.number("rate", 0.0, 0.0, 1.0), 0.5);
  EXPECT_TRUE(m.section.boolean("deep", false));
  EXPECT_EQ(m.section.choice("kind", "relu", {"relu", "gelu"}), "gelu");
  EXPECT_EQ(m.section.integers("sizes", {}, 0, 100), (std::vector<int64_t>{1, 20}));
  EXPECT_EQ(m.section.texts("names", {"a"}), std::vector<std::string>{"a"});
  EXPECT_EQ(m.section.section("inner").required_integer("x", 0, 9), 1);
  EXPECT_EQ(m.section.section("none").text("y", "z"), "z");
  m.section.finish();
  EXPECT_EQ(m.section.resolved()["layers"], 3);
  EXPECT_EQ(m.section.resolved()["hidden"], 128);
}

TEST(ConfigSection, ErrorsNamePathAndWhatIsAccepted) {
  Model m;
  auto error = [&](auto call) {
    return config_error([&] {
      call();
      m.section.finish();
    });
  };
  m.section.integer("hidden", 1, 1, 1000), m.section.number("rate", 0, 0, 1), m.section.boolean("deep", true),
      m.section.text("kind", ""), m.section.numbers("sizes", {}, 0, 100), m.section.section("inner");
  EXPECT_EQ(error([&] { m.section.integer("hidden", 1, 1, 100); }),
            "c.json:3: model.hidden: found 128 (a number); expected an integer from 1 to 100");
  EXPECT_EQ(error([&] { m.section.integer("rate", 1, 1, 100); }),
            "c.json:3: model.rate: found 0.5 (a number); expected an integer from 1 to 100");
  EXPECT_EQ(error([&] { m.section.boolean("hidden", true); }),
            "c.json:3: model.hidden: found 128 (a number); expected true or false");
  EXPECT_EQ(error([&] { m.section.number("deep", 0, 0, 1); }),
            "c.json:3: model.deep: found true (a boolean); expected a number from 0 to 1");
  EXPECT_EQ(error([&] { m.section.choice("kind", "a", {"tanh", "gelu2"}); }),
            "c.json:4: model.kind: found \"GELU\" (a string); expected one of \"tanh\", \"gelu2\" (did you "
            "mean \"gelu2\"?)");
  EXPECT_EQ(error([&] { m.section.texts("sizes", {}); }),
            "c.json:4: model.sizes: found 1 (a number); expected a string");
  EXPECT_EQ(error([&] { m.section.integers("hidden", {}, 0, 1); }),
            "c.json:3: model.hidden: found 128 (a number); expected a list of integers");
  EXPECT_EQ(error([&] { m.section.section("hidden"); }),
            "c.json:3: model.hidden: found 128 (a number); expected a section {…}");
  EXPECT_EQ(error([&] { m.section.required_text("type"); }),
            "c.json:2: model.type: is missing; expected a string");
}

TEST(ConfigSection, FinishTellsAllMistakesInTheOrderOfTheFile) {
  Model m;
  EXPECT_EQ(m.section.choice("kind", "relu", {"relu", "tanh"}), "relu") << "the fallback, until finish()";
  EXPECT_EQ(m.section.integer("hidden", 5, 1, 100), 5);
  m.section.number("rate", 0, 0, 1), m.section.boolean("deep", true), m.section.integers("size", {}, 0, 100);
  EXPECT_EQ(config_error([&] { m.section.finish(); }),
            "c.json:3: model.hidden: found 128 (a number); expected an integer from 1 to 100\n"
            "c.json:4: model.kind: found \"GELU\" (a string); expected one of \"relu\", \"tanh\" (did you "
            "mean \"relu\"?)\n"
            "c.json:4: model.sizes: unknown key (did you mean \"size\"?), found [1,20.0] (a list); expected "
            "one of deep, hidden, kind, rate, size\n"
            "c.json:4: model.inner: unknown key, found {\"x\":1} (a section); expected one of deep, hidden, "
            "kind, rate, size");
  m.section.section("inner"), m.section.integers("sizes", {}, 0, 100);
  m.section.finish();  // each error is reported once
}

}  // namespace
}  // namespace tessera::config
