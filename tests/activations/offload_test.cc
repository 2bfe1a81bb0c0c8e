// Saved tensors on disk: TensorSpill alone, and a model that trains with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "activations/checkpointing.h"
#include "activations/tensor_spill.h"
#include "comm/init/self.h"
#include "core/async_io/spill_file_internal.h"
#include "core/files/disk_error.h"
#include "core/files/temporary_folder.h"
#include "examples/language_model/model.h"
#include "tests/activations/models.h"
#include "tests/support/child_process.h"
#include "tests/support/errors.h"
#include "tests/support/live_bytes.h"

namespace tessera::testing {
namespace {

using activations::SpillBlock;
using activations::TensorSpill;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::byte> random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

bool holds(TensorSpill& spill, SpillBlock& block, const std::vector<std::byte>& bytes) {
  const TensorSpill::Memory memory = spill.read(block);
  const auto* data = static_cast<const std::byte*>(memory.storage.data()) + memory.byte_offset;
  return std::memcmp(data, bytes.data(), bytes.size()) == 0;
}

class Spill : public ::testing::Test {
 protected:
  std::shared_ptr<TensorSpill> make(int64_t buffer_bytes, int64_t first_file_bytes = 1 << 20) {
    return std::make_shared<TensorSpill>(TensorSpill::Options{.directory = folder.path().string(),
                                                              .buffer_bytes = buffer_bytes,
                                                              .first_file_bytes = first_file_bytes});
  }
  TemporaryFolder folder{"activations"};
};

TEST_F(Spill, BlocksComeBackInAnyOrder) {
  for (const bool reverse : {true, false}) {
    const auto spill = make(256 << 10);
    std::vector<std::vector<std::byte>> data;
    std::vector<std::shared_ptr<SpillBlock>> blocks;
    for (int i = 0; i < 60; ++i) {
      data.push_back(random_bytes(1 + (i * 7919) % 100'000, i));
      blocks.push_back(spill->write(data.back()));
      EXPECT_LE(spill->bytes_in_buffers(), 256 << 10);
    }
    std::vector<size_t> order(blocks.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
    std::mt19937 random(1);
    if (!reverse) std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      EXPECT_TRUE(holds(*spill, *blocks[i], data[i])) << i;
      EXPECT_LE(spill->bytes_in_buffers(), 256 << 10);
    }
    for (const size_t i : order) EXPECT_TRUE(holds(*spill, *blocks[i], data[i])) << "once more, " << i;
  }
}

TEST_F(Spill, PlacesAreUsedAgain) {
  const auto spill = make(256 << 10);
  std::vector<std::shared_ptr<SpillBlock>> blocks;
  int64_t reserved = 0;
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 40; ++i) blocks.push_back(spill->write(random_bytes(10'000 + 1000 * i, i)));
    if (round == 0) reserved = spill->bytes_reserved();
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(round));
    blocks.clear();
  }
  EXPECT_EQ(spill->bytes_reserved(), reserved);
  EXPECT_GE(reserved, 40 * 20'000) << "one file was not enough: that is the case here";
}

TEST_F(Spill, ABlockMayGoWhileItIsWritten) {
  const auto spill = make(1 << 20);
  const std::vector<std::byte> data = random_bytes(300'000, 1);
  for (int i = 0; i < 50; ++i) {
    const auto gone = spill->write(random_bytes(300'000, 2 + i));
  }
  const auto block = spill->write(data);
  for (int i = 0; i < 50; ++i) spill->write(random_bytes(300'000, 99 + i));
  EXPECT_TRUE(holds(*spill, *block, data));
}

TEST_F(Spill, OneMemoryForAllWhoAsk) {
  const auto spill = make(64 << 10);
  const auto block = spill->write(random_bytes(50'000, 1));
  for (int i = 0; i < 5; ++i) spill->write(random_bytes(50'000, i));  // it has no buffer any more
  const TensorSpill::Memory one = spill->read(*block), two = spill->read(*block);
  EXPECT_EQ(one.storage.data(), two.storage.data());
}

TEST_F(Spill, AFailedWriteOrReadIsOneLine) {
  std::atomic<bool> fails = false;
  std::string operation = "write";
  const ScopedSpillFileProbe probe(
      [&](std::string_view what, int64_t, int64_t) { return fails && what == operation ? EIO : 0; });
  {
    const auto spill = make(64 << 10);
    fails = true;
    std::vector<std::shared_ptr<SpillBlock>> blocks;
    const std::string error = error_of<DiskError>([&] {
      for (int i = 0; i < 10; ++i) blocks.push_back(spill->write(random_bytes(50'000, i)));
    });
    EXPECT_THAT(error, HasSubstr("cannot write"));
    EXPECT_THAT(error, HasSubstr("activation_checkpointing.nvme_path"));
    EXPECT_THAT(error, Not(HasSubstr("\n")));
    fails = false;
    for (int again = 0; again < 2; ++again)
      for (size_t i = 0; i < blocks.size(); ++i)
        EXPECT_THAT(error_of<DiskError>([&] {
                      EXPECT_TRUE(holds(*spill, *blocks[i], random_bytes(50'000, static_cast<int>(i)))) << i;
                    }),
                    AnyOf("", HasSubstr("cannot write")))
            << i;
  }
  operation = "read";
  const auto spill = make(64 << 10);
  const auto block = spill->write(random_bytes(50'000, 1));
  for (int i = 0; i < 5; ++i) spill->write(random_bytes(50'000, i));
  fails = true;
  EXPECT_THAT(error_of<DiskError>([&] { spill->read(*block); }), HasSubstr("cannot read"));
  fails = false;
  EXPECT_TRUE(holds(*spill, *block, random_bytes(50'000, 1))) << "it is on the disk all the same";
}

// ------------------------------------------------------------------------------------- with a model

struct Trained {
  std::vector<double> losses;
  int64_t held = 0;  // of the last forward
  activations::Counts counts;
};

GptOptions gpt_shape() { return {.vocabulary = 512}; }

auto make_gpt(const std::string& policy, const std::string& path) {
  Case c;
  c.micro_batch = 8;
  c.config.activations.policy = policy;
  c.config.activations.nvme_path = path;
  at::manual_seed(1);
  return initialize(Gpt(gpt_shape()), engine_config(c),
                    std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
}

Trained train_gpt(const std::string& policy, const std::string& path) {
  const at::Tensor tokens = randint(gpt_shape().vocabulary, {8, gpt_shape().sequence}, 1);
  const LiveBytes live;
  const auto engine = make_gpt(policy, path);
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    const int64_t before = live.now();
    const at::Tensor loss = engine->forward(tokens, tokens);
    trained.held = live.now() - before;
    engine->backward(loss);
    engine->step();
    trained.losses.push_back(loss.item<double>());
  }
  if (engine->activations() != nullptr) trained.counts = engine->activations()->counts();
  return trained;
}

const Trained& trained_in_memory() {
  static const Trained trained = train_gpt("none", "");
  return trained;
}

TEST(ActivationOffload, OnlyBuffersStayInMemory) {
  const TemporaryFolder folder{"activations"};
  const Trained& none = trained_in_memory();
  const Trained offload = train_gpt("offload", folder.path().string());
  EXPECT_EQ(offload.losses, none.losses);
  EXPECT_GT(none.held, 60'000'000);
  constexpr int64_t kBuffers = 32 << 20;
  EXPECT_LE(offload.held, kBuffers + none.held / 20);
  EXPECT_GE(offload.counts.offloaded_bytes, none.held * 9 / 10);
  EXPECT_LE(offload.counts.kept_bytes, none.held / 20);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// As where a file system cannot reserve: the first write that fails is noticed when its buffer is needed.
TEST(ActivationOffload, AWriteThatFailsIsOneLineWhenTheForwardHasEnded) {
  const TemporaryFolder folder{"activations"};
  Case c;
  c.micro_batch = 4;
  const auto engine = initialize(DropoutMlp(), engine_config(c),
                                 std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
  activations::PolicyOptions options;
  options.kind = activations::PolicyOptions::Kind::kOffload;
  options.directory = folder.path().string();
  options.buffer_bytes = 64 << 10;
  options.owner = "rank 3";
  std::atomic<bool> full = false;
  const ScopedSpillFileProbe probe(
      [&](std::string_view what, int64_t, int64_t) { return full && what == "write" ? ENOSPC : 0; });
  activations::Checkpointing checkpointing(engine->sharded_model(), options);
  const at::Tensor x = randn({4, kLength, kDim}, 1);
  full = true;
  const at::Tensor loss = engine->forward(x, x);
  const std::string error = error_of<DiskError>([&] { checkpointing.end_forward(); });
  EXPECT_THAT(error, HasSubstr("saved tensors of rank 3 in " + folder.path().string()));
  EXPECT_THAT(error, HasSubstr("No space left on device"));
  EXPECT_THAT(error, HasSubstr("(activation_checkpointing.nvme_path)"));
  EXPECT_THAT(error, Not(HasSubstr("\n")));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

/// What `action` says of a disk of `size` at `folder`.
std::string on_small_disk(const std::filesystem::path& folder, const char* size,
                          const std::function<std::string()>& action) {
  return in_child([&]() -> std::string {
    if (::geteuid() != 0 && ::unshare(CLONE_NEWUSER) != 0) return "";
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return "";
    if (::mount("tmpfs", folder.c_str(), "tmpfs", 0, size) != 0) return "";
    return action();
  });
}

TEST(ActivationOffload, AFullDiskIsOneLine) {
  const TemporaryFolder folder{"activations"};
  const std::string error = on_small_disk(folder.path(), "size=40m", [&] {
    return error_of<DiskError>(
        [&] { TensorSpill(TensorSpill::Options{.directory = folder.path().string()}); });
  });
  if (error.empty()) GTEST_SKIP() << "mounting a small tmpfs is not allowed here";
  EXPECT_EQ(error, "cannot reserve 67,108,864 bytes for saved tensors in " + folder.path().string() +
                       ": No space left on device, 41,943,040 bytes are available there; choose a directory "
                       "with more room (activation_checkpointing.nvme_path)");
}

TEST(ActivationOffload, ADiskThatFillsUpIsOneLine) {
  const TemporaryFolder folder{"activations"};
  const std::string error = on_small_disk(folder.path(), "size=8m", [&] {
    return error_of<DiskError>([&] {
      const auto spill = std::make_shared<TensorSpill>(TensorSpill::Options{
          .directory = folder.path().string(), .buffer_bytes = 1 << 20, .first_file_bytes = 5 << 20});
      std::vector<std::shared_ptr<SpillBlock>> blocks;
      for (int i = 0; i < 6; ++i) blocks.push_back(spill->write(random_bytes(1 << 20, i)));
    });
  });
  if (error.empty()) GTEST_SKIP() << "mounting a small tmpfs is not allowed here";
  EXPECT_THAT(error,
              HasSubstr("cannot reserve 5,242,880 bytes for saved tensors in " + folder.path().string()));
  EXPECT_THAT(error, HasSubstr("3,145,728 bytes are available there"));
}

TEST(ActivationOffload, AFolderThatCannotBeUsedIsRefusedBeforeTraining) {
  const TemporaryFolder folder{"activations"};
  const std::string file = (folder.path() / "file").string();
  std::ofstream(file) << "x";
  const std::string error = error_of<DiskError>([&] { make_gpt("offload", file); });
  EXPECT_THAT(error, HasSubstr("saved tensors of rank 0 in " + file));
  EXPECT_THAT(error, HasSubstr("(activation_checkpointing.nvme_path)"));
  EXPECT_THAT(error, Not(HasSubstr("\n")));
}

TEST(ActivationOffload, NeedsAFolder) {
  EXPECT_THAT(error_of([] { train_gpt("offload", ""); }), HasSubstr("activation_checkpointing.nvme_path"));
}

}  // namespace
}  // namespace tessera::testing
