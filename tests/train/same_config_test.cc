// Ranks with different configurations fail at the start, all with the same message.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "tests/train/trainer_testing.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

class SameConfigTest : public TrainerTest {
 protected:
  /// The error of each of two ranks that train with these; "" for a rank that finishes.
  std::vector<std::string> errors(const std::vector<json>& configs, const std::vector<TrainerStart>& starts =
                                                                        std::vector<TrainerStart>(2)) const {
    std::vector<std::string> heard(2);
    comm::run_threads(2, {.timeout = std::chrono::seconds(60)}, [&](comm::CommunicatorPtr comm) {
      const auto rank = static_cast<size_t>(comm->rank());
      try {
        BlobsTask task({});
        Trainer(parse_run_config(configs[rank].dump(), "blobs.json", 2), task, comm, {}, {}, starts[rank])
            .run();
      } catch (const std::exception& error) {
        heard[rank] = error.what();
      }
    });
    return heard;
  }

  json with(const std::string& pointer, const json& value) const {
    json config = base_config();
    config["trainer"]["epochs"] = 1;
    config["trainer"]["save_every_epochs"] = 0;
    config[json::json_pointer(pointer)] = value;
    return config;
  }
};

TEST_F(SameConfigTest, KeysThatDifferAreNamedWithBothValues) {
  struct Case {
    const char* pointer;
    json on_rank_0, on_rank_1;
    const char* words;
  };
  const std::vector<Case> cases{
      {"/seed", 7, 8, "seed is 7 on rank 0, but 8 on rank 1"},
      {"/trainer/epochs", 1, 2, "trainer.epochs is 1 on rank 0, but 2 on rank 1"},
      {"/trainer/save_every_steps", 3, 0, "trainer.save_every_steps is 3 on rank 0, but 0 on rank 1"},
      {"/trainer/eval_every_steps", 0, 3, "trainer.eval_every_steps is 0 on rank 0, but 3 on rank 1"},
      {"/trainer/eval_batch_size", 16, 8, "trainer.eval_batch_size is 16 on rank 0, but 8 on rank 1"},
      {"/trainer/output_dir", folder_.string(), (folder_ / "b").string(), "trainer.output_dir is \""},
      {"/trainer/early_stopping_patience", 1, 2,
       "trainer.early_stopping_patience is 1 on rank 0, but 2 on rank 1"},
      {"/steps_per_print", 4, 5, "steps_per_print is 4 on rank 0, but 5 on rank 1"},
      {"/checkpoint/keep_last", 2, 3, "checkpoint.keep_last is 2 on rank 0, but 3 on rank 1"},
      {"/optimizer/params/lr", 0.01, 0.02, "optimizer.params.lr is 0.01 on rank 0, but 0.02 on rank 1"},
      {"/zero_optimization/stage", 2, 3, "zero_optimization.stage is 2 on rank 0, but 3 on rank 1"},
      {"/model/hidden", 16, 17, "model.hidden is 16 on rank 0, but 17 on rank 1"},
      {"/data/flip", true, "yes", "data.flip is true on rank 0, but \"yes\" on rank 1"},
  };
  constexpr size_t kNamedAtOnce = 4;
  for (size_t begin = 0; begin < cases.size(); begin += kNamedAtOnce) {
    json first = with("/trainer/device", "cpu"), second = first;
    const std::span some = std::span(cases).subspan(begin, std::min(kNamedAtOnce, cases.size() - begin));
    for (const Case& one : some) {
      first[json::json_pointer(one.pointer)] = one.on_rank_0;
      second[json::json_pointer(one.pointer)] = one.on_rank_1;
    }
    const std::vector<std::string> heard = errors({first, second});
    EXPECT_EQ(heard[0], heard[1]);
    EXPECT_THAT(heard[0], AllOf(HasSubstr("the same on all ranks"), Not(HasSubstr("\n"))));
    for (const Case& one : some) EXPECT_THAT(heard[0], HasSubstr(one.words));
    EXPECT_FALSE(fs::exists(folder_)) << "nothing was written";
  }
}

TEST_F(SameConfigTest, HowARunBeginsMustAgreeToo) {
  EXPECT_THAT(errors({with("/seed", 7), with("/seed", 7)}, {{.resume = true, .init = {}, .stop = {}}, {}}),
              Each(HasSubstr("--resume is true on rank 0, but false on rank 1")));
  EXPECT_THAT(errors({with("/seed", 7), with("/seed", 7)},
                     {{}, {.resume = false, .init = "weights.safetensors", .stop = {}}}),
              Each(HasSubstr("--init is false on rank 0, but true on rank 1")));
}

// Thread counts and paths of the data may differ between ranks: the contents of
// the data are compared separately.
TEST_F(SameConfigTest, WhatIsOneRanksOwnMayDiffer) {
  json other = with("/seed", 42);
  for (const auto& [pointer, value] :
       std::vector<std::pair<std::string, json>>{{"/trainer/num_threads", 1},
                                                 {"/trainer/dataloader_num_workers", 1},
                                                 {"/trainer/dataloader_prefetch_factor", 3},
                                                 {"/trainer/dataloader_pin_memory", false},
                                                 {"/data/path", "/elsewhere"},
                                                 {"/model/path", "model.pt"}})
    other[json::json_pointer(pointer)] = value;
  EXPECT_THAT(errors({with("/seed", 42), other}), Each(""));
}

}  // namespace
}  // namespace tessera::train
