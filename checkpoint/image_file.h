// Writes an HDF5 file from its image (hdf5_image.h) and its data, and hashes it in the same pass.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

#include "checkpoint/hdf5_image.h"
#include "checkpoint/manifest.h"
#include "core/disk.h"

namespace tessera::checkpoint {

/// Local. `data[i]` is written at image.offsets[i]. Each block is hashed and then written while it is in the
/// processor's cache, without a copy. Returns name, bytes and hashes; the caller adds the datasets. Throws
/// DiskError.
FileRecord write_image_file(const Disk& disk, const std::filesystem::path& path, const Hdf5Image& image,
                            std::span<const std::span<const std::byte>> data);

}  // namespace tessera::checkpoint
