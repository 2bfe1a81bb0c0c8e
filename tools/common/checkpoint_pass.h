// What commands have in common that write a checkpoint again: the progress bar, the checkpoint that is read
// instead where a run removes the one that was chosen, and what is said of the outcome.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "core/dtype.h"
#include "core/log.h"
#include "train/run/run_path.h"

namespace tessera::tools {

inline constexpr int64_t kDefaultShardBytes = 5'000'000'000;  ///< transformers' and DeepSpeed's

/// Does what checkpoint::convert_checkpoint() does, for the path's checkpoint, with a bar named
/// `description`; anew with the next checkpoint if this one is removed meanwhile. Throws what that throws.
checkpoint::ConvertResult convert_with_bar(const std::string& description, const train::RunPath& path,
                                           checkpoint::ConvertOptions options);

/// Prints the notes of a conversion.
void print_notes(const checkpoint::ConvertResult& result);

/// Warns of elements that are infinite in `output`, of the type `dtype`. `advice`: for the end of the line.
void warn_of_overflow(const checkpoint::ConvertResult& result, const std::string& output,
                      std::optional<DType> dtype, const std::string& advice, const Logger& log);

}  // namespace tessera::tools
