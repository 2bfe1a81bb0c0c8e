// ForeignCheckpoint: what another program has saved: names, shapes, types, and where the elements lie in its
// files. Each format has a reader that makes one; all that comes after (verify, reshard, consolidate,
// convert, load) is the same code for every format, and for Tessera's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/open_files.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

/// Rows of consecutive elements in a file: the part of a tensor that lies there. A flat slice has one row; a
/// slice of dimension d has a row for each index of the dimensions before d.
struct Run {
  int file = 0;        ///< index in ForeignCheckpoint::files
  int64_t offset = 0;  ///< byte of the file where the first element is
  int64_t begin = 0;   ///< the first element, counted in the tensor's row-major order
  int64_t numel = 0;   ///< elements of a row
  int64_t rows = 1;
  int64_t tensor_step = 0;  ///< elements of the tensor from the begin of a row to that of the next
  int64_t file_step = 0;    ///< bytes of the file, the same
  bool operator==(const Run&) const = default;
};

/// A tensor whose elements lie in files. `runs` have each element once.
struct ForeignTensor {
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<Run> runs;

  int64_t numel() const;
};

/// The runs of a tensor of `shape` that lies in one file with these strides (in elements; torch's), from byte
/// `offset` on.
std::vector<Run> runs_of_strided(int file, int64_t offset, DType type, const std::vector<int64_t>& shape,
                                 const std::vector<int64_t>& strides);
/// A tensor that lies row-major in one file, from byte `offset` on. Requires: it has no more elements than
/// the file.
ForeignTensor contiguous_tensor(int file, int64_t offset, DType type, const std::vector<int64_t>& shape);
/// The runs of a box of a tensor: elements [begin[d], begin[d] + sizes[d]) of each dimension d of `shape`,
/// which lie row-major with `strides` (of the box, in elements) from byte `offset` of a file on.
std::vector<Run> runs_of_box(int file, int64_t offset, DType type, const std::vector<int64_t>& shape,
                             const std::vector<int64_t>& begin, const std::vector<int64_t>& sizes,
                             const std::vector<int64_t>& strides);

/// What torch.save has written: a file, or a part of one.
struct ArchivePart {
  std::filesystem::path path;
  int64_t begin = 0;
  int64_t bytes = -1;  ///< -1: to the file's end
};

struct ForeignParameter {
  std::string name;               ///< as the model calls it, without wrappers' prefixes
  DType dtype = DType::kFloat32;  ///< that the model computed in
  bool trainable = true;
  int group = 0;                     ///< index of its param group
  std::vector<std::string> aliases;  ///< other names of the same (tied) parameter
  ForeignTensor weights;             ///< the fp32 master where the source has one
  std::map<std::string, ForeignTensor>
      states;         ///< of the optimizer, each of the parameter's shape: "exp_avg"
  int64_t steps = 0;  ///< updates that the optimizer counts; 0: none known
  /// What an optimizer that runs on whole parameters has besides: states of another shape or type, "step"
  /// where it is a tensor, and values that are none.
  std::map<std::string, ForeignTensor> other_states = {};
  nlohmann::json other_values = nlohmann::json::object();
  std::string unread_state =
      {};  ///< a state that is not read, and why: an optimizer of whole parameters needs all
};

/// What a run that goes on computes with, and that could not be read, or told whose it is.
struct LostValue {
  enum class Kind : uint8_t {
    kState,       ///< of the optimizer: moments and counts of updates
    kOtherState,  ///< the same, that only an optimizer which keeps its states itself takes over
    kOption,      ///< of a param group: a rate
    kSchedule,    ///< of the state of the learning-rate schedule
    kScale,       ///< of the loss scaler's state: the scale, and when it changes
    kCount,       ///< of updates, by which a schedule goes on that has no state of its own
  };
  Kind kind = Kind::kState;
  std::string name;  ///< "exp_avg", "lr"; empty: several, or all
  std::string line;  ///< as in ForeignCheckpoint::not_read or other_states
};

