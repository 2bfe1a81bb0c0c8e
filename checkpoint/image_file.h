// Writes an HDF5 file from its image (hdf5_image.h) and its data, in one pass, hashing on the way.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

#include "checkpoint/hdf5_image.h"
#include "checkpoint/manifest.h"
#include "core/disk.h"

namespace tessera::checkpoint {

/// Local. `data[i]` is what lies at image.offsets[i]. Each block of the file is hashed and then written
/// while it is in the processor's cache; nothing is copied. Returns name, bytes and hashes; the datasets are
/// the caller's to add. Throws DiskError.
FileRecord write_image_file(const Disk& disk, const std::filesystem::path& path, const Hdf5Image& image,
                            std::span<const std::span<const std::byte>> data);

}  // namespace tessera::checkpoint
