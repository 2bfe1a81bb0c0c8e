// One run at a time in an output folder.
#include <unistd.h>

#include <atomic>

#include "tests/support/errors.h"
#include "tests/train/trainer_testing.h"
#include "train/trained_run.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class OutputFolderTest : public TrainerTest {
 protected:
  /// Trains, and calls `body` before step 15 of 30.
  void in_the_middle_of_a_run(int world_size, const std::function<void()>& body) const {
    std::atomic<int64_t> num_asked = 0;
    TrainerStart start;
    start.stop = [&] {
      if (++num_asked == 15 * world_size) body();
      return false;
    };
    EXPECT_EQ(train(base_config(), world_size, {}, false, start).summary.num_steps, 30);
  }

  /// A second run in the folder, with its own log and output.
  std::string second(bool resume, bool overwrite) const {
    json config = base_config();
    config["trainer"]["overwrite_output_dir"] = overwrite;
    return tessera::testing::error_of<ConfigError>([&] {
      comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
        BlobsTask task({});
        Trainer(parse_run_config(config.dump(), "blobs.json", 1), task, comm, {}, {},
                {.resume = resume, .init = {}, .stop = {}})
            .run();
      });
    });
  }
};

TEST_F(OutputFolderTest, ASecondRunIsRefusedWhileTheFirstOneLives) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  in_the_middle_of_a_run(2, [&] {
    const std::string metrics = read_text(folder_ / "metrics.jsonl"),
                      config = read_text(folder_ / "config.json");
    for (const bool resume : {false, true})
      for (const bool overwrite : {false, true})
        EXPECT_THAT(second(resume, overwrite), AllOf(HasSubstr("trainer.output_dir: " + folder_.string()),
                                                     HasSubstr("process " + std::to_string(getpid())),
                                                     HasSubstr(host), Not(HasSubstr("\n"))));
    EXPECT_EQ(read_text(folder_ / "metrics.jsonl"), metrics);
    EXPECT_EQ(read_text(folder_ / "config.json"), config);
    EXPECT_TRUE(fs::exists(folder_ / "checkpoints" / "latest")) << "nothing was moved";
    open_run(folder_, 1);  // reading is allowed
  });
  EXPECT_EQ(second(true, false), "") << "the first one has ended";
  EXPECT_EQ(second(false, false), "");
}

}  // namespace
}  // namespace tessera::train
