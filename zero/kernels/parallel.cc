#include "zero/kernels/parallel.h"

#include <ATen/Parallel.h>
#include <omp.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kMinChunksPerThread = 4;  // below that, waking a thread costs more than it saves

}  // namespace

void parallel_chunks(int64_t num_chunks, c10::function_ref<void(int64_t first, int64_t last)> visit) {
  at::parallel_for(0, num_chunks, kMinChunksPerThread, visit);
}

// A thread's first look at its number of threads sets it to the process's; what is set before that would be
// lost. This file and libtorch may each have a note of their own whether it has looked.
void use_one_thread() {
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  omp_set_num_threads(1);
}

}  // namespace tessera::kernels
