// What save() writes is what readers find; names, tags and what may be replaced or deleted.
#include "checkpoint/sharded/save.h"
#include "checkpoint/checkpoint_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <fstream>
#include <thread>
#include <utility>

#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/checkpoint_files.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

TEST(Save, HoldsEveryBit) {
  for (int world : {1, 2, 3, 5}) {
    SCOPED_TRACE(world);
    const MemoryFolder folder;
    const SampleModel model = sample_model(world, 7);
    EXPECT_THAT(save_all(model, folder.path() / "new" / "folders", "step1"), Each(IsEmpty()));
    const std::filesystem::path directory = folder.path() / "new" / "folders";
    const Checkpoint checkpoint = Checkpoint::open(directory);
    EXPECT_EQ(checkpoint.path(), directory / "step1");
    EXPECT_EQ(checkpoint.manifest().stage, 2);
    EXPECT_EQ(checkpoint.manifest().layout, saved_layout(model.layout()));
    EXPECT_EQ(model.difference(checkpoint), "");
    EXPECT_THAT(verify(directory, "").problems, IsEmpty());
    std::vector<std::string> files{"manifest.json", "model.h5"};
    for (int rank = 0; rank < world; ++rank) files.push_back(rank_file_name(rank));
    EXPECT_EQ(names_in(directory / "step1"), files);
    EXPECT_THAT(names_in(directory), ElementsAre("latest", "step1"));
  }
}

TEST(Save, TheSameContentGivesTheSameBytes) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(2, 7);
  save_all(model, folder.path(), "a");
  const Manifest first = Checkpoint::open(folder.path()).manifest();
  for (const auto saved = std::time(nullptr); std::time(nullptr) == saved;)  // HDF5 would write down seconds
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  save_all(model, folder.path(), "a");
  EXPECT_EQ(Checkpoint::open(folder.path()).manifest(), first);
}

TEST(Save, AModelWithoutParametersOrState) {
  const MemoryFolder folder;
  const SampleModel nothing({}, {.world_size = 2}, 1);
  EXPECT_THAT(save_all(nothing, folder.path(), "a"), Each(IsEmpty()));
  EXPECT_EQ(nothing.difference(Checkpoint::open(folder.path())), "");
  const SampleModel stateless(sample_specs(), {.world_size = 2, .unit_numel = 100}, 1, {});
  EXPECT_THAT(save_all(stateless, folder.path(), "b"), Each(IsEmpty()));
  EXPECT_EQ(stateless.difference(Checkpoint::open(folder.path())), "");
}

TEST(Save, LargeUnitsSpanBlocks) {
  const MemoryFolder folder;
  const zero::ParameterSpec big{.name = "big",
                                .shape = {700, 1001},
                                .dtype = DType::kFloat32,
                                .trainable = true,
                                .group = 0,
                                .aliases = {}};
  const SampleModel model({big}, {.world_size = 2}, 3);
  EXPECT_THAT(save_all(model, folder.path(), "a"), Each(IsEmpty()));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_GE(checkpoint.manifest().rank_file(0).block_hashes.size(), 4u);
  EXPECT_EQ(model.difference(checkpoint), "");
  for (const DatasetRecord& dataset : checkpoint.manifest().rank_file(0).datasets)
    EXPECT_TRUE(dataset.bytes < 4096 || dataset.offset % 4096 == 0) << dataset.name;
}

