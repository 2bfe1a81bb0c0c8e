#include <algorithm>
#include <array>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/model_files.h"
#include "checkpoint/formats/safetensors.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxIndexBytes = 100'000'000;

/// In the order in which from_pretrained looks for them.
constexpr std::array<const char*, 10> kWeightNames = {
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
    "adapter_model.safetensors",  // of PEFT
    "adapter_model.bin",
};

bool is_safetensors(const fs::path& path) { return path.extension() == ".safetensors"; }
bool is_index(const fs::path& path) { return path.string().ends_with(".index.json"); }

SavedTensor saved_tensor(int index, const SafetensorsTensor& tensor) {
  SavedTensor out;
  out.name = tensor.name;
  out.tensor = contiguous_tensor(index, tensor.offset, tensor.type, tensor.shape);
  return out;
}

void add_safetensors(std::vector<SavedTensor>& out, ForeignCheckpoint& checkpoint, const fs::path& path) {
  const SafetensorsFile file(path);
  const int index = file_index(checkpoint, path);
  std::vector<SavedTensor> entries;
  for (const SafetensorsTensor& tensor : file.tensors()) entries.push_back(saved_tensor(index, tensor));
  std::sort(entries.begin(), entries.end(),
            [](const SavedTensor& a, const SavedTensor& b) { return a.name < b.name; });
  for (SavedTensor& entry : entries) out.push_back(std::move(entry));
}

/// ", in which 'epoch' is 3": the first value of a dict that is no tensor.
std::string other_value(const TorchFile& file) {
  const PickleValue& root = file.root();
  if (root.kind != PickleValue::Kind::kDict) return "";
  for (size_t i = 0; i + 1 < root.items.size(); i += 2)
    if (!file.tensor(*root.items[i + 1]))
      return str(", in which ", root.items[i]->describe(), " is ", root.items[i + 1]->describe());
  return "";
}

void read_torch_file(std::vector<SavedTensor>& out, ForeignCheckpoint& checkpoint, const fs::path& path) {
  const TorchFile file(path);
  if (!is_state_dict(file, file.root()))
    throw CheckpointError(path, ": found ", file.root().describe(), other_value(file),
                          "; expected a state dict, names and tensors, or a dict that has one as "
                          "\"model\", \"state_dict\" or the like");
  for (SavedTensor& entry : read_state_dict(checkpoint, file, file.root(), path.filename().string()))
    out.push_back(std::move(entry));
}

void read_one(std::vector<SavedTensor>& out, ForeignCheckpoint& checkpoint, const fs::path& path) {
  if (is_safetensors(path))
    add_safetensors(out, checkpoint, path);
  else
    read_torch_file(out, checkpoint, path);
}

/// Reads the files that an index names, and checks that each has what the index says.
/// `add`: read_one() or add_safetensors().
void read_indexed(std::vector<SavedTensor>& out, ForeignCheckpoint& checkpoint, const fs::path& index,
                  void (*add)(std::vector<SavedTensor>&, ForeignCheckpoint&, const fs::path&)) {
  const auto weight_map = parse_safetensors_index(InputFile(index).read_all(kMaxIndexBytes), index.string());
  std::set<std::string> files;
  for (const auto& [name, file] : weight_map) files.insert(file);
  std::set<std::string> seen;
  for (const std::string& file : files) {
    const fs::path path = index.parent_path() / file;
    if (!is_there(path))
      throw CheckpointError(path, " is missing; ", index.filename(),
                            " says that it has tensors of the model: copy all files of the folder");
    const size_t before = out.size();
    add(out, checkpoint, path);
    for (size_t i = before; i < out.size(); ++i) {
      const std::string& name = out[i].name;
      const auto place = weight_map.find(name);
      if (place == weight_map.end())
        throw CheckpointError(index, ": tensor ", quoted_name(name), " of ", file, " is not in the index");
      if (place->second != file || !seen.insert(name).second)
        throw CheckpointError(index, ": tensor ", quoted_name(name), " is in ", file,
                              "; the index has it in ", place->second);
    }
  }
  for (const auto& [name, file] : weight_map)
    if (!seen.contains(name))
      throw CheckpointError(index, ": tensor ", quoted_name(name), " is not in ", file,
                            ", where the index has it");
}

}  // namespace

fs::path weights_in(const fs::path& folder) {
  for (const char* name : kWeightNames)
    if (is_there(folder / name)) return folder / name;
  return {};
}

ModelFiles read_model_files(ForeignCheckpoint& checkpoint, const fs::path& path) {
  ModelFiles out;
  if (is_index(path))
    read_indexed(out.entries, checkpoint, path, read_one);
  else
    read_one(out.entries, checkpoint, path);
  // save_pretrained fills files in the model's order. A safetensors file has its names sorted.
  out.in_order = std::none_of(checkpoint.files.begin(), checkpoint.files.end(), is_safetensors);
  return out;
}

std::optional<IdentifiedCheckpoint> identify_model(const fs::path& path) {
  const bool of_folder = is_folder(path);
  const fs::path weights = of_folder ? weights_in(path) : path;
  const char* format = nullptr;
  if (of_folder ? !weights.empty() : is_index(path))
    format = "Hugging Face model";
  else if (!of_folder && is_safetensors(path))
    format = "safetensors";
  else if (!of_folder && TorchFile::recognizes(path))
    format = "torch.save";
  else
    return std::nullopt;
  return IdentifiedCheckpoint{path, [=](const ParameterOrder& given) {
                                ForeignCheckpoint checkpoint{.format = format, .path = path};
                                ModelFiles model = read_model_files(checkpoint, weights);
                                assemble(checkpoint, std::move(model.entries), std::nullopt, {given});
                                return checkpoint;
                              }};
}

std::optional<ForeignCheckpoint> read_safetensors(const fs::path& path) {
  fs::path weights = path;
  if (is_folder(path)) {
    weights = path / kWeightNames[0];
    if (!is_there(weights)) weights = path / kWeightNames[1];
    if (!is_there(weights)) return std::nullopt;
  }
  ForeignCheckpoint checkpoint;
  checkpoint.path = path;
  checkpoint.format = "safetensors";
  std::vector<SavedTensor> entries;
  if (weights.extension() == ".json")
    read_indexed(entries, checkpoint, weights, add_safetensors);
  else
    add_safetensors(entries, checkpoint, weights);
  ModelOrder order;
  order.keeps_names = true;
  assemble(checkpoint, std::move(entries), std::nullopt, order);
  check(checkpoint);
  return checkpoint;
}

}  // namespace tessera::checkpoint
