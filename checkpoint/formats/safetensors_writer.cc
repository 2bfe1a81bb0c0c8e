#include "checkpoint/formats/safetensors_writer.h"

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/block_hashes.h"
#include "checkpoint/formats/pending_output.h"
#include "checkpoint/formats/safetensors.h"
#include "core/files/pending_file.h"

namespace tessera::checkpoint {
namespace {

/// Computes the layout of one safetensors file. Immutable.
class SafetensorsLayout {
 public:
  /// Computes the layout of a file with the tensors `chosen` (indices into `tensors`) under all their names.
  /// `file` names it in errors. Throws CheckpointError as format_safetensors_header.
  SafetensorsLayout(const std::vector<ModelTensor>& tensors, const std::vector<size_t>& chosen,
                    const std::string& file) {
    SafetensorsHeader header;
    header.metadata = {{"format", "pt"}};  // transformers refuses files without it
    std::map<std::string_view, size_t> index_of;
    const auto add = [&](const std::string& name, size_t index) {
      header.tensors.push_back({name, tensors[index].shape, tensors[index].type, 0, 0});
      index_of[name] = index;
    };
    for (const size_t index : chosen) {
      add(tensors[index].name, index);
      for (const std::string& alias : tensors[index].aliases) add(alias, index);
    }
    place_tensors(header.tensors);
    reserve_digest(header);
    head_ = format_safetensors_header(header, file);
    const auto data_begin = static_cast<int64_t>(head_.size());
    file_bytes_ = data_begin;
    for (const SafetensorsTensor& tensor : header.tensors) {
      in_file_order_.push_back(index_of.at(tensor.name));
      positions_[in_file_order_.back()].push_back(data_begin + tensor.offset);
      file_bytes_ += tensor.bytes;
    }
  }

  /// The header, to be written at byte 0; `hashes` are the block hashes by index of tensor, of all
  /// chosen ones.
  std::string head(const std::map<size_t, std::vector<uint64_t>>& hashes) const {
    std::vector<uint64_t> all;
    for (const size_t index : in_file_order_)
      if (const auto found = hashes.find(index); found != hashes.end())
        all.insert(all.end(), found->second.begin(), found->second.end());
    std::string head = head_;
    fill_digest(head, all);
    return head;
  }
  int64_t file_bytes() const { return file_bytes_; }
  /// Offsets in the file of the bytes of tensor `index`, one for each of its names.
  const std::vector<int64_t>& positions(size_t index) const { return positions_.at(index); }

 private:
  std::string head_;                   // with zeros as hashes
  std::vector<size_t> in_file_order_;  // indices of the tensors, once for each name
  int64_t file_bytes_ = 0;
  std::map<size_t, std::vector<int64_t>> positions_;
};

/// The indices of the tensors in each shard, as save_pretrained splits them (huggingface_hub's
/// split_torch_state_dict_into_shards): in order, with a new shard when the next tensor would exceed
/// `max_bytes`, and a separate shard for a tensor larger than that. All names of a tied tensor are in one
/// shard, and the bytes of each count.
std::vector<std::vector<size_t>> plan_shards(const std::vector<ModelTensor>& tensors, int64_t max_bytes) {
  std::vector<std::vector<size_t>> shards;
  std::vector<size_t> current;
  int64_t current_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = tensors[i].bytes() * static_cast<int64_t>(1 + tensors[i].aliases.size());
    if (bytes > max_bytes) {
      shards.push_back({i});
      continue;
    }
    if (bytes > max_bytes - current_bytes) {
      shards.push_back(std::move(current));
      current.clear();
      current_bytes = 0;
    }
    current.push_back(i);
    current_bytes += bytes;
  }
  if (!current.empty()) shards.push_back(std::move(current));
  return shards;
}

/// "model.safetensors" of one, "model-00002-of-00005.safetensors" of several. `shard` counts from 0.
std::string shard_file_name(size_t shard, size_t num_shards) {
  if (num_shards == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, num_shards);
  return name;
}

void write_copies(OutputFile& file, const std::vector<int64_t>& positions, int64_t offset,
                  std::span<const std::byte> data) {
  for (const int64_t position : positions) file.write_at(position + offset, data);
}

/// Hashes the blocks of each tensor. Bytes come in order, one tensor after the other. Not thread-safe.
class TensorHashes {
 public:
  void add(size_t index, const ModelTensor& tensor, int64_t offset, std::span<const std::byte> data) {
    if (offset == 0) hasher_.emplace();
    hasher_->update(data);
    if (hasher_->bytes() == tensor.bytes()) by_tensor_[index] = hasher_->finish();
  }
  const std::map<size_t, std::vector<uint64_t>>& by_tensor() const { return by_tensor_; }

