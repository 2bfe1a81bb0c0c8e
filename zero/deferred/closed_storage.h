// Storages whose values are not there yet: shape and size are known, memory comes later, into the same
// StorageImpl, so that all views of it become readable together. In between, whoever asks for the raw pointer
// gets an exception.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

namespace tessera::zero::deferred {

/// Local. Closed, and without memory; otherwise like those that libtorch's allocator for the device makes.
c10::Storage storage_without_memory(size_t bytes, c10::Device device);

/// Local. Allocates the storage's memory, uninitialised.
void give_memory(const c10::Storage& storage);
/// Local. Frees it, and closes the storage.
void drop_memory(const c10::Storage& storage);
/// Local. The storage takes over the other one's memory, which is left empty.
void take_memory(const c10::Storage& storage, const c10::Storage& from);

/// Local. From now on access to the raw pointer throws c10::Error, or works.
void close(const c10::Storage& storage);
void open(const c10::Storage& storage);

/// Local. Whether the storage keeps its memory alive (at::from_blob without a deleter does not).
bool owns_memory(const c10::Storage& storage);

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
