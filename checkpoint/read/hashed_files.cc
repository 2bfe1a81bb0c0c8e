#include "checkpoint/read/hashed_files.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/sharded/manifest.h"
#include "core/check.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxProblemsPerFile = 20;

int64_t block_bytes(const FileRecord& file, int64_t block) {
  return std::min(kBlockBytes, file.bytes - block * kBlockBytes);
}

std::string describe_block(const FileRecord& file, int64_t block) {
  const int64_t begin = block * kBlockBytes;
  return str("block ", block, " (bytes ", begin, " to ", begin + block_bytes(file, block), ")");
}

/// Names of the datasets with bytes in a range, for messages.
std::string datasets_in(const FileRecord& file, int64_t begin, int64_t end) {
  std::string names;
  for (const DatasetRecord& dataset : file.datasets)
    if (dataset.bytes > 0 && dataset.offset < end && dataset.offset + dataset.bytes > begin)
      names += ", " + dataset.name;
  return names;
}

std::vector<fs::path> paths_of(const fs::path& folder, const Manifest& manifest) {
  std::vector<fs::path> paths;
  for (const FileRecord& file : manifest.files) paths.push_back(folder / file.name);
  return paths;
}

}  // namespace

HashedFiles::HashedFiles(const fs::path& folder, std::shared_ptr<const Manifest> manifest)
    : ElementSource(std::move(manifest)),
      files_(paths_of(folder, *manifest_)),
      checked_(static_cast<size_t>(manifest_->world_size())) {}

void HashedFiles::check_sizes() const {
  for (int rank = 0; rank < manifest_->world_size(); ++rank) {
    const FileRecord& record = manifest_->rank_file(rank);
    const fs::path& path = files_.path(rank);
    const auto held = files_.find(rank);
    std::error_code error;
    const uintmax_t bytes = held ? static_cast<uintmax_t>(held->bytes()) : fs::file_size(path, error);
    if (error) throw CheckpointError(path, ": cannot be read: ", error.message());
    if (bytes != static_cast<uintmax_t>(record.bytes))
      throw CheckpointError(path, ": found ", bytes, " bytes; expected ", record.bytes, ", as saved");
  }
}

const DatasetRecord* HashedFiles::dataset_of_whole(const TensorId& id) const {
  if (id.kind == TensorId::Kind::kBuffer)
    return manifest_->rank_file(0).datasets.find(manifest_->tensors[static_cast<size_t>(id.index)].dataset);
  if (id.index >= manifest_->world_size()) return nullptr;
  return manifest_->rank_file(id.index).datasets.find(blob_dataset(id.name));
}

std::optional<StoredTensor> HashedFiles::find_whole(const TensorId& id) const {
  const DatasetRecord* const dataset = dataset_of_whole(id);
  if (dataset == nullptr) return std::nullopt;
  return StoredTensor{dataset->type, dataset->shape};
}

/// A parameter is a range of its unit, of which rank r's file has the r-th of equal shards.
HashedFiles::Place HashedFiles::place(const TensorId& id, int64_t first, int64_t most) const {
  const SavedLayout& layout = manifest_->layout;
  const bool is_state = id.kind == TensorId::Kind::kState;
  if (!is_state && id.kind != TensorId::Kind::kWeights)
    return {id.kind == TensorId::Kind::kBlob ? id.index : 0, dataset_of_whole(id), first, most};
  const int unit = layout.parameters[static_cast<size_t>(id.index)].unit;
  const SavedPlace at = layout.place(id.index, first);
  const std::string name = is_state ? state_dataset(id.name, unit) : weights_dataset(layout, unit);
  const FileRecord& file = manifest_->rank_file(at.rank);
  const DatasetRecord* const dataset = file.datasets.find(name);
  if (dataset == nullptr) throw CheckpointError(files_.path(at.rank), ": has no dataset ", name);
  return {at.rank, dataset, at.begin, std::min(most, at.numel)};
}

Extent HashedFiles::extent(const TensorId& id, int64_t first, int64_t most) const {
  const Place at = place(id, first, most);
  return {at.rank, at.dataset->offset + at.begin * size_bytes(at.dataset->type), at.numel};
}

void HashedFiles::read(const TensorId& id, int64_t first, std::span<std::byte> destination) const {
  while (!destination.empty()) {
    const Place at = place(id, first, std::ssize(destination));
    const int64_t size = size_bytes(at.dataset->type);
    TESSERA_CHECK(std::ssize(destination) % size == 0, "a part of an element of ", at.dataset->name);
    const int64_t numel = std::min(at.numel, std::ssize(destination) / size);
    const auto bytes = static_cast<size_t>(numel * size);
    read(at.rank, *at.dataset, at.begin * size, destination.first(bytes));
    destination = destination.subspan(bytes);
    first += numel;
  }
}

void HashedFiles::check(const TensorId& id, int64_t first, int64_t numel) const {
  while (numel > 0) {
    const Place at = place(id, first, numel);
    const int64_t size = size_bytes(at.dataset->type);
    check(at.rank, *at.dataset, at.begin * size, at.numel * size);
    first += at.numel;
    numel -= at.numel;
  }
}

