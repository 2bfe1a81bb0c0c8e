#include "checkpoint/hdf5/hdf5_selection.h"

#include <utility>

namespace tessera::checkpoint {
namespace {

/// Appends the blocks of positions [begin, end) below the indices `start` of the leading dimensions.
void add_blocks(std::span<const int64_t> shape, std::vector<hsize_t> start, int64_t begin, int64_t end,
                std::vector<Hdf5Block>& blocks) {
  if (begin >= end) return;
  const size_t dim = start.size();
  int64_t inner = 1;  // positions in one step along this dimension
  for (size_t i = dim + 1; i < shape.size(); ++i) inner *= shape[i];
  int64_t first = begin / inner;
  const int64_t last = (end - 1) / inner;
  const auto descend = [&](int64_t row, int64_t from, int64_t to) {
    std::vector<hsize_t> below = start;
    below.push_back(static_cast<hsize_t>(row));
    add_blocks(shape, std::move(below), from, to, blocks);
  };
  if (first == last && end - begin < inner)
    return descend(first, begin % inner, begin % inner + (end - begin));
  if (begin % inner != 0) descend(first++, begin % inner, inner);
  const int64_t full_end = end / inner;
  if (full_end > first) {
    Hdf5Block block{
        .start = start, .count = std::vector<hsize_t>(dim, 1), .numel = (full_end - first) * inner};
    block.start.push_back(static_cast<hsize_t>(first));
    block.count.push_back(static_cast<hsize_t>(full_end - first));
    for (size_t i = dim + 1; i < shape.size(); ++i) {
      block.start.push_back(0);
      block.count.push_back(static_cast<hsize_t>(shape[i]));
    }
    blocks.push_back(std::move(block));
  }
  if (end % inner != 0) descend(full_end, 0, end % inner);
}

}  // namespace

std::vector<Hdf5Block> blocks_of_range(std::span<const int64_t> shape, int64_t begin, int64_t end) {
  if (shape.empty()) return {{.start = {}, .count = {}, .numel = end - begin}};
  std::vector<Hdf5Block> blocks;
  add_blocks(shape, {}, begin, end, blocks);
  return blocks;
}

}  // namespace tessera::checkpoint
