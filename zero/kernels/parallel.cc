#include "zero/kernels/parallel.h"

#include <ATen/Parallel.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kMinChunksPerThread = 4;  // below that, waking a thread costs more than it saves

}  // namespace

void parallel_chunks(int64_t num_chunks, c10::function_ref<void(int64_t first, int64_t last)> visit) {
  at::parallel_for(0, num_chunks, kMinChunksPerThread, visit);
}

}  // namespace tessera::kernels