/// Fills `into`, which has the block's length, and verifies it.
void HashedFiles::read_block(int rank, const DatasetRecord& dataset, int64_t block,
                             std::span<std::byte> into) const {
  const FileRecord& record = manifest_->rank_file(rank);
  const auto input = files_.get(rank);
  input->read_at(block * kBlockBytes, into);
  bytes_read_ += std::ssize(into);
  const uint64_t expected = record.block_hashes[static_cast<size_t>(block)], found = hash_block(into);
  if (found != expected)
    throw CheckpointError(input->path(), ": ", describe_block(record, block), ", dataset ", dataset.name,
                          ", is damaged: found hash ", hashes_to_hex({&found, 1}), "; expected ",
                          hashes_to_hex({&expected, 1}));
}

/// Copies a part of a block, through the cache.
void HashedFiles::copy_from_block(int rank, const DatasetRecord& dataset, int64_t block, int64_t skip,
                                  std::span<std::byte> into) const {
  const std::lock_guard lock(cache_mutex_);
  auto* cached = std::find_if(cache_.begin(), cache_.end(),
                              [&](const CachedBlock& one) { return one.rank == rank && one.block == block; });
  if (cached == cache_.end()) {
    cached = std::min_element(cache_.begin(), cache_.end(),
                              [](const auto& a, const auto& b) { return a.used < b.used; });
    cached->rank = -1;  // invalid if reading throws
    cached->bytes.resize(static_cast<size_t>(block_bytes(manifest_->rank_file(rank), block)));
    read_block(rank, dataset, block, cached->bytes);
    cached->rank = rank;
    cached->block = block;
  }
  cached->used = ++clock_;
  std::memcpy(into.data(), cached->bytes.data() + skip, into.size());
}

void HashedFiles::read(int rank, const DatasetRecord& dataset, int64_t begin,
                       std::span<std::byte> destination) const {
  TESSERA_CHECK(begin >= 0 && std::ssize(destination) <= dataset.bytes - begin, dataset.name);
  const FileRecord& record = manifest_->rank_file(rank);
  try {
    for (int64_t next = dataset.offset + begin; !destination.empty();) {
      const int64_t block = next / kBlockBytes, skip = next % kBlockBytes,
                    in_block = block_bytes(record, block);
      const auto part =
          destination.first(static_cast<size_t>(std::min<int64_t>(in_block - skip, destination.size())));
      if (std::ssize(part) == in_block)
        read_block(rank, dataset, block, part);
      else
        copy_from_block(rank, dataset, block, skip, part);
      next += std::ssize(part);
      destination = destination.subspan(part.size());
    }
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
}

void HashedFiles::check(int rank, const DatasetRecord& dataset, int64_t begin, int64_t bytes) const {
  TESSERA_CHECK(begin >= 0 && bytes <= dataset.bytes - begin, dataset.name);
  if (bytes == 0) return;
  const FileRecord& record = manifest_->rank_file(rank);
  const std::lock_guard lock(checked_mutex_);
  std::vector<bool>& checked = checked_[static_cast<size_t>(rank)];
  checked.resize(record.block_hashes.size());
  const int64_t first = (dataset.offset + begin) / kBlockBytes,
                last = (dataset.offset + begin + bytes - 1) / kBlockBytes;
  try {
    for (int64_t block = first; block <= last; ++block) {
      if (checked[static_cast<size_t>(block)]) continue;
      scratch_.resize(static_cast<size_t>(block_bytes(record, block)));
      read_block(rank, dataset, block, scratch_);
      checked[static_cast<size_t>(block)] = true;
    }
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
}

VerifyReport HashedFiles::verify() const {
  VerifyReport report;
  std::vector<std::byte> buffer(kBlockBytes);
  const auto verify_file = [&](const FileRecord& record, const InputFile& input) {
    if (input.bytes() != record.bytes)
      report.problems.push_back(
          str(record.name, ": found ", input.bytes(), " bytes; expected ", record.bytes,
              input.bytes() > record.bytes ? ": bytes were added at its end" : ": it is cut off"));
    size_t num_bad = 0;
    for (int64_t block = 0; block < num_blocks(std::min(record.bytes, input.bytes())); ++block) {
      const int64_t begin = block * kBlockBytes, end = std::min(begin + kBlockBytes, record.bytes);
      if (end > input.bytes()) break;  // the file ends within this block: reported above
      const auto bytes = std::span(buffer).first(static_cast<size_t>(end - begin));
      input.read_at(begin, bytes);
      ++report.num_blocks;
      report.bytes += end - begin;
      if (hash_block(bytes) != record.block_hashes[static_cast<size_t>(block)] &&
          ++num_bad <= kMaxProblemsPerFile)
        report.problems.push_back(str(record.name, ": block ", block, " (bytes ", begin, " to ", end,
                                      datasets_in(record, begin, end), ") is damaged"));
    }
    if (num_bad > kMaxProblemsPerFile)
      report.problems.push_back(
          str(record.name, ": ", num_bad - kMaxProblemsPerFile, " more damaged blocks"));
  };
  for (size_t index = 0; index < manifest_->files.size(); ++index) {
    const FileRecord& record = manifest_->files[index];
    const size_t num_before = report.problems.size();
    try {
      verify_file(record, *files_.get(static_cast<int>(index)));
    } catch (const DiskError& error) {
      report.problems.push_back(str(record.name, ": ", error.what()));
    }
    report.by_file.push_back(report.problems.size() > num_before ? report.problems[num_before] : "");
  }
  return report;
}

}  // namespace tessera::checkpoint
