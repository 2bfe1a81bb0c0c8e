// What grows with ranks and parameters, for a job of 4,096 ranks: a layout, its manifest to text and back,
// the plan that reads a checkpoint on another number of ranks. In a process of its own, so that its memory
// can be read.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "checkpoint/read/reshard.h"
#include "checkpoint/sharded/checkpoint_files.h"
#include "checkpoint/sharded/manifest.h"
#include "core/files/temporary_folder.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint::testing {
namespace {

using Clock = std::chrono::steady_clock;

/// A Transformer's layers of 10 parameters: `num` parameters in all, about 3.1 million elements a layer.
std::vector<zero::ParameterSpec> parameters(int num) {
  std::vector<zero::ParameterSpec> specs;
  const std::vector<std::pair<const char*, std::vector<int64_t>>> kinds = {
      {"norm1.weight", {512}},      {"norm1.bias", {512}}, {"qkv.weight", {1536, 512}}, {"qkv.bias", {1536}},
      {"out.weight", {512, 512}},   {"out.bias", {512}},   {"up.weight", {2048, 512}},  {"up.bias", {2048}},
      {"down.weight", {512, 2048}}, {"down.bias", {512}}};
  for (int i = 0; i < num; ++i)
    specs.push_back({.name = str("layers.", i / 10, ".", kinds[i % 10].first),
                     .shape = kinds[i % 10].second,
                     .aliases = {}});
  return specs;
}

/// Rank r's file, without data: datasets one after another, as a save writes them.
FileRecord file_of(const SavedLayout& layout, int rank) {
  FileRecord file{.name = rank_file_name(rank), .bytes = 0, .block_hashes = {}, .datasets = {}};
  std::vector<DatasetRecord> datasets;
  int64_t offset = 4096;
  const auto add = [&](const std::string& name, int64_t numel) {
    datasets.push_back({name, DType::kFloat32, {numel}, offset, 4 * numel});
    offset += 4 * numel;
  };
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    add(weights_dataset(layout, unit), layout.shard_numel(unit));
    for (const char* state : {"exp_avg", "exp_avg_sq"})
      add(state_dataset(state, unit), layout.shard_numel(unit));
  }
  file.bytes = offset;
  file.block_hashes.assign((offset + (1 << 20) - 1) >> 20, 0x0123456789abcdefULL + rank);
  file.datasets = DatasetList(std::move(datasets));
  return file;
}

struct Measured {
  double seconds = 0;
  int64_t text_bytes = 0;
};

/// All that rank 0 does for a save, and what a load and `tessera consolidate` do before they read.
Measured measure(int world, int num_parameters) {
  const auto start = Clock::now();
  const zero::Layout layout(parameters(num_parameters), {.world_size = world});
  Manifest manifest{.tag = "step1",
                    .layout = saved_layout(layout),
                    .state_names = {"exp_avg", "exp_avg_sq"},
                    .files = {},
                    .tensors = {}};
  FileRecordReader records;
  const std::string text = file_record_to_text(file_of(manifest.layout, 1));
  for (int rank = 0; rank < world; ++rank) {  // as they arrive; they differ in name and hashes
    std::string mine = text;
    mine.replace(mine.find(rank_file_name(1)), rank_file_name(1).size(), rank_file_name(rank));
    manifest.files.push_back(records.parse(mine, "a rank's record"));
  }
  manifest.files.push_back({.name = "model.h5", .bytes = 0, .block_hashes = {}, .datasets = {}});
  const tessera::TemporaryFolder folder("tessera_scale");
  manifest.files.back() =
      write_model_file(Disk({.sync = false, .probe = {}}), folder.path() / "model.h5", manifest.layout, {});
  const std::string whole = manifest.to_text();
  const Manifest read = Manifest::parse(whole, "manifest.json");
  EXPECT_EQ(read, manifest);
  // One of 512 ranks that resume.
  const zero::Layout now(parameters(num_parameters), {.world_size = 512});
  const Comparison comparison = compare(read.layout, now);
  EXPECT_TRUE(comparison.exact());
  std::vector<zero::Range> wanted;
  int64_t expected = 0;
  for (int unit = 0; unit < now.num_units(); ++unit) wanted.push_back(now.shard(unit, 100));
  for (int parameter = 0; parameter < now.num_parameters(); ++parameter)
    expected += now.shard_part(parameter, 100).numel();
  int64_t planned = 0;
  for (const Piece& piece : plan_reads(read.layout, now, comparison.matches, wanted)) planned += piece.numel;
  EXPECT_EQ(planned, expected);
  return {std::chrono::duration<double>(Clock::now() - start).count(), static_cast<int64_t>(whole.size())};
}

TEST(Scale, FourThousandRanksAndTenThousandParameters) {
  const double before = peak_resident_bytes();
  const Measured all = measure(4096, 10'000);
  const double megabytes = (peak_resident_bytes() - before) / (1 << 20);
  std::cout << "4,096 ranks, 10,000 parameters: " << all.seconds << " s, " << megabytes
            << " MiB, manifest of " << all.text_bytes << " bytes\n";
  RecordProperty("seconds", str(all.seconds));
#ifndef __SANITIZE_ADDRESS__  // which keeps what was freed
  EXPECT_LT(megabytes, 200);
#endif
  EXPECT_LT(all.seconds, 20) << "2 s on a machine with nothing else to do";
}

// Text grows with ranks + units, not with their product.
TEST(Scale, TheManifestGrowsLinearly) {
  const int64_t small = measure(64, 1000).text_bytes, more_ranks = measure(128, 1000).text_bytes,
                more_parameters = measure(64, 2000).text_bytes, both = measure(128, 2000).text_bytes;
  EXPECT_LT(both, more_ranks + more_parameters - small + small / 10);
}

}  // namespace
}  // namespace tessera::checkpoint::testing
