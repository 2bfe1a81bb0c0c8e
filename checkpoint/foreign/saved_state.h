// What files of different trainers have in common: a model's state dict and an optimizer's state_dict, as
// they lie in files. assemble() makes a ForeignCheckpoint of both.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/formats/pickle.h"
#include "checkpoint/formats/torch_file.h"

namespace tessera::checkpoint {

/// An entry of a model's state dict.
struct SavedTensor {
  std::string name;
  ForeignTensor tensor;
  bool is_parameter = false;  ///< the file says so; a state dict of values alone does not
  std::string memory;  ///< entries with the same text are the same elements of one memory; empty: not known
};

/// The dict in which the optimizers of bitsandbytes save the states that are not like the parameter, so that
/// FSDP leaves them alone. Its states are read as the others are.
inline constexpr std::string_view kStatesOfBitsandbytes = "__bnb_optimizer_quant_state__";

/// What trainers call the learning-rate schedule's state.
inline constexpr const char* kSchedulerKeys[] = {"lr_scheduler",         "scheduler",
                                                 "lr_schedulers",        "lr_scheduler_state_dict",
                                                 "scheduler_state_dict", "lr_sched"};

/// What trainers call the count of updates: those that say that they count all of them, and those that may
/// count those of an epoch.
inline constexpr const char* kCounts[] = {"global_step", "global_steps", "num_updates"};
inline constexpr const char* kCountsOfSome[] = {"step", "steps", "iteration", "iter", "iter_num"};

/// What trainers call the loss scaler's state.
inline constexpr const char* kScalerKeys[] = {"scaler",
                                              "grad_scaler",
                                              "scaler_state_dict",
                                              "grad_scaler_state_dict",
                                              "native_amp_scaling_state",
                                              "MixedPrecision",
                                              "loss_scaler"};

/// A parameter of a saved optimizer.
struct SavedState {
  std::string name;  ///< empty: it is known by its number only
  std::map<std::string, ForeignTensor> tensors;
  std::optional<int64_t> steps;
  std::optional<ForeignTensor> step_tensor;          ///< "step" as it is saved, where it is a tensor
  nlohmann::json values = nlohmann::json::object();  ///< states that are no tensors; null for None
  std::string unread;                                ///< a state that is not read, and why; empty: all are
  bool of_bitsandbytes = false;                      ///< it had kStatesOfBitsandbytes

  /// The parameter's shape, as its state has it, but for single numbers. bitsandbytes has it in the last of
  /// "state1" and "state2", and tables besides. nullopt: no state, or states of different shapes.
  std::optional<std::vector<int64_t>> shape() const;
};

struct SavedGroup {
  nlohmann::json options = nlohmann::json::object();
  std::vector<size_t>
      members;  ///< indices in SavedOptimizer::states, in the order in which the group has them
};

struct SavedOptimizer {
  std::string source;  ///< its file, or place in a file, for messages
  std::vector<SavedState> states;
  std::vector<SavedGroup> groups;
};

using StateNames = std::set<std::string, std::less<>>;
/// The name of torch.optim's class that has these states and options, as far as they tell; else "". Adam and
/// AdamW have been one class with an option for a while; before, nothing tells them apart.
std::string optimizer_class(const StateNames& states, const nlohmann::json& options);

/// Adds an optimizer of the same model: its groups come after those that are there.
void append(std::optional<SavedOptimizer>& to, SavedOptimizer more);

/// What is known about the order in which a model has its parameters.
struct ModelOrder : ParameterOrder {
  bool is_entries = false;       ///< that of the state dict's entries
  bool is_hugging_face = false;  ///< the optimizer's groups are those of the Hugging Face Trainer
  bool keeps_names = false;      ///< wrappers' prefixes stay
};

/// Adds a file to the checkpoint's, if it is not there, and returns its index.
int file_index(ForeignCheckpoint& checkpoint, const std::filesystem::path& path);

/// The elements of one tensor of a file.
ForeignTensor foreign_tensor(int file, const TorchTensor& tensor);

/// The entries of a state dict: a dict of names and tensors. What is no tensor is said in `not_read`. Dicts
/// in dicts have names with a period between. Throws as TorchFile::tensor.
std::vector<SavedTensor> read_state_dict(ForeignCheckpoint& checkpoint, const TorchFile& file,
                                         const PickleValue& value, const std::string& what);
/// Whether a value is a state dict of a model: a dict of names and tensors, one at least.
bool is_state_dict(const TorchFile& file, const PickleValue& value);
/// Whether a value is what torch.optim's state_dict() gives: {"state": {…}, "param_groups": […]}.
bool is_optimizer_state(const PickleValue& value);
/// The options of a param group, without its parameters. What JSON does not have is added to `lost`, with
/// lines that begin with `what` and the option.
nlohmann::json group_options(const PickleValue& group, const TorchFile& file, const std::string& what,
                             std::vector<LostValue>& lost);
/// What torch.optim's state_dict() gave, or FSDP.optim_state_dict(), which has names in place of numbers.
/// Throws CheckpointError for a state that is not of this form.
SavedOptimizer read_optimizer_state(ForeignCheckpoint& checkpoint, const TorchFile& file,
                                    const PickleValue& value, const std::string& what);

/// Names without the prefixes that wrappers add: "module." and "_forward_module." where all names begin so;
/// "_orig_mod.", "_fsdp_wrapped_module." and "_checkpoint_wrapped_module." anywhere. Names stay as they are
/// where two would become one.
std::vector<std::string> without_wrappers(const std::vector<std::string>& names);

/// All names of a checkpoint's tensors: parameters, their aliases, buffers. They point into it.
std::vector<std::string*> names_in(ForeignCheckpoint& checkpoint);

/// Adds lines to not_read; of many, the first and how many more there are.
void say_not_read(ForeignCheckpoint& checkpoint, const std::string& what,
                  const std::vector<std::string>& lines);
/// Whether two tensors of one shape and type have the same bits; without `may_be_constant`, and not the same
/// element everywhere. Of others few elements are read. Throws as ForeignFiles::read.
bool have_same_bits(const ForeignFiles& files, const ForeignTensor& a, const ForeignTensor& b,
                    bool may_be_constant);
/// Whether a trainer's key is that of the loss scaler's state, and what stands there in place of what is not
/// read, so that take_loss_scaler() finds it.
bool is_scaler_key(std::string_view key);
inline constexpr const char* kUnread = "what cannot be read";
/// What a trainer's key is: the learning-rate schedule's state, a count of updates; nullopt: neither.
std::optional<LostValue::Kind> kind_of(std::string_view key);

/// Takes over the state of a loss scaler, of DeepSpeed's or of torch's GradScaler, as far as `source` has
/// read it. One without a scale, or without the counts by which a dynamic one changes, is lost. One that is
/// off, or is always 1, is none.
void take_loss_scaler(ForeignCheckpoint& checkpoint, nlohmann::json scaler, const std::string& source);

/// Fills parameters, buffers, groups and the optimizer's name.
/// [Note: which entries are parameters] in saved_state.cc.
void assemble(ForeignCheckpoint& checkpoint, std::vector<SavedTensor> model,
              std::optional<SavedOptimizer> optimizer, const ModelOrder& order);

/// Makes one parameter of those that are one in the model, by `aliases` (ParameterOrder), where their
/// elements are the same: a format that saves each name's elements does not say it. Others stay two.
void join_tied(ForeignCheckpoint& checkpoint, const std::map<std::string, std::vector<std::string>>& aliases);

}  // namespace tessera::checkpoint