 private:
  std::optional<BlockHasher> hasher_;  // of the current tensor
  std::map<size_t, std::vector<uint64_t>> by_tensor_;
};

void write_head(OutputFile& file, const SafetensorsLayout& layout, const TensorHashes& hashes) {
  const std::string head = layout.head(hashes.by_tensor());
  file.write_at(0, std::as_bytes(std::span(head)));
}

class SafetensorsFileWriter : public ModelWriter {
 public:
  SafetensorsFileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)),
        layout_(tensors(), all_of(tensors()), options.path.string()),
        file_(disk, options.path) {
    file_.file().reserve(layout_.file_bytes());
  }

 private:
  static std::vector<size_t> all_of(const std::vector<ModelTensor>& tensors) {
    std::vector<size_t> indices(tensors.size());
    std::iota(indices.begin(), indices.end(), size_t{0});
    return indices;
  }

  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    hashes_.add(index, tensors()[index], offset, data);
    write_copies(file_.file(), layout_.positions(index), offset, data);
  }
  void publish() override {
    write_head(file_.file(), layout_, hashes_);
    file_.publish();
  }

  SafetensorsLayout layout_;
  TensorHashes hashes_;
  PendingFile file_;
};

// Names that shard_file_name() gives, and the index's.
bool is_weights_file(const std::string& name) {
  unsigned long shard = 0, num_shards = 0;
  if (name == shard_file_name(0, 1) || name == kSafetensorsIndexName) return true;
  return std::sscanf(name.c_str(), "model-%lu-of-%lu.safetensors", &shard, &num_shards) == 2 && shard > 0 &&
         num_shards > 1 && name == shard_file_name(shard - 1, num_shards);
}

class SafetensorsShardsWriter : public ModelWriter {
 public:
  SafetensorsShardsWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)),
        disk_(disk),
        shard_of_(tensors().size()),
        folder_(disk, options.path, is_weights_file) {
    std::vector<std::vector<size_t>> plan = plan_shards(tensors(), options.max_shard_bytes);
    if (plan.empty()) plan.emplace_back();  // a model without tensors is a file too
    for (const std::vector<size_t>& chosen : plan) {
      const size_t shard = shards_.size();
      const std::string name = shard_file_name(shard, plan.size());
      int64_t bytes = 0;
      for (const size_t index : chosen) {
        shard_of_[index] = shard;
        bytes += tensors()[index].bytes();
      }
      shards_.push_back({name, SafetensorsLayout(tensors(), chosen, (options.path / name).string()), bytes});
    }
  }

 private:
  struct Shard {
    std::string file_name;
    SafetensorsLayout layout;
    int64_t bytes_left;  // still to be passed to write()
    bool begun = false;
    std::optional<OutputFile> file = std::nullopt;
  };

  // A large tensor has a separate shard and does not end the shard before it. So at most two files are open.
  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    Shard& shard = shards_[shard_of_[index]];
    if (!shard.file) open(shard);
    hashes_.add(index, tensors()[index], offset, data);
    write_copies(*shard.file, shard.layout.positions(index), offset, data);
    shard.bytes_left -= static_cast<int64_t>(data.size());
    if (shard.bytes_left == 0) close(shard);
  }

  void open(Shard& shard) {
    shard.begun = true;
    shard.file.emplace(disk_.create(folder_.temporary() / shard.file_name));
    shard.file->reserve(shard.layout.file_bytes());
  }

  void close(Shard& shard) {
    write_head(*shard.file, shard.layout, hashes_);
    shard.file->close();
    shard.file.reset();
  }

  void publish() override {
    nlohmann::json weight_map = nlohmann::json::object();
    int64_t total_size = 0;
    for (Shard& shard : shards_) {
      if (shard.begun) continue;  // it has empty tensors only
      open(shard);
      close(shard);
    }
    for (size_t i = 0; i < tensors().size(); ++i) {
      const ModelTensor& tensor = tensors()[i];
      const std::string& file_name = shards_[shard_of_[i]].file_name;
      weight_map[tensor.name] = file_name;
      for (const std::string& alias : tensor.aliases) weight_map[alias] = file_name;
      total_size += tensor.bytes() * static_cast<int64_t>(1 + tensor.aliases.size());
    }
    if (shards_.size() > 1) {
      const nlohmann::json index = {{"metadata", {{"total_size", total_size}}}, {"weight_map", weight_map}};
      OutputFile file = disk_.create(folder_.temporary() / kSafetensorsIndexName);
      file.append(index.dump(2, ' ', /*ensure_ascii=*/true) +
                  "\n");  // what Python's json.dumps(indent=2) writes
      file.close();
    }
    folder_.publish();
  }

  const Disk& disk_;
  std::vector<size_t> shard_of_;  // by tensor
  std::vector<Shard> shards_;
  TensorHashes hashes_;
  PendingDirectory folder_;
};

}  // namespace

std::unique_ptr<ModelWriter> open_safetensors_writer(const Disk& disk, ModelWriterOptions options) {
  if (options.max_shard_bytes > 0) return std::make_unique<SafetensorsShardsWriter>(disk, std::move(options));
  return std::make_unique<SafetensorsFileWriter>(disk, std::move(options));
}

}  // namespace tessera::checkpoint
