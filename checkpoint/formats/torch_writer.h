// Writes the file that torch.save writes for a state_dict. torch.load reads it with weights_only=True and
// mmap=True.
#pragma once

#include <memory>

#include "checkpoint/formats/model_writer.h"

namespace tessera::checkpoint {

/// See open_model_writer and torch_archive.h.
std::unique_ptr<ModelWriter> open_torch_file(const Disk& disk, ModelWriterOptions options);

}  // namespace tessera::checkpoint
