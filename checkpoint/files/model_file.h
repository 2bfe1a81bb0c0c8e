// model.h5: every parameter under its name (and each alias) as an HDF5 virtual dataset over the ranks' files,
// and every buffer as an external link, so that the sharded checkpoint opens as one model:
// h5py.File("model.h5")["encoder.weight"][:].
//
// HDF5 reads missing data of a source file as zeros, without an error. So this file is for inspection only;
// our readers use the offsets and hashes of the manifest.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest/manifest.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// A parameter has a piece for each rank that its unit's shards put it on. A file of more pieces than these
/// has no parameters: HDF5 takes 2 s for 50,000 of them and 40 s for 800,000, at every save.
inline constexpr int64_t kMaxModelFilePieces = 20'000;

/// `buffers`: names of rank 0's whole tensors. Throws DiskError, CheckpointError.
FileRecord write_model_file(const Disk& disk, const std::filesystem::path& path, const SavedLayout& layout,
                            const std::vector<std::string>& buffers);

}  // namespace tessera::checkpoint
