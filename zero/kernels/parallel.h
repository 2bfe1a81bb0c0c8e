// torch's intra-op threads over chunks of an array. A file of its own because at::parallel_for is a header
// that only uses threads when it is compiled with OpenMP.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::kernels {

/// Calls visit(first, last) so that the ranges cover chunks [0, num_chunks) once each,
/// concurrently when torch has more than one intra-op thread (at::set_num_threads,
/// OMP_NUM_THREADS) and there is enough to share.
void parallel_chunks(int64_t num_chunks, c10::function_ref<void(int64_t first, int64_t last)> visit);

/// What the calling thread asks of torch runs on it alone from here on. Other threads keep their
/// number, which at::set_num_threads would change for all that begin later. (OpenMP's threads; MKL may keep a
/// number of its own for matrix products.)
void use_one_thread();

}  // namespace tessera::kernels
