// Helpers of the checkpoint tests: a model whose elements are known by parameter name and index, ranks as
// threads, and the comparison of a checkpoint with the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/save.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint::testing {

/// A folder for one test, in memory if possible. Owns the folder and removes it.
class MemoryFolder {
 public:
  MemoryFolder();
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;
  ~MemoryFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Names in a folder, sorted.
std::vector<std::string> names_in(const std::filesystem::path& folder);

using Bytes = std::vector<std::byte>;

/// Byte i depends on seed + i alone.
Bytes random_bytes(int64_t size, uint64_t seed);

/// A model in training, with the data of all ranks. Values depend only on (seed, dataset, parameter,
/// element), so models of any layout with the same seed have the same values.
class SampleModel {
 public:
  SampleModel(std::vector<zero::ParameterSpec> specs, const zero::LayoutOptions& options, uint64_t seed,
              std::vector<std::string> state_names = {"exp_avg", "exp_avg_sq"});

  const zero::Layout& layout() const { return layout_; }
  const std::vector<std::string>& state_names() const { return state_names_; }
  /// The whole unit's weights as saved, padding zero.
  const Bytes& weights(int unit) const { return weights_[unit]; }
  const Bytes& state(int unit, int i) const { return states_[unit][i]; }
  const std::vector<WholeTensor>& tensors() const { return tensors_; }
  Bytes& blob(int rank) { return blobs_[rank]; }

  SaveRequest request(const std::filesystem::path& directory, const std::string& tag, int rank) const;
  /// The difference between a checkpoint of any layout and this model; empty if there is none.
  std::string difference(const Checkpoint& checkpoint) const;

 private:
  Bytes fill(int unit, const std::string& dataset, DType type) const;
  void make_tensors();

  uint64_t seed_;
  zero::Layout layout_;
  std::vector<std::string> state_names_;
  std::vector<Bytes> weights_;              // by unit
  std::vector<std::vector<Bytes>> states_;  // by unit, by state
  std::vector<Bytes> tensor_data_;
  std::vector<WholeTensor> tensors_;
  std::vector<Bytes> blobs_;  // by rank
  nlohmann::json state_;
};

/// Trainable fp32 and bf16, frozen, tied, 0-dim and empty parameters; a name with '/', one that is not ASCII.
std::vector<zero::ParameterSpec> sample_specs();
/// The above over `world` ranks in small units.
SampleModel sample_model(int world, uint64_t seed);

/// Ranges to read, by unit, in the unit's elements: what `rank` owns, or everything.
std::vector<zero::Range> wanted_shards(const zero::Layout& layout, int rank);
std::vector<zero::Range> wanted_units(const zero::Layout& layout);

/// Runs `rank_main` for each rank on its own thread. Returns by rank the what() of the exception it threw, or
/// "".
std::vector<std::string> run_ranks(int world,
                                   const std::function<void(int rank, const Exchange&)>& rank_main);

/// Saves on all ranks. `disk` gives each rank's options. Returns each rank's error.
std::vector<std::string> save_all(const SampleModel& model, const std::filesystem::path& directory,
                                  const std::string& tag,
                                  const std::function<DiskOptions(int rank)>& disk = {});

}  // namespace tessera::checkpoint::testing
