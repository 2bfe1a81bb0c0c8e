#include "checkpoint/consolidate/convert_checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>

#include <array>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/consolidate.h"
#include "checkpoint/consolidate/training_state.h"
#include "checkpoint/consolidate/writers.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/write/publish.h"
#include "core/error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::array kTargets{std::pair{ConvertTarget::kTessera, std::string_view("tessera")},
                              std::pair{ConvertTarget::kUniversal, std::string_view("universal")},
                              std::pair{ConvertTarget::kDistributed, std::string_view("dcp")},
                              std::pair{ConvertTarget::kTorch, std::string_view("pt")},
                              std::pair{ConvertTarget::kSafetensors, std::string_view("safetensors")}};

ConvertResult write_model(const ConvertOptions& options) {
  const bool is_torch = options.target == ConvertTarget::kTorch;
  const ConsolidateResult model =
      consolidate({.directory = options.directory,
                   .tag = options.tag,
                   .output = options.output,
                   .format = is_torch ? ModelFormat::kTorch : ModelFormat::kSafetensors,
                   .dtype = options.dtype.value_or(DType::kFloat32),
                   .max_shard_bytes = options.max_shard_bytes,
                   .disk = options.disk,
                   .progress = options.progress});
  ConvertResult result{.checkpoint = model.checkpoint,
                       .output = options.output,
                       .num_tensors = model.num_tensors,
                       .numel = model.numel,
                       .bytes = model.bytes,
                       .num_overflowed = model.num_overflowed,
                       .first_overflowed = model.first_overflowed};
  result.notes.push_back(
      str(name_of(options.target), " has the model's tensors alone: no optimizer states, no counts"));
  for (const std::string& line : model.not_read) result.notes.push_back(str("left out: ", line));
  if (!model.left_out.empty())
    result.notes.push_back(str("what get_extra_state() gave is left out: ", join(model.left_out, ", ")));
  return result;
}

/// Notes what modules' get_extra_state() gave: only Tessera's checkpoints have it.
void note_extra_state(const Manifest& manifest, std::vector<std::string>& notes) {
  const auto module = manifest.state.find("module");
  if (module == manifest.state.end() || !module->is_object()) return;
  const auto names = module->find("extra_state");
  if (names == module->end() || !names->is_array() || names->empty()) return;
  std::vector<std::string> texts;
  for (const json& name : *names)
    if (name.is_string()) texts.push_back(name);
  notes.push_back(str("what get_extra_state() gave is left out: ", join(texts, ", ")));
}

/// Makes the folder in which a checkpoint of Tessera is saved, and keeps others of this command out of it: a
/// save removes what an earlier one has left there. Without locks in its file system, holds nothing.
FileDescriptor alone_in(const fs::path& folder, const Disk& disk) {
  disk.create_directories(folder);
  FileDescriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw CheckpointError(str(folder.string(),
                              ": another process is converting a checkpoint into it; expected to be alone: "
                              "wait until that has ended, or give another folder"));
  return lock;
}

void count_tensors(const Checkpoint& checkpoint, ConvertResult& result) {
  const Manifest& manifest = checkpoint.manifest();
  for (const SavedParameter& parameter : manifest.layout.parameters) {
    ++result.num_tensors;
    result.numel += parameter.numel();
  }
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    ++result.num_tensors;
    result.numel += checkpoint.elements().find(TensorId::buffer(i))->numel();
  }
}

}  // namespace

std::string_view name_of(ConvertTarget target) {
  for (const auto& [one, name] : kTargets)
    if (one == target) return name;
  return "";
}

std::optional<ConvertTarget> parse_convert_target(std::string_view word) {
  for (const auto& [target, name] : kTargets)
    if (name == word) return target;
  return std::nullopt;
}

void stream_into(const Conversion& conversion, const std::vector<StreamedTensor>& tensors,
                 const std::function<void(size_t, std::span<const std::byte>)>& write,
                 const std::function<std::string(size_t)>& name_of) {
  int64_t total = 0, done = 0;
  for (const StreamedTensor& tensor : tensors) total += tensor.bytes();
  const StreamResult streamed = stream_tensors(conversion.checkpoint.elements(), tensors,
                                               [&](size_t tensor, std::span<const std::byte> data) {
                                                 write(tensor, data);
                                                 done += static_cast<int64_t>(data.size());
                                                 if (conversion.options.progress)
                                                   conversion.options.progress(done, total);
                                               });
  conversion.result.bytes = streamed.bytes;
  conversion.result.num_overflowed = streamed.num_overflowed;
  if (streamed.num_overflowed > 0) conversion.result.first_overflowed = name_of(streamed.first_overflowed);
}

static ConvertResult convert(const ConvertOptions& options) {
  if (options.target == ConvertTarget::kTorch || options.target == ConvertTarget::kSafetensors)
    return write_model(options);
  if (options.dtype && options.target != ConvertTarget::kDistributed)
    throw CheckpointError(str("dtype ", name_of(*options.dtype), " with ", name_of(options.target),
                              ": expected none, because a ", name_of(options.target),
                              " checkpoint has fp32 masters"));
  const Checkpoint checkpoint = Checkpoint::open(options.directory, options.tag);
  const Manifest& manifest = checkpoint.manifest();
  ConvertResult result{.checkpoint = checkpoint.path(), .output = options.output};
  count_tensors(checkpoint, result);
  if (const ForeignCheckpoint* const foreign = checkpoint.foreign()) {
    check_archives(*foreign);
    for (const std::vector<std::string>* lines : {&foreign->not_read, &foreign->other_states})
      for (const std::string& line : *lines) result.notes.push_back(str("left out: ", line));
  }
  TrainingState state;
  if (options.target != ConvertTarget::kTessera) {
    state = training_state(manifest, checkpoint.path().string(), options.scheduled_options);
    result.notes.insert(result.notes.end(), state.notes.begin(), state.notes.end());
    note_extra_state(manifest, result.notes);
  }
  const Disk disk(options.disk);
  const Conversion conversion{checkpoint, state, options, disk, result};
  switch (options.target) {
    case ConvertTarget::kUniversal: write_universal(conversion); break;
    case ConvertTarget::kDistributed: write_distributed(conversion); break;
    default: write_tessera(conversion); break;
  }
  return result;
}

ConvertResult convert_checkpoint(const ConvertOptions& options) {
  const std::vector<fs::path> missing = missing_folders(options.output);
  FileDescriptor lock;
  if (options.target == ConvertTarget::kTessera) lock = alone_in(options.output, Disk(options.disk));
  try {
    return convert(options);
  } catch (...) {  // leaves no folder that is empty and was not there
    std::error_code error;
    for (const fs::path& folder : missing)
      if (fs::is_directory(folder, error)) fs::remove(folder, error);
    throw;
  }
}

}  // namespace tessera::checkpoint
