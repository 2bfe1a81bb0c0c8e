// The names of a checkpoint's files, of the datasets in them that are not a unit's, and of what marks a value
// that JSON lacks.
#pragma once

#include <string>
#include <string_view>

namespace tessera::checkpoint {

/// The key of an object that is a value which JSON does not have (docs/checkpoint_format.md).
inline constexpr const char* kValueTag = "$tessera";

inline constexpr std::string_view kModelFileName = "model.h5";
/// "rank_00003.h5".
std::string rank_file_name(int rank);

/// HDF5 path of a whole tensor, "/buffers/NAME", and of a blob, "/blobs/NAME" (see hdf5_name()).
std::string tensor_dataset(const std::string& name);
std::string blob_dataset(const std::string& name);
/// The inverse of blob_dataset().
std::string blob_name(std::string_view dataset);
bool is_tensor_dataset(std::string_view dataset);
bool is_blob_dataset(std::string_view dataset);

}  // namespace tessera::checkpoint
