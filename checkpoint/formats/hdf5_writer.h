// Writes a full model as HDF5: one contiguous dataset per tensor, for h5py.File(path)["encoder.weight"][:].
#pragma once

#include <memory>

#include "checkpoint/formats/model_writer.h"

namespace tessera::checkpoint {

/// See open_model_writer. Datasets are in the root group under hdf5_name(NAME) (element types: see
/// hdf5_image.h); the other names of a tied tensor are hard links to its dataset. Throws CheckpointError for
/// more than 32 dimensions.
std::unique_ptr<ModelWriter> open_hdf5_file(const Disk& disk, ModelWriterOptions options);

}  // namespace tessera::checkpoint
