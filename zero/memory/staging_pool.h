// StagingPool: the few buffers that state passes through on its way between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/memory/host_transfer.h"

namespace tessera::zero {

/// Lends buffers that copies between host and device pass through. Owns the buffers that are not lent. Not
/// thread-safe.
class StagingPool {
 public:
  struct Buffer {
    at::Tensor memory = {};         ///< uint8
    comm::EventPtr free = nullptr;  ///< from when on it may be written
    at::Tensor view(int64_t numel, at::ScalarType dtype) const {
      return memory.narrow(0, 0, numel * static_cast<int64_t>(at::elementSize(dtype))).view(dtype);
    }
  };
  /// `allocate`: (bytes) uint8. `num_buffers`: so many are made before one is lent again whose copy runs.
  StagingPool(comm::HostTransfer& transfer, int num_buffers,
              std::function<at::Tensor(int64_t bytes)> allocate)
      : transfer_(transfer), num_buffers_(num_buffers), allocate_(std::move(allocate)) {}

  /// Takes a buffer of at least `bytes`.
  Buffer take(int64_t bytes);
  /// The copy that ends at `buffer.free` is the last that uses it.
  void give_back(Buffer buffer);

 private:
  comm::HostTransfer& transfer_;
  int num_buffers_;
  std::function<at::Tensor(int64_t)> allocate_;
  int num_lent_ = 0;
  std::vector<Buffer> free_;  // given back longest ago first
};

}  // namespace tessera::zero
