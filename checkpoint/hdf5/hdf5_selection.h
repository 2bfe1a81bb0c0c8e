// Which elements of a multi-dimensional dataset a range of row-major positions covers, in the blocks that
// HDF5 can select. For checkpoint/*.cc only: it includes hdf5.h.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::checkpoint {

/// A hyperslab: `start` and `count` by dimension.
struct Hdf5Block {
  std::vector<hsize_t> start, count;
  int64_t numel = 0;
};

/// The blocks of positions [begin, end), counted row by row, in order: at most 2 x dimensions - 1. For
/// a scalar, one block without start and count.
std::vector<Hdf5Block> blocks_of_range(std::span<const int64_t> shape, int64_t begin, int64_t end);

}  // namespace tessera::checkpoint
