#include "checkpoint/consolidate/convert_checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/training_state.h"
#include "checkpoint/consolidate/writers.h"
#include "checkpoint/formats/convert.h"
#include "checkpoint/formats/model_writer.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/save.h"
#include "core/check.h"
#include "core/error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// nullopt: the target has the state of training, too.
std::optional<ModelFormat> format_of(ConvertTarget target) {
  switch (target) {
    case ConvertTarget::kTorch: return ModelFormat::kTorch;
    case ConvertTarget::kSafetensors: return ModelFormat::kSafetensors;
    case ConvertTarget::kHdf5: return ModelFormat::kHdf5;
    default: return std::nullopt;
  }
}

/// Writes one full model that other programs read (DeepSpeed: zero_to_fp32.py): all parameters (trainable and
/// frozen, under each of their names) and persistent buffers; a file, or a folder of shards.
void write_weights(const Conversion& conversion) {
  const ConvertOptions& options = conversion.options;
  const Manifest& manifest = conversion.checkpoint.manifest();
  const DType dtype = options.dtype.value_or(DType::kFloat32);
  TESSERA_CHECK(dtype != DType::kFloat64, "dtype ", name_of(dtype));
  ConvertResult& result = conversion.result;
  std::vector<ModelTensor> tensors;      // as they will be written
  std::vector<StreamedTensor> streamed;  // by tensor
  std::vector<std::string> rounded;      // of fp64, written in fp32
  const auto add = [&](const std::string& name, const TensorId& id, const std::vector<std::string>& aliases) {
    StreamedTensor tensor = checkpoint::streamed(conversion.checkpoint.elements(), name, id);
    if (is_floating(tensor.saved.type)) tensor.type = dtype;
    if (tensor.saved.type == DType::kFloat64 && tensor.type == DType::kFloat32) rounded.push_back(name);
    tensors.push_back({name, tensor.saved.shape, tensor.type, aliases});
    streamed.push_back(std::move(tensor));
    result.num_names += 1 + std::ssize(aliases);
  };
  const std::vector<SavedParameter>& parameters = manifest.layout.parameters;
  for (size_t i = 0; i < parameters.size(); ++i)
    add(parameters[i].name, TensorId::weights(static_cast<int>(i)), parameters[i].aliases);
  for (size_t i = 0; i < manifest.tensors.size(); ++i) add(manifest.tensors[i].name, TensorId::buffer(i), {});
  if (!rounded.empty()) result.notes.push_back(str("left out: ", rounded_to_fp32(rounded)));
  const auto writer = open_model_writer(conversion.disk, {.format = format_of(options.target).value(),
                                                          .path = options.output,
                                                          .tensors = std::move(tensors),
                                                          .max_shard_bytes = options.max_shard_bytes});
  stream_into(conversion, streamed, [&](size_t, std::span<const std::byte> data) { writer->append(data); });
  writer->finish();
}

std::vector<std::string> extra_state_of(const Manifest& manifest) {
  std::vector<std::string> found;
  const auto module = manifest.state.find("module");
  if (module == manifest.state.end() || !module->is_object()) return found;
  const auto names = module->find("extra_state");
  if (names == module->end() || !names->is_array()) return found;
  for (const json& name : *names)
    if (name.is_string()) found.push_back(name);
  return found;
}

/// Makes the folder in which a checkpoint of Tessera is saved, and keeps others of this command out of it,
/// which may write the same tag. Without locks in its file system, holds nothing.
FileDescriptor alone_in(const fs::path& folder, const Disk& disk) {
  disk.create_directories(folder);
  FileDescriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw CheckpointError(folder,
                          ": another process is converting a checkpoint into it; expected to be alone: "
                          "wait until that has ended, or give another folder");
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
  switch (target) {
    case ConvertTarget::kTessera: return "tessera";
    case ConvertTarget::kUniversal: return "universal";
    case ConvertTarget::kDistributed: return "dcp";
    default: return name_of(format_of(target).value());
  }
}

