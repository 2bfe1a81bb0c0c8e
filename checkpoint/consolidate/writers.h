// The writers behind convert_checkpoint(). Each writes all of its output, whole or not at all, and fills in
// the result: `output`, `bytes`, what overflowed, its own notes.
#pragma once

#include <vector>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "checkpoint/consolidate/tensor_stream.h"
#include "checkpoint/consolidate/training_state.h"
#include "checkpoint/read/reader.h"

namespace tessera::checkpoint {

struct Conversion {
  const Checkpoint& checkpoint;
  const TrainingState& state;  ///< of targets with optimizer states
  const ConvertOptions& options;
  const Disk& disk;
  ConvertResult& result;
};

/// OUTPUT/TAG_universal, OUTPUT/latest_universal; OUTPUT/latest where there is none.
void write_universal(const Conversion& conversion);
/// OUTPUT/.metadata, OUTPUT/__0_0.distcp.
void write_distributed(const Conversion& conversion);
/// OUTPUT/TAG, OUTPUT/latest.
void write_tessera(const Conversion& conversion);

/// stream_tensors() with the options' progress; notes in the result what overflowed.
void stream_into(const Conversion& conversion, const std::vector<StreamedTensor>& tensors,
                 const std::function<void(size_t tensor, std::span<const std::byte>)>& write);

}  // namespace tessera::checkpoint
