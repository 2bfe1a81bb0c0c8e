// This header has what callers of the HDF5 library need: its lock, owned identifiers and error texts. Only
// checkpoint/*.cc may include it, because it includes hdf5.h.
//
// Only one thread at a time may call HDF5 (Debian's build has a lock of its own, others have none), so every
// caller holds Hdf5Library, a process-wide lock.
#pragma once

#include <hdf5.h>

#include <mutex>
#include <string>
#include <utility>

namespace tessera::checkpoint {

/// Holds the process-wide lock during its lifetime, and turns HDF5's error printing off for this thread.
class Hdf5Library {
 public:
  Hdf5Library();

 private:
  std::unique_lock<std::mutex> lock_;
};

/// The innermost message of the last HDF5 error on this thread.
std::string hdf5_reason();

/// Owns an HDF5 identifier and closes it with `close`. Not thread-safe.
class Hdf5Id {
 public:
  using Close = herr_t (*)(hid_t);
  Hdf5Id() = default;
  Hdf5Id(hid_t id, Close close) : id_(id), close_(close) {}
  Hdf5Id(Hdf5Id&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Hdf5Id& operator=(Hdf5Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Hdf5Id() {
    if (id_ >= 0) close_(id_);
  }
  operator hid_t() const { return id_; }  // NOLINT: what HDF5's functions take
  herr_t close() { return close_(std::exchange(id_, -1)); }

 private:
  hid_t id_ = -1;
  Close close_ = nullptr;
};

}  // namespace tessera::checkpoint
