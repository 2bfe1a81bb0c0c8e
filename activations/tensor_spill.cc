#include "activations/tensor_spill.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/narrow.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace tessera::activations {
namespace {

/// (bytes) uint8 at an address that direct I/O takes. No operator is heard.
at::Tensor make_buffer(int64_t bytes) {
  const at::DisableRecordFunctionGuard unheard;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor all = at::empty({bytes + SpillFile::kAlignment}, at::kByte);
  const int64_t past =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(all.data_ptr()) % SpillFile::kAlignment);
  return all.narrow(0, past == 0 ? 0 : SpillFile::kAlignment - past, bytes);
}

std::span<std::byte> bytes_of(const at::Tensor& buffer) {
  return {static_cast<std::byte*>(buffer.data_ptr()), static_cast<size_t>(buffer.numel())};
}

}  // namespace

// ------------------------------------------------------------------------------------- places in files

void TensorSpill::add_file(int64_t bytes) {
  int64_t all = 0;
  for (const File& file : files_) all += file.bytes;
  const int64_t size = SpillFile::rounded_up(std::max({bytes, options_.first_file_bytes, all / 2}));
  auto file = std::make_unique<SpillFile>(SpillFileOptions{.directory = options_.directory,
                                                           .bytes = size,
                                                           .purpose = options_.purpose,
                                                           .key = "activation_checkpointing.nvme_path"});
  files_.push_back({std::move(file), size, {{0, size}}});
}

TensorSpill::Place TensorSpill::allocate(int64_t bytes) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (size_t i = 0; i < files_.size(); ++i) {
      std::map<int64_t, int64_t>& free = files_[i].free;
      const auto found =
          std::find_if(free.begin(), free.end(), [&](const auto& gap) { return gap.second >= bytes; });
      if (found == free.end()) continue;
      const auto [offset, size] = *found;
      free.erase(found);
      if (size > bytes) free.emplace(offset + bytes, size - bytes);
      return {static_cast<int>(i), offset, bytes};
    }
    add_file(bytes);
  }
  throw Error("activation_checkpointing: a new file has no room (a bug)");
}

void TensorSpill::give_back(const Place& place) {
  if (place.file < 0) return;
  std::map<int64_t, int64_t>& free = files_[place.file].free;
  auto here = free.emplace(place.offset, place.bytes).first;
  if (const auto next = std::next(here); next != free.end() && here->first + here->second == next->first) {
    here->second += next->second;
    free.erase(next);
  }
  if (here == free.begin()) return;
  if (const auto previous = std::prev(here); previous->first + previous->second == here->first) {
    previous->second += here->second;
    free.erase(here);
  }
}

// -------------------------------------------------------------------------------------------- buffers

/// Takes back the buffers and places of blocks that went while they were transferred.
void TensorSpill::collect_left(bool wait_for_first) {
  while (!leaving_.empty()) {
    Leaving& first = leaving_.front();
    SpillFile& file = *files_[first.place.file].file;
    if (!wait_for_first && !file.done(first.transfer)) return;
    try {
      file.wait(first.transfer);
    } catch (const DiskError&) {  // its tensor is gone
    }
    wait_for_first = false;
    buffered_ -= first.buffer.numel();
    give_back(first.place);
    leaving_.pop_front();
  }
}

/// Waits for the transfer. Afterwards the block is on disk only, or lost if it could not be written.
void TensorSpill::drop_buffer(Block& block) {
  buffered_ -= block.bytes_;
  const at::Tensor buffer = std::exchange(block.buffer_, at::Tensor());
  block.reading_ = false;
  wait(block.place_, block.transfer_);
  block.written_ = true;
}

/// The oldest first: backward needs them last.
void TensorSpill::make_room(int64_t bytes) {
  collect_left(/*wait_for_first=*/false);
  while (buffered_ + bytes > options_.buffer_bytes && !leaving_.empty())
    collect_left(/*wait_for_first=*/true);
  for (const auto& [number, block] : live_) {
    if (buffered_ + bytes <= options_.buffer_bytes) return;
    if (block->buffer_.defined()) drop_buffer(*block);
  }
}