struct ForeignCheckpoint {
  std::string format;          ///< "DeepSpeed ZeRO", "DeepSpeed universal", "torch.distributed.checkpoint", …
  std::string version;         ///< of the program that wrote it; empty: the files do not say
  int world_size = 1;          ///< ranks that wrote it
  int stage = -1;              ///< of ZeRO; -1: not said
  std::filesystem::path path;  ///< the checkpoint's folder or file
  std::vector<std::filesystem::path> files;  ///< that have elements
  std::vector<ArchivePart> archives;         ///< that were read; read_foreign() adds those in `files`
  std::vector<ForeignParameter> parameters;  ///< in the model's order where the source has it
  std::vector<std::pair<std::string, ForeignTensor>> buffers;  ///< persistent ones, by name

  std::string optimizer;  ///< its class as far as known: "AdamW", "Adam", "SGD", "Lion"; else empty
  std::vector<nlohmann::json> groups;  ///< options of the param groups: lr, betas, eps, weight_decay, …

  std::optional<int64_t> global_steps;  ///< updates, with skipped ones
  bool may_count_in_epoch = false;      ///< a program's "step" beside its "epoch" may be of that epoch alone
  std::optional<int64_t> skipped_steps;
  std::optional<int64_t> global_samples;
  std::optional<nlohmann::json> lr_scheduler;  ///< its state_dict
  std::optional<nlohmann::json> loss_scaler;   ///< cur_scale, cur_iter, last_overflow_iter, cur_hysteresis
  nlohmann::json client_state =
      nlohmann::json::object();  ///< what the user's program added, as far as JSON has it
  /// What the source has, or should have, that is not above: a line each, "lr_scheduler: an object of class
  /// …".
  std::vector<std::string> not_read;
  std::vector<LostValue> lost;  ///< of `not_read` and `other_states`
  /// What ForeignParameter::other_states are, a line each: not read where states are kept by element.
  std::vector<std::string> other_states;

  bool has_stage() const { return stage >= 0; }
  /// Adds the line to not_read and to `lost`.
  void lose(LostValue::Kind kind, const std::string& name, const std::string& line);
  /// Adds the lines of not_read from `begin` on to `lost`.
  void lose_since(size_t begin, LostValue::Kind kind, const std::string& name);
};

/// Reads elements; those of Tessera's own safetensors are compared with their hashes. Owns the open files.
/// Thread-safe.
class ForeignFiles {
 public:
  /// Opens files as they are read.
  explicit ForeignFiles(std::vector<std::filesystem::path> files);
  ForeignFiles(const ForeignFiles&) = delete;
  ForeignFiles& operator=(const ForeignFiles&) = delete;
  ~ForeignFiles();

  /// Fills `destination` with the tensor's elements from `begin` on, as the files have them. Throws
  /// CheckpointError naming the file that ends early, std::logic_error for a range outside of the tensor.
  void read(const ForeignTensor& tensor, int64_t begin, std::span<std::byte> destination) const;

 private:
  struct Open;
  void read_at(int file, int64_t offset, std::span<std::byte> destination) const;

  std::unique_ptr<OpenFiles<Open>> files_;
};

/// Equal for the same names, types, shapes and elements, of which it reads some in the middle of each tensor:
/// those that were trained on differ nearly everywhere. Throws as ForeignFiles::read().
std::string content_digest(const std::vector<std::pair<std::string, const ForeignTensor*>>& tensors,
                           const ForeignFiles& files);

/// Throws CheckpointError naming `source`, tensor, what was found: runs outside of their file or of the
/// tensor, elements that are there twice or not at all, a state of another shape, a name twice.
void check(const ForeignCheckpoint& checkpoint);

