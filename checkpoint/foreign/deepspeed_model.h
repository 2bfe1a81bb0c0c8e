// DeepSpeed's file "…_model_states.pt", and what all its formats make of it: parameters that the optimizer
// does not have, tied ones, buffers, the model's order, counters.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/foreign_checkpoint.h"

#include "checkpoint/formats/pickle.h"
#include "checkpoint/formats/torch_file.h"
#include "core/numel.h"

namespace tessera::checkpoint {

/// Names of parameters with their shapes, in the file's order.
using ShapesByName = std::vector<std::pair<std::string, std::vector<int64_t>>>;

/// One file of a model. Owns the mapping.
class DeepSpeedModel {
 public:
  /// Throws CheckpointError for a file that is no model's.
  explicit DeepSpeedModel(const std::filesystem::path& path);

  const TorchFile& file() const { return file_; }
  /// Null: there is none, or it is None.
  const PickleValue* find(std::string_view key) const;
  /// ds_config, as far as JSON has it.
  const nlohmann::json& config() const { return config_; }
  /// What the run computed in, as the configuration says.
  DType compute_type() const;

  /// The tensors of the module's state dict, by name, in its order. At stage 3 parameters have no elements.
  const std::vector<std::pair<std::string, TorchTensor>>& module() const { return module_; }
  const TorchTensor* in_module(const std::string& name) const;
  bool has_module() const { return has_module_; }
  const std::set<std::string, std::less<>>& buffer_names() const { return buffer_names_; }

  /// Of the flat groups of the optimizer: at stage 3 its sub-groups. nullopt: the file is of no run with
  /// ZeRO.
  std::optional<std::vector<ShapesByName>> param_shapes() const;
  ShapesByName frozen_shapes() const;
  std::vector<std::pair<std::string, TorchTensor>> frozen_fragments() const;
  /// Other names of parameters: (name, the parameter's).
  std::vector<std::pair<std::string, std::string>> shared_names() const;

  template <class... What>
  [[noreturn]] void fail(const What&... what) const {
    throw CheckpointError(file_.path(), ": ", what...);
  }

 private:
  TorchFile file_;
  nlohmann::json config_;
  std::vector<std::pair<std::string, TorchTensor>> module_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::set<std::string, std::less<>> buffer_names_;
  bool has_module_ = false;
};

/// A dict of names and shapes. Throws CheckpointError naming `source`.
ShapesByName shapes_of(const PickleValue& dict, const std::string& source);
/// An integer, also that of an enum: ZeroStageEnum(2). nullopt: something else.
std::optional<int64_t> integer_of(const PickleValue* value);

/// Checks sizes that the run must not have had: model and expert parallelism. `universal`: model parallelism
/// is allowed.
void check_parallelism(const DeepSpeedModel& model, bool universal);
/// Counters, scheduler, version, configuration's optimizer, what the user's program added.
void read_counters(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model);
/// The loss scaler of the optimizer's file `file`; null: none.
void read_loss_scaler(ForeignCheckpoint& checkpoint, const TorchFile& file, const PickleValue* scaler);

/// Completes the parameters that the optimizer has: their types, those that it does not have, tied names,
/// buffers, the model's order; names lose wrappers' prefixes. `fragments`: files of frozen parameters, by
/// rank; empty: the model's file has them whole.
void complete_parameters(ForeignCheckpoint& checkpoint, const DeepSpeedModel& model, int model_file,
                         const std::vector<std::filesystem::path>& ranks);
/// The class of the optimizer: what the configuration says, else what states and options tell.
std::string optimizer_class(const ForeignCheckpoint& checkpoint, const nlohmann::json& config);

}  // namespace tessera::checkpoint
