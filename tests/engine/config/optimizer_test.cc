// Param groups of the section `optimizer` beside those that another program has saved.
#include "engine/config/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace tessera::config {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(DifferingValues, EachIsNamedWithBoth) {
  const AdamWOptions options{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.01};
  const json same = {{"lr", 0.1},    {"betas", {0.9, 0.95}}, {"eps", 1e-8},      {"weight_decay", 0.01},
                     {"amsgrad", 0}, {"foreach", nullptr},   {"maximize", false}};
  EXPECT_THAT(differing_values(options, same, false), IsEmpty());
  json other = same;
  other.update({{"betas", {0.9, 0.999}}, {"weight_decay", 0.1}, {"amsgrad", true}});
  EXPECT_THAT(differing_values(options, other, false),
              ElementsAre("betas: it was [0.9,0.999], and is [0.9,0.95]",
                          "weight_decay: it was 0.1, and is 0.01", "amsgrad: it was true, and is false"));
}

TEST(DifferingValues, NoneAndARoundedNumberAreNoDifference) {
  EXPECT_THAT(differing_values(AdafactorOptions{}, {{"eps", {nullptr, 0.001}}}, false), IsEmpty());
  EXPECT_THAT(differing_values(AdafactorOptions{}, {{"eps", {nullptr, 0.01}}}, false),
              ElementsAre(::testing::StartsWith("eps: it was [null,0.01], and is ")));
  EXPECT_THAT(differing_values(SGDOptions{.lr = 0.1}, {{"lr", static_cast<double>(0.1F)}}, false), IsEmpty());
}

TEST(DifferingValues, ARateIsTheOneThatAScheduleBeginsWith) {
  const SGDOptions options{.lr = 0.1, .momentum = 0.9};
  EXPECT_THAT(differing_values(options, {{"lr", 0.05}}, /*has_schedule=*/true), IsEmpty());
  EXPECT_THAT(differing_values(options, {{"lr", 0.05}, {"initial_lr", 0.1}}, true), IsEmpty());
  EXPECT_THAT(differing_values(options, {{"lr", 0.1}, {"initial_lr", 0.2}}, true),
              ElementsAre("lr: it was 0.2, and is 0.1"));
  EXPECT_THAT(differing_values(options, {{"lr", 0.05}}, /*has_schedule=*/false),
              ElementsAre("lr: it was 0.05, and is 0.1"));
}

TEST(DifferingValues, DecayInTheGradientOrBesideIt) {
  const json decoupled = {{"decoupled_weight_decay", true}}, coupled = {{"decoupled_weight_decay", false}};
  EXPECT_THAT(differing_values(AdamWOptions{.weight_decay = 0.1}, decoupled, false), IsEmpty());
  EXPECT_THAT(differing_values(AdamWOptions{.weight_decay = 0.1}, coupled, false),
              ElementsAre("decoupled_weight_decay: it was false, and is true"));
  EXPECT_THAT(differing_values(AdamOptions{.weight_decay = 0.1}, coupled, false), IsEmpty());
  EXPECT_THAT(differing_values(AdamOptions{.weight_decay = 0.1}, decoupled, false),
              ElementsAre("decoupled_weight_decay: it was true, and is false"));
  EXPECT_THAT(differing_values(AdamOptions{.weight_decay = 0.0}, decoupled, false), IsEmpty());
}

}  // namespace
}  // namespace tessera::config