TEST(Save, ReplacesACheckpointAndKeepsOtherFilesOfItsFolder) {
  const MemoryFolder folder;
  const SampleModel first = sample_model(3, 1), second = sample_model(2, 2);
  save_all(first, folder.path(), "a");
  const fs::path own = folder.path() / "a";
  fs::create_directories(own / "tokenizer" / "empty");
  replace_file(own / "tokenizer" / "vocab.txt", "the words");
  replace_file(own / "notes", "seen");
  EXPECT_THAT(save_all(second, folder.path(), "a"), Each(IsEmpty()));
  EXPECT_EQ(second.difference(Checkpoint::open(folder.path())), "");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("a", "latest"));
  EXPECT_THAT(names_in(own), ElementsAre("manifest.json", "model.h5", "notes", "rank_00000.h5",
                                         "rank_00001.h5", "tokenizer"));
  EXPECT_EQ(InputFile(own / "notes").read_all(), "seen");
  EXPECT_EQ(InputFile(own / "tokenizer" / "vocab.txt").read_all(), "the words");
  EXPECT_TRUE(fs::is_directory(own / "tokenizer" / "empty"));
}

TEST(Save, WhatIsNoCheckpointIsNotReplaced) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(2, 1);
  fs::create_directories(folder.path() / "project");
  replace_file(folder.path() / "project" / "thesis.tex", "two years");
  replace_file(folder.path() / "notes", "seen");
  fs::create_directory_symlink("project", folder.path() / "link");
  for (const char* tag : {"project", "notes", "link"}) {
    EXPECT_THAT(
        save_all(model, folder.path(), tag),
        Each(AllOf(StartsWith("cannot save checkpoint "), HasSubstr("rank 0: "), HasSubstr(tag),
                   HasSubstr(" is no checkpoint of Tessera's; expected one, which is replaced, or a name "
                             "that is free"))));
    EXPECT_THAT(names_in(folder.path()), ElementsAre("link", "notes", "project"));
  }
  EXPECT_EQ(InputFile(folder.path() / "link" / "thesis.tex").read_all(), "two years");
  EXPECT_EQ(InputFile(folder.path() / "notes").read_all(), "seen");
  fs::create_directory(folder.path() / "new");  // an empty folder is nobody's loss
  EXPECT_THAT(save_all(model, folder.path(), "new"), Each(IsEmpty()));
}

TEST(Save, RanksThatDisagreeAreNamed) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(2, 1), other({sample_specs()[0]}, {.world_size = 2}, 1);
  std::vector<std::string> errors = run_ranks(2, [&](int rank, const Exchange& exchange) {
    save((rank == 0 ? model : other).request(folder.path(), "a", rank), exchange);
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("layout \""), HasSubstr("on rank 1"))));
  errors = run_ranks(2, [&](int rank, const Exchange& exchange) {
    save(model.request(folder.path(), rank == 0 ? "a" : "b", rank), exchange);
  });
  EXPECT_THAT(errors[0], HasSubstr("tag \"b\" on rank 1, \"a\" on rank 0"));
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

TEST(Save, RefusesWhatCannotBeSavedBeforeAnyFileExists) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(2, 1);
  const auto with = [&](const std::function<void(SaveRequest&)>& change) {
    const auto errors = run_ranks(2, [&](int rank, const Exchange& exchange) {
      SaveRequest request = model.request(folder.path(), "a", rank);
      if (rank == 1) change(request);
      save(request, exchange);
    });
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_THAT(names_in(folder.path()), IsEmpty());
    return errors[0];
  };
  EXPECT_THAT(
      with([](SaveRequest& r) { r.units[0].weights = r.units[0].weights.acquire().subspan(4); }),
      AllOf(HasSubstr("rank 1: cannot save /master/unit_00000: found "), HasSubstr(" bytes; expected ")));
  EXPECT_THAT(with([](SaveRequest& r) { r.units.pop_back(); }),
              HasSubstr("rank 1: cannot save rank 1: found data of "));
  EXPECT_THAT(with([](SaveRequest& r) { r.units[0].states.pop_back(); }),
              HasSubstr("found 1 optimizer states; expected 2"));
  EXPECT_THAT(with([](SaveRequest& r) { r.state_names[0] = "exp/avg"; }),
              HasSubstr("cannot save optimizer state exp/avg"));
  EXPECT_THAT(with([](SaveRequest& r) { r.state_names[0] = "master"; }),
              HasSubstr("cannot save optimizer state master"));
  EXPECT_THAT(with([](SaveRequest& r) { r.blobs.push_back(r.blobs[0]); }),
              HasSubstr("cannot save blob rng/cpu: the name is used twice"));
  EXPECT_THAT(with([](SaveRequest& r) { r.blobs[0].name = "\xff"; }), HasSubstr("UTF-8"));
}