/// Reads every `step`-th archive of the checkpoint from `first` on, and compares the CRC-32 of its entries.
/// Returns how many archives have such. Throws CheckpointError naming the file and the entry that is damaged.
int64_t check_archives(const ForeignCheckpoint& checkpoint, size_t first, size_t step);
/// The same of all, on several threads.
int64_t check_archives(const ForeignCheckpoint& checkpoint);

/// The names of a model's parameters, by which the numbers that torch.optim gives to states are told.
struct ParameterOrder {
  std::vector<std::string> names;  ///< of trainable ones, in the model's order; empty: not known
  /// Where an optimizer is known that was made as the source's: the parameters of its groups, in their order.
  std::vector<std::vector<std::string>> groups = {};
  /// Further names of tied parameters, by the one in `names`: a file may have either.
  std::map<std::string, std::vector<std::string>> aliases = {};
  /// Names of the model's buffers: a file may not say which of its tensors are such.
  std::vector<std::string> buffers = {};
  /// Names of its parameters that are not trained.
  std::vector<std::string> frozen = {};
  /// Whether names that the checkpoint lacks are left to the caller, and no error.
  bool may_differ = false;
};

/// A checkpoint whose format is recognized.
struct IdentifiedCheckpoint {
  std::filesystem::path path;  ///< the folder of one checkpoint, or a file
  /// Reads all but the elements. Throws CheckpointError for a checkpoint that is damaged, incomplete or of a
  /// kind that is not read. `order`: for an optimizer's state that has numbers only, where the files do not
  /// tell which is which.
  std::function<ForeignCheckpoint(const ParameterOrder& order)> read;
};

/// Recognizes the format by the names of files, and of a file by its first bytes. `path`: what the format's
/// own programs are given: a folder of checkpoints, one checkpoint's folder, or a file. `tag`: a checkpoint
/// of the folder; empty: the newest by the format's own rule (`latest`, the highest checkpoint-N). nullopt:
/// no format that is known. Throws CheckpointError for a path or tag that is not there.
std::optional<IdentifiedCheckpoint> identify(const std::filesystem::path& path, const std::string& tag = "");

/// Reads and checks all but the elements of what identify() recognizes, and throws as that reader. Names that
/// differ from the model's by wrappers' prefixes ("module.") are the model's in the result.
ForeignCheckpoint read_foreign(const IdentifiedCheckpoint& identified, const ParameterOrder& order = {});

/// The same of the weights alone: where a model's safetensors are there, nothing else is read, and names are
/// the file's. A file that is of no other format is read as safetensors, whatever its name is.
std::optional<ForeignCheckpoint> read_weights(const std::filesystem::path& path,
                                              const ParameterOrder& order = {});

// The formats. Each: nullopt when the path does not look like it.
std::optional<IdentifiedCheckpoint> identify_deepspeed(const std::filesystem::path& path,
                                                       const std::string& tag);
std::optional<IdentifiedCheckpoint> identify_universal(const std::filesystem::path& path,
                                                       const std::string& tag);
/// A folder of torch.distributed.checkpoint: .metadata, .distcp.
std::optional<IdentifiedCheckpoint> identify_distributed(const std::filesystem::path& path);
/// A folder of Accelerate, the HF Trainer or Lightning.
std::optional<IdentifiedCheckpoint> identify_trainer(const std::filesystem::path& path);
/// A model: a Hugging Face folder, .safetensors, pytorch_model.bin with an index, a state dict's .pt.
std::optional<IdentifiedCheckpoint> identify_model(const std::filesystem::path& path);

/// A file of Lightning, or {"model": …, "optimizer": …}. nullopt: torch.save has written something else.
std::optional<ForeignCheckpoint> read_trainer_file(const std::filesystem::path& path,
                                                   const ParameterOrder& order = {});
/// A file of safetensors, an index of such (.json), or a folder of a model that has either; names are the
/// file's. nullopt: a folder without.
std::optional<ForeignCheckpoint> read_safetensors(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
