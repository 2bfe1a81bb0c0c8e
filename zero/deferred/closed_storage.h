// Storages whose values are not there yet: shape and size are known, memory comes later, into the same
// StorageImpl, so that all views of it become readable together. In between, whoever asks for the raw pointer
// gets an exception.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

namespace tessera::zero::deferred {

/// Closed, and without memory; otherwise like those that libtorch's allocator for the device makes.
c10::Storage storage_without_memory(size_t bytes, c10::Device device);

/// Allocates the storage's memory, uninitialised.
void give_memory(const c10::Storage& storage);
/// Frees it, and closes the storage.
void drop_memory(const c10::Storage& storage);
/// The storage takes over the other one's memory, which is left empty.
void take_memory(const c10::Storage& storage, const c10::Storage& from);

/// From now on access to the raw pointer throws c10::Error, or works.
void close(const c10::Storage& storage);
void open(const c10::Storage& storage);

bool is_closed(const c10::Storage& storage);

/// Whether the storage keeps its memory alive (at::from_blob without a deleter does not).
bool owns_memory(const c10::Storage& storage);
/// Whether libtorch allocated the memory, or mapped it for this process alone. Otherwise somebody else
/// made it (numpy, DLPack, at::from_blob, memory shared with processes), and may write it at any time.
bool is_of_libtorch(const c10::Storage& storage);

// [Note: raw pointers to memory that is there]
// Whoever has a pointer to a tensor's memory (Python: numpy(), data_ptr(), DLPack) may read and write through
// it at any time. libtorch does not say when it hands one out. But memory that copy-on-write clones share
// becomes ordinary memory the moment somebody asks for a pointer to write. So memory that is watched is such
// memory, with one owner: becoming ordinary then copies nothing, and whether it still is watched tells
// whether somebody has a pointer.

/// Does nothing where there is no memory, or not libtorch's.
void watch(const c10::Storage& storage);
void unwatch(const c10::Storage& storage);
/// Whether no pointer was handed out since watch().
bool is_watched(const c10::Storage& storage);

/// Opens a storage for a scope.
class Opened {
 public:
  explicit Opened(c10::Storage storage);
  ~Opened();
  Opened(Opened&& other) noexcept = default;
  Opened(const Opened&) = delete;

 private:
  c10::Storage storage_;
  bool was_closed_ = false;
};

}  // namespace tessera::zero::deferred