TEST(Save, RefusesAStateThatJsonWouldChange) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(1, 1);
  const auto with = [&](nlohmann::json state) {
    return run_ranks(1, [&](int rank, const Exchange& exchange) {
      SaveRequest request = model.request(folder.path(), "a", rank);
      request.state = std::move(state);
      save(request, exchange);
    })[0];
  };
  EXPECT_THAT(with({{"client", {{"losses", {1.0, std::numeric_limits<double>::infinity()}}}}}),
              HasSubstr("cannot save state.client.losses[1]: found inf; expected a finite number"));
  EXPECT_THAT(with({{"text", "\xff"}}), HasSubstr("cannot save state: it has text that is not UTF-8"));
  nlohmann::json deep = 1;
  for (int i = 0; i < 10'000; ++i) deep = nlohmann::json{{"a", std::move(deep)}};
  EXPECT_THAT(with(std::move(deep)), HasSubstr("nested deeper than"));
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

TEST(Save, TagsThatCannotBe) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(1, 1);
  for (const std::string& tag :
       {std::string(), std::string("a/b"), std::string(".."), std::string("."), std::string("a\n"),
        std::string("latest"), std::string("latest.tmp-0123456789abcdef"),
        std::string("a.tmp-0123456789abcdef"), std::string(201, 'a'), std::string("\xff"),
        std::string("a\0b", 3)})
    EXPECT_THAT(save_all(model, folder.path(), tag)[0], HasSubstr("checkpoint tag ")) << tag;
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
  EXPECT_EQ(save_all(model, folder.path(), "schön, wirklich")[0], "");
  EXPECT_EQ(model.difference(Checkpoint::open(folder.path(), "schön, wirklich")), "");
}

TEST(Save, LeavesAnotherThatIsWritten) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(1, 1);
  const auto alone = [](const std::string& mine) { return std::vector<std::string>{mine}; };
  SaveRequest request = model.request(folder.path(), "a", 0);
  bool began = false;
  request.disk.probe = [&](std::string_view operation, const fs::path&) {
    if (operation == "create" && !std::exchange(began, true))
      save(model.request(folder.path(), "b", 0), alone);
  };
  save(request, alone);
  EXPECT_TRUE(began);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("a", "b", "latest"));
  for (const char* tag : {"a", "b"}) EXPECT_EQ(model.difference(Checkpoint::open(folder.path(), tag)), "");
}

TEST(Save, RemovesLeftoversOfItsOwnOnly) {
  const MemoryFolder folder;
  const auto directory = folder.path();
  std::filesystem::create_directories(directory / "a.tmp-0123456789abcdef" / "x");
  std::ofstream(directory / "latest.tmp-0123456789abcdef") << "a";
  std::filesystem::create_directories(directory / "a.tmp-mine");
  std::ofstream(directory / "b.tmp-0123456789abcdef") << "a file, no folder";
  EXPECT_EQ(save_all(sample_model(1, 1), directory, "a")[0], "");
  EXPECT_THAT(names_in(directory), ElementsAre("a", "a.tmp-mine", "b.tmp-0123456789abcdef", "latest"));
}

