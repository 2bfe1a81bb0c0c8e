// CheckpointLoader: loads a checkpoint, saved on any number of ranks, into one rank's part of a sharded
// model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/reshard.h"
#include "engine/checkpoint/module_record.h"
#include "engine/checkpointing.h"
#include "zero/sharded_model.h"

namespace tessera {

/// What another program's checkpoint does not say of the model: its names, tied ones, buffers.
checkpoint::ParameterOrder order_of(const zero::ShardedModel& model);

/// Collective. `digest`: of what this rank has opened there. Throws CheckpointError, the same on all ranks,
/// where they differ: hosts may have copies, and a run may replace a checkpoint between two ranks' opening
/// it.
void check_same_content(comm::Communicator& comm, const std::string& path, const std::string& digest);

/// The blob of a rank that has what ModuleState::extra_state() gave.
inline constexpr const char* kExtraState = "extra_state";
/// The blob of a rank that has what WholeOptimizer::state() gave.
inline constexpr const char* kOptimizerState = "optimizer_state";

/// What decides what an optimizer's states mean.
struct OptimizerRecord {
  std::string name;
  std::vector<bool> by_muon;  ///< by parameter of the checkpoint, or of the model; empty: another optimizer
};

/// Loads a checkpoint into a model that may be sharded otherwise. Owns the open checkpoint and the plan of
/// what this rank reads. `model` must outlive it. Used by one thread.
class CheckpointLoader {
 public:
  /// Opens the checkpoint and plans what to read. Throws CheckpointError.
  CheckpointLoader(const std::string& directory, const std::string& tag, zero::ShardedModel& model,
                   const LoadOptions& options);

  /// The files that this rank will read, by number, ascending.
  std::vector<int> files() const;
  /// Compares the checkpoint with the model and verifies all that load() will read. Throws CheckpointError.
  void check(const OptimizerRecord& saved, const OptimizerRecord& current);
  /// Overwrites weights, optimizer state and buffers; between ShardedModel::begin_replacing() and
  /// end_replacing(). `steps`: number of updates of each parameter of the checkpoint.
  void load(const std::vector<int64_t>& steps);
  /// This rank's blob as it was saved, (n) uint8 on the CPU; undefined when the checkpoint has none for this
  /// rank. To be called before load(). Throws CheckpointError.
  at::Tensor blob(const std::string& name) const;
  /// For WholeOptimizer::set_state(): what each rank of the checkpoint has saved, in rank order; of another
  /// program's checkpoint, the states of what this rank owns.
  std::vector<at::Tensor> whole_states() const;
  /// The parameters that these are of.
  zero::NamesInCheckpoint names_of_states() const;
  /// The same of the modules' extra state: this rank's own of as many ranks, else rank 0's.
  at::Tensor extra_state() const;
  const ModuleRecord& module_record() const { return record_; }
  /// The model's param group by the checkpoint's, of which each has the other's parameters, in the same
  /// order. nullopt: they have other parameters than each other.
  std::optional<std::map<int, int>> matched_groups() const;
  /// Of another program's checkpoint: states of the optimizer that are to be loaded, and could not be read,
  /// or told whose they are: a line each.
  std::vector<std::string> lost_states() const;
  /// Whether optimizer state is loaded; the checkpoint has no other names than the model then.
  bool with_states() const { return options_.load_optimizer_states && !options_.load_module_only; }

  const checkpoint::Checkpoint& checkpoint() const { return checkpoint_; }
  const std::vector<std::string>& not_loaded() const { return not_loaded_; }

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;                          ///< the module's; undefined: it has none
    std::optional<checkpoint::TensorId> saved;  ///< nullopt: the buffer is taken from the module
    bool keep_dtype = true;                     ///< false: it gets shape and dtype of the checkpoint
    bool to_none = false;                       ///< with nothing saved: the name stays
  };
  std::string advice(const char* otherwise) const;
  std::string optimizer_advice(const char* otherwise) const;
  void compare_parameters();
  void compare_types() const;
  /// Throws for states that are not those of `current`; lists in not_loaded() what cannot be told.
  void compare_optimizers(const OptimizerRecord& saved, const OptimizerRecord& current);
  void compare_state_names(const OptimizerRecord& saved, const OptimizerRecord& current) const;
  void compare_whole_states(const checkpoint::ForeignCheckpoint& foreign, const OptimizerRecord& current);
  bool has_states(const checkpoint::Match& match) const;
  void compare_by_muon(const OptimizerRecord& saved, const OptimizerRecord& current) const;
  CheckpointError other_states(const std::string& what) const;
  CheckpointError saved_by_another(const std::string& saved, const std::string& current) const;
  at::Tensor states_of_owned(const checkpoint::ForeignCheckpoint& foreign) const;
  /// Whether the optimizer keeps its states itself (zero/optimizer/whole_optimizer.h).
  bool is_whole() const { return !owned_.empty(); }
  bool has_blob(int rank, const std::string& name) const;
  void find_buffers_among_parameters();
  void match_buffers();
  void match_buffer(const std::string& name, const zero::NamedBuffer* mine,
                    std::vector<std::string>& problems);
  void match_extra_state(std::vector<std::string>& problems);
  void load_buffer(const Buffer& buffer) const;
  at::Tensor blob_of(int rank, const std::string& name) const;
  at::Tensor read_whole(const checkpoint::TensorId& id) const;
  /// Calls `visit(pieces, kind)` for all that is to be read: pieces of one unit, kind 0 is weights, kind i +
  /// 1 the i-th optimizer state. In the order of the files, so that a block that holds parts of many
  /// parameters and kinds is read once.
  template <class Visit>
  void for_each_read(const Visit& visit) const;
  checkpoint::TensorId id_of(const checkpoint::Piece& piece, int kind) const;
  void load_pieces(std::span<const checkpoint::Piece> pieces, int kind) const;

  checkpoint::Checkpoint checkpoint_;
  zero::ShardedModel& model_;
  LoadOptions options_;
  bool wants_states_;  // as the caller said, whether there are any or none
  checkpoint::Comparison comparison_;
  std::vector<bool> owned_;             // ShardedModel::owned_parameters()
  std::vector<zero::LocalState> held_;  // by unit
  std::vector<checkpoint::Piece> pieces_;
  ModuleRecord record_;
  std::map<std::string, size_t> among_parameters_;  ///< of the module's buffers: the saved parameter
  std::vector<Buffer> buffers_;
  std::vector<std::string> not_loaded_;
};

}  // namespace tessera
