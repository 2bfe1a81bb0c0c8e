// What callers of the HDF5 library share: its lock, its identifiers and its reasons. For
// checkpoint/*.cc only: it includes hdf5.h.
//
// HDF5 may be called by one thread at a time only (Debian's build locks itself, others don't), so whoever
// calls it holds Hdf5Library, one process-wide lock.
#pragma once

#include <hdf5.h>

#include <mutex>
#include <string>
#include <utility>

namespace tessera::checkpoint {

/// The right to call HDF5, as long as it lives. Other threads wait. HDF5 prints no errors meanwhile.
class Hdf5Library {
 public:
  Hdf5Library();

 private:
  std::unique_lock<std::mutex> lock_;
};

/// Local. The innermost reason of the last HDF5 failure on this thread.
std::string hdf5_reason();

/// An identifier of HDF5, closed by the function that fits its kind. Not thread-safe.
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