std::optional<ConvertTarget> parse_convert_target(std::string_view word) {
  using enum ConvertTarget;
  for (const ConvertTarget target : {kTessera, kUniversal, kDistributed, kTorch, kSafetensors, kHdf5})
    if (name_of(target) == word) return target;
  return std::nullopt;
}

void stream_into(const Conversion& conversion, const std::vector<StreamedTensor>& tensors,
                 const std::function<void(size_t, std::span<const std::byte>)>& write) {
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
  if (streamed.num_overflowed > 0)
    conversion.result.first_overflowed = tensors[streamed.first_overflowed].name;
}

bool is_weights_alone(ConvertTarget target) { return format_of(target).has_value(); }

/// Throws CheckpointError where the output would replace a file of the source. A file of weights that is the
/// source itself may become another one of them.
static void keep_source(const Checkpoint& checkpoint, const ConvertOptions& options) {
  std::error_code error;
  if (!fs::is_regular_file(options.output, error)) return;
  const fs::path folder = fs::canonical(options.directory, error);
  const fs::path output = fs::canonical(options.output, error);
  const std::string name = output.filename().string();
  // Those that are not among ForeignCheckpoint::files, as they hold no tensors.
  constexpr std::string_view kSmall[] = {kLatestName, "latest_universal",  kManifestName,
                                         ".metadata", "meta.pt",           "optimizer_state.pt",
                                         "step.pt",   "trainer_state.json"};
  constexpr std::string_view kEnds[] = {"_model_states.pt", "_optim_states.pt"};
  const bool is_inside = std::ranges::mismatch(folder, output).in1 == folder.end();
  bool is_source =
      is_inside && (std::ranges::find(kSmall, name) != std::end(kSmall) ||
                    std::ranges::any_of(kEnds, [&](std::string_view end) { return name.ends_with(end); }));
  if (const ForeignCheckpoint* const foreign = checkpoint.foreign()) {
    if (fs::is_regular_file(foreign->path, error) && foreign->groups.empty()) return;
    std::vector<fs::path> files = foreign->files;
    for (const ArchivePart& archive : foreign->archives) files.push_back(archive.path);
    is_source = is_source || std::ranges::any_of(files, [&](const fs::path& file) {
                  return fs::equivalent(file, output, error);
                });
  }
  if (is_source)
    throw CheckpointError(options.output, ": is a file of the checkpoint ", checkpoint.path(),
                          ", which would be replaced; expected another name");
}

static ConvertResult convert(const ConvertOptions& options) {
  const bool weights_alone = is_weights_alone(options.target);
  if (options.dtype && options.target != ConvertTarget::kDistributed && !weights_alone)
    throw CheckpointError("dtype ", name_of(*options.dtype), " with ", name_of(options.target),
                          ": expected none, because a ", name_of(options.target),
                          " checkpoint has fp32 masters");
  const Checkpoint checkpoint = Checkpoint::open(options.directory, options.tag);
  keep_source(checkpoint, options);
  const Manifest& manifest = checkpoint.manifest();
  ConvertResult result{.checkpoint = checkpoint.path(), .output = options.output};
  count_tensors(checkpoint, result);
  if (const ForeignCheckpoint* const foreign = checkpoint.foreign()) {
    check_archives(*foreign);
    for (const std::string& line : foreign->not_read) result.notes.push_back(str("left out: ", line));
    if (!weights_alone)
      for (const std::string& line : foreign->other_states) result.notes.push_back(str("left out: ", line));
  }
  if (options.target != ConvertTarget::kTessera) result.extra_state = extra_state_of(manifest);
  TrainingState state;
  if (options.target != ConvertTarget::kTessera && !weights_alone) {
    state = training_state(manifest, checkpoint.path().string(), options.scheduled_options);
    result.notes.insert(result.notes.end(), state.notes.begin(), state.notes.end());
  }
  const Disk disk(options.disk);
  const Conversion conversion{checkpoint, state, options, disk, result};
  switch (options.target) {
    case ConvertTarget::kUniversal: write_universal(conversion); break;
    case ConvertTarget::kDistributed: write_distributed(conversion); break;
    case ConvertTarget::kTessera: write_tessera(conversion); break;
    default: write_weights(conversion); break;
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
