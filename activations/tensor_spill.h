// TensorSpill: memory of saved tensors that lies on disk between forward and backward.
//
// Activations on disk.
// What autograd saves is needed in the reverse order. So a block is copied into a buffer and written from
// there, without waiting; buffers stay after their write, and the oldest leave when their bytes exceed
// `buffer_bytes`: what was saved last is in memory still when backward begins. When a block is fetched, those
// saved before it are read ahead, within the same bytes. The order is that of this forward, so a model may
// take another way at each step. (A rank's state has its own store, zero/offload/offload_store.h: its tensors
// are the same at each step, and their order of use is learnt from the step before.)
//
// The files have no names (see SpillFile). How much is saved is not known before the first forward: a small
// file is reserved at once, so that a folder that cannot be used is noticed before training; others are added
// as they are needed, each at least half as large as all before it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/async_io/spill_file.h"

namespace tessera::activations {

/// Writes saved tensors to a file and reads them back. Thread-safe. The blocks own it; their bytes are
/// multiples of SpillFile::kAlignment.
class TensorSpill : public std::enable_shared_from_this<TensorSpill> {
 public:
  struct Options {
    std::string directory;
    int64_t buffer_bytes = 32 << 20;  ///< in memory at most, but for one block that is larger
    std::string purpose = "saved tensors";
    int64_t first_file_bytes = 64 << 20;
  };
  class Block;

  /// Reserves the first file. Throws DiskError.
  explicit TensorSpill(Options options) : options_(std::move(options)) { add_file(0); }
  TensorSpill(const TensorSpill&) = delete;

  /// A copy of `data`, on its way to the disk. Waits while the buffers are full. Throws DiskError,
  /// also for an earlier block that could not be written.
  std::shared_ptr<Block> write(std::span<const std::byte> data);
  /// Where a block is in memory, while the caller has it. Must not be written to unless the storage has one
  /// owner.
  struct Memory {
    c10::Storage storage;
    int64_t byte_offset = 0;  ///< of the block in it; its address is a multiple of SpillFile::kAlignment
  };
  /// Waits for the block, and reads those saved before it ahead. Throws DiskError, at every call for a
  /// block that could not be written.
  Memory read(Block& block);

  int64_t bytes_reserved() const;  ///< of all files
  int64_t bytes_in_buffers() const;

 private:
  struct Place {
    int file = -1;
    int64_t offset = 0, bytes = 0;
  };
  struct File {
    std::unique_ptr<SpillFile> file;
    int64_t bytes = 0;
    std::map<int64_t, int64_t> free;  // offset -> bytes, apart from each other
  };
  /// What remains of a block that went while it was transferred.
  struct Leaving {
    at::Tensor buffer;
    Place place;
    SpillFile::Transfer transfer;
  };
  Place allocate(int64_t bytes);
  void add_file(int64_t bytes);
  void give_back(const Place& place);
  void wait(const Place& place, SpillFile::Transfer transfer) { files_[place.file].file->wait(transfer); }
  void make_room(int64_t bytes);
  void drop_buffer(Block& block);
  void collect_left(bool wait_for_first);
  void start_reading(Block& block);
  void read_ahead(int64_t before);

  const Options options_;
  mutable std::recursive_mutex mutex_;  // guards what follows, and the blocks
  std::deque<Leaving> leaving_;         // outlives the files
  std::vector<File> files_;
  std::map<int64_t, Block*> live_;  // by number: the order of saving
  int64_t last_number_ = 0;
  int64_t buffered_ = 0;  // bytes
};

class TensorSpill::Block {
 public:
  Block(std::shared_ptr<TensorSpill> spill, int64_t bytes);
  ~Block();
  Block(const Block&) = delete;
  const std::shared_ptr<TensorSpill> spill;

 private:
  friend class TensorSpill;
  const int64_t bytes_;
  int64_t number_ = 0;
  Place place_;
  at::Tensor buffer_;  // undefined: on disk only
  SpillFile::Transfer transfer_ = 0;
  bool reading_ = false;
  bool written_ = false;  // and known to be. Without a buffer: false if the write has failed
  /// The buffer that was given to a reader, while that one has it.
  c10::weak_intrusive_ptr<c10::StorageImpl> lent_{c10::intrusive_ptr<c10::StorageImpl>()};
  int64_t lent_offset_ = 0;
};
using SpillBlock = TensorSpill::Block;

/// A tensor on disk: a view of a block, as the tensor was one of its storage.
struct SpilledTensor {
  std::shared_ptr<SpillBlock> block;
  std::vector<int64_t> sizes, strides;
  int64_t storage_offset = 0;
  caffe2::TypeMeta dtype;

  /// `tensor`: dense, on the CPU; its storage is `block`'s data.
  SpilledTensor(std::shared_ptr<SpillBlock> block, const at::Tensor& tensor);
  /// Returns the tensor without autograd's history. Throws DiskError.
  at::Tensor fetch() const;
};

}  // namespace tessera::activations