std::shared_ptr<SpillBlock> TensorSpill::write(std::span<const std::byte> data) {
  const std::lock_guard lock(mutex_);
  const int64_t bytes = SpillFile::rounded_up(static_cast<int64_t>(data.size()));
  make_room(bytes);
  auto block = std::make_shared<Block>(shared_from_this(), bytes);
  block->place_ = allocate(bytes);
  const at::Tensor buffer = make_buffer(bytes);
  std::memcpy(buffer.data_ptr(), data.data(), data.size());
  std::memset(static_cast<std::byte*>(buffer.data_ptr()) + data.size(), 0, bytes - data.size());
  block->transfer_ = files_[block->place_.file].file->write(block->place_.offset, bytes_of(buffer));
  block->buffer_ = buffer;
  buffered_ += bytes;
  block->number_ = ++last_number_;
  live_.emplace(block->number_, block.get());
  return block;
}

void TensorSpill::start_reading(Block& block) {
  const at::Tensor buffer = make_buffer(block.bytes_);
  block.transfer_ = files_[block.place_.file].file->read(block.place_.offset, bytes_of(buffer));
  block.buffer_ = buffer;
  block.reading_ = true;
  buffered_ += block.bytes_;
}

void TensorSpill::read_ahead(int64_t before) {
  collect_left(/*wait_for_first=*/false);
  for (auto next = live_.lower_bound(before); next != live_.begin();) {
    Block& block = *(--next)->second;
    if (block.buffer_.defined() || !block.written_ || !block.lent_.expired()) continue;
    if (buffered_ + block.bytes_ > options_.buffer_bytes) return;
    start_reading(block);
  }
}

TensorSpill::Memory TensorSpill::read(Block& block) {
  const std::lock_guard lock(mutex_);
  if (auto lent = block.lent_.lock()) return {c10::Storage(std::move(lent)), block.lent_offset_};
  if (!block.buffer_.defined()) {
    if (!block.written_) wait(block.place_, block.transfer_);  // throws what the write has failed with
    start_reading(block);
  }
  const at::Tensor buffer = block.buffer_;
  SpillFile& file = *files_[block.place_.file].file;
  if (block.reading_ || file.done(block.transfer_)) drop_buffer(block);
  // Else it is being written: the block has the buffer too until that ends.
  block.lent_ = buffer.storage().getWeakStorageImpl();
  block.lent_offset_ = buffer.storage_offset();
  read_ahead(block.number_);
  return {buffer.storage(), block.lent_offset_};
}

int64_t TensorSpill::bytes_reserved() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const File& file : files_) bytes += file.bytes;
  return bytes;
}

int64_t TensorSpill::bytes_in_buffers() const {
  const std::lock_guard lock(mutex_);
  return buffered_;
}

// --------------------------------------------------------------------------------------------- a block

TensorSpill::Block::Block(std::shared_ptr<TensorSpill> spill, int64_t bytes)
    : spill(std::move(spill)), bytes_(bytes) {}

TensorSpill::Block::~Block() {
  const std::lock_guard lock(spill->mutex_);
  spill->live_.erase(number_);
  if (!buffer_.defined()) {
    spill->give_back(place_);
    return;
  }
  spill->leaving_.push_back({std::move(buffer_), place_, transfer_});
  try {
    spill->collect_left(/*wait_for_first=*/false);
  } catch (const Error&) {  // in a forked child, which has no transfers
  }
}

SpilledTensor::SpilledTensor(std::shared_ptr<SpillBlock> block, const at::Tensor& tensor)
    : block(std::move(block)),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      storage_offset(tensor.storage_offset()),
      dtype(tensor.dtype()) {}

at::Tensor SpilledTensor::fetch() const {
  auto [storage, byte_offset] = block->spill->read(*block);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, byte_offset / static_cast<int64_t>(dtype.itemsize()) + storage_offset);
  return tensor;
}

}  // namespace tessera::activations
