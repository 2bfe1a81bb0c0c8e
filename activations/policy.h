// Which saved tensors are dropped and made again in backward. A policy decides for each tensor that autograd
// saves; what follows from its answer (Fate) is the business of Recording and SavedTensor.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <unordered_set>

namespace tessera::activations {

/// What becomes of a saved tensor between forward and backward.
enum class Fate {
  kKeep,       ///< stays in memory
  kRecompute,  ///< dropped; made again when backward asks for it
  kOffload     ///< written to disk; read back before backward asks for it
};

inline constexpr int64_t kVerifiedEvery = 256;

struct PolicyOptions {
  enum class Kind {
    kCheap,   ///< drop what costs bytes rather than FLOPs, where all that it is made of is kept anyway
    kBlock,   ///< keep what goes into a block (see Blocks); drop the rest of it. Outside of blocks: as kCheap
    kOffload  ///< all results of operators go to disk
  };
  Kind kind = Kind::kCheap;
  int64_t num_blocks = std::numeric_limits<int64_t>::max();  ///< so many blocks count, the first of the model
  /// Returns whether the module of this name is a block. Unset: the blocks are found automatically.
  std::function<bool(const std::string& module)> is_block;
  std::unordered_set<std::string> keep;  ///< operators whose results are never made again ("aten::gelu")
  /// So many first forwards are verified (see [Note: verification] in value.h), and one in kVerifiedEvery
  /// later; 0: none.
  int64_t verify = 1;
  int64_t min_bytes = 4096;           ///< smaller tensors are always kept
  int64_t min_offload_bytes = 16384;  ///< smaller ones are not written to disk
  std::string directory;              ///< for the files of kOffload
  int64_t buffer_bytes = 32 << 20;    ///< of what is being written or was read ahead, in memory
  std::string owner = "a rank";       ///< for messages
};

}  // namespace tessera::activations
