// The GPTs that benchmarks train.
#pragma once

#include "examples/language_model/model.h"

namespace tessera::benchmarks {

/// About 5.3 million parameters.
inline GptOptions small_gpt() { return {.vocabulary = 4096}; }
/// 33.7 million parameters: the shape that published comparisons on small machines use.
inline GptOptions gpt_33m() { return {.dim = 512, .layers = 8, .heads = 8, .vocabulary = 8192}; }
/// 110 million parameters.
inline GptOptions gpt_110m() { return {.dim = 768, .layers = 12, .heads = 12, .vocabulary = 16384}; }

}  // namespace tessera::benchmarks
