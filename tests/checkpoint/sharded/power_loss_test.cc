// After a power loss at any moment of a save, the old or the new checkpoint loads; after the save, the new
// one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "checkpoint/formats/model_writer.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/checkpoint/expect_whole.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"
#include "tests/support/power_loss.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using tessera::testing::FileRecorder;
using ::testing::Each;
using ::testing::IsEmpty;
using Unsynced = FileRecorder::Unsynced;

constexpr int kNumChances = 4;

DiskOptions synced(int) { return {.sync = true, .probe = {}}; }

/// Calls `check(folder, is_end)` for every state of `root` that a power loss may leave after each operation
/// of `action`.
int lose_power_everywhere(const fs::path& root, const std::function<void()>& action,
                          const std::function<void(const fs::path&, bool)>& check) {
  const MemoryFolder copies;
  FileRecorder recorder(root);
  action();
  recorder.stop();
  const fs::path copy = copies.path() / "copy";
  for (int end = 0; end <= recorder.size(); ++end) {
    for (int variant = 0; variant < 4 + kNumChances; ++variant) {
      const auto unsynced = static_cast<Unsynced>(std::min(variant, static_cast<int>(Unsynced::kChance)));
      SCOPED_TRACE(str("after operation ", end, " of ", recorder.size(),
                       end == 0 ? "" : ", " + recorder.describe(end - 1), ", variant ", variant));
      recorder.replay(end, unsynced, static_cast<uint64_t>(1000 * end + variant), copy);
      check(copy, end == recorder.size());
      fs::remove_all(copy);
      if (::testing::Test::HasFailure()) return recorder.size();
    }
  }
  return recorder.size();
}

bool is_new(const fs::path& directory) {
  return Checkpoint::open(directory).manifest().state.at("global_step") == 2;
}

TEST(PowerLoss, OfASaveLeavesTheOldCheckpointOrTheNewOne) {
  const SampleModel before = sample_model(2, 1), after = sample_model(2, 2);
  for (const char* tag : {"a", "b"}) {
    SCOPED_TRACE(tag);
    const MemoryFolder folder;
    ASSERT_THAT(save_all(before, folder.path(), "a"), Each(IsEmpty()));
    const int num_operations = lose_power_everywhere(
        folder.path(), [&] { EXPECT_THAT(save_all(after, folder.path(), tag, synced), Each(IsEmpty())); },
        [&](const fs::path& left, bool is_end) {
          expect_whole(left, before, after);
          if (is_end && !HasFailure()) {
            EXPECT_TRUE(is_new(left)) << "the save had returned";
          }
        });
    EXPECT_GT(num_operations, 30);
  }
}

TEST(PowerLoss, OfTheFirstSaveLeavesNothingOrAll) {
  const SampleModel model = sample_model(2, 2);
  const MemoryFolder folder;
  lose_power_everywhere(
      folder.path(),
      [&] {
        EXPECT_THAT(save_all(model, folder.path() / "run" / "checkpoints", "a", synced), Each(IsEmpty()));
      },
      [&](const fs::path& left, bool is_end) {
        const fs::path directory = left / "run" / "checkpoints";
        if (is_end || fs::exists(directory / kLatestName)) expect_whole(directory, model, model);
        for (const std::string& tag : list_checkpoints(directory))
          EXPECT_EQ(model.difference(Checkpoint::open(directory, tag)), "");
      });
}

TEST(PowerLoss, WhileOldCheckpointsAreDeleted) {
  const SampleModel before = sample_model(1, 1), after = sample_model(1, 2);
  const MemoryFolder folder;
  for (const char* tag : {"step1", "step2"}) save_all(before, folder.path(), tag);
  save_all(after, folder.path(), "step3");
  lose_power_everywhere(
      folder.path(), [&] { keep_last(folder.path(), {.num = 1, .protect = {}}, Disk(synced(0))); },
      [&](const fs::path& left, bool) {
        expect_whole(left, before, after);
        EXPECT_TRUE(is_new(left));
      });
}

TEST(PowerLoss, OfAModelLeavesTheOldOneOrTheNewOne) {
  const auto write = [](const fs::path& path, ModelFormat format, std::byte value) {
    const Disk disk(synced(0));
    const bool shards = path.extension().empty();
    const std::vector<ModelTensor> tensors{{"w", {40, 3}, DType::kFloat32, {"tied"}},
                                           {"b", {7}, DType::kBFloat16, {}}};
    const auto writer = open_model_writer(
        disk, {.format = format, .path = path, .tensors = tensors, .max_shard_bytes = shards ? 500 : 0});
    for (const ModelTensor& tensor : tensors)
      writer->append(std::vector<std::byte>(static_cast<size_t>(tensor.bytes()), value));
    writer->finish();
  };
  const auto content_of = [](const fs::path& path) {
    if (!fs::is_directory(path)) return read_text(path);
    std::string all;
    for (const std::string& name : names_in(path)) all += name + "\n" + read_text(path / name);
    return all;
  };
  for (const char* name : {"m.safetensors", "m.pt", "m.h5", "shards"}) {
    SCOPED_TRACE(name);
    const ModelFormat format = model_format_of(name).value_or(ModelFormat::kSafetensors);
    const MemoryFolder folder;
    const fs::path path = folder.path() / name;
    write(path, format, std::byte{1});
    const std::string before = content_of(path);
    std::string after;
    lose_power_everywhere(
        folder.path(),
        [&] {
          write(path, format, std::byte{2});
          after = content_of(path);
          EXPECT_NE(before, after);
        },
        [&](const fs::path& left, bool is_end) {
          const std::string found = content_of(left / name);
          EXPECT_TRUE(found == after || (!is_end && found == before));
        });
  }
}

}  // namespace
}  // namespace tessera::checkpoint::testing