// A rank's file record is sent over the disk, where it may be damaged.
TEST(Save, AnotherRanksRecordIsWhatItWrote) {
  const SampleModel model = sample_model(3, 1);
  for (const int changed : {1, 2}) {
    const MemoryFolder folder;
    const auto errors = run_ranks(3, [&](int rank, const Exchange& exchange) {
      int num_exchanges = 0;
      save(model.request(folder.path(), "a", rank), [&](const std::string& mine) {
        auto all = exchange(mine);
        if (++num_exchanges == 2 && rank == 0) {  // all files are written, and rank 0 reads the records next
          for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
            const auto path = entry.path() / (rank_file_name(changed) + ".json");
            std::string text = read_text(path);
            const size_t hash = text.find("\"blocks\": \"") + 11;
            text[hash] = text[hash] == '0' ? '1' : '0';  // a record of the same form, with another hash
            std::ofstream(path) << text;
          }
        }
        return all;
      });
    });
    EXPECT_THAT(errors, Each(HasSubstr(str("is not what rank ", changed, " wrote"))));
    EXPECT_THAT(names_in(folder.path()), IsEmpty());
  }
}

TEST(Open, SaysWhatThereIs) {
  const MemoryFolder folder;
  const auto directory = folder.path();
  const auto open = [&](const std::string& tag) {
    return error_of<CheckpointError>([&] { Checkpoint::open(directory, tag); });
  };
  EXPECT_EQ(error_of<CheckpointError>([&] { Checkpoint::open(directory / "none"); }),
            "no checkpoint directory " + (directory / "none").string());
  EXPECT_THAT(open(""), HasSubstr("has no file \"latest\" that names a checkpoint; it has no checkpoints"));
  const SampleModel model = sample_model(1, 1);
  save_all(model, directory, "step9");
  save_all(model, directory, "step10");
  EXPECT_THAT(open("step11"), HasSubstr("has no checkpoint step11; it has step9, step10"));
  EXPECT_THAT(error_of<CheckpointError>([&] { Checkpoint::open(directory / "step9"); }),
              HasSubstr("is a checkpoint itself"));
  std::ofstream(directory / "latest") << "step11\n";
  EXPECT_THAT(open(""), HasSubstr("has no checkpoint step11, which \"latest\" names; it has step9, step10"));
  std::ofstream(directory / "latest") << "../elsewhere";
  EXPECT_THAT(open(""), AllOf(HasSubstr("latest: does not name a checkpoint: checkpoint tag"),
                              HasSubstr("; it has step9, step10")));
  std::filesystem::remove(directory / "latest");
  EXPECT_THAT(open(""), HasSubstr("it has step9, step10"));
  std::filesystem::create_directory(directory / "empty");
  EXPECT_THAT(open("empty"), AllOf(HasSubstr("empty: is no whole checkpoint: "), HasSubstr("manifest.json")));
}

TEST(KeepLast, DeletesTheOldestButNeverTheLatest) {
  const MemoryFolder folder;
  const Disk disk({.sync = false, .probe = {}});
  const SampleModel model = sample_model(1, 1);
  for (const char* tag : {"step8", "best", "step9", "step10", "step11"}) save_all(model, folder.path(), tag);
  std::filesystem::create_directory(folder.path() / "logs");
  EXPECT_THAT(list_checkpoints(folder.path()), ElementsAre("step8", "best", "step9", "step10", "step11"));
  EXPECT_THAT(keep_last(folder.path(), {.num = 9, .protect = {}}, disk), IsEmpty());
  EXPECT_THAT(keep_last(folder.path(), {.num = 2, .protect = {"best"}}, disk), ElementsAre("step8", "step9"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("best", "latest", "logs", "step10", "step11"));
  std::ofstream(folder.path() / "latest") << "step10\n";
  EXPECT_THAT(keep_last(folder.path(), {.num = 1, .protect = {"best"}}, disk), ElementsAre("step11"));
  EXPECT_EQ(model.difference(Checkpoint::open(folder.path())), "");
  EXPECT_THAT(error_of<CheckpointError>([&] { keep_last(folder.path(), {.num = 0, .protect = {}}, disk); }),
              HasSubstr("expected at least 1"));
}

}  // namespace
}  // namespace tessera::checkpoint::testing
