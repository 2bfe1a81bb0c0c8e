// The CUDA half of train/memory/out_of_memory.cc, in libtessera_cuda.so: see cuda_memory_abi.h.
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <exception>

#include "train/memory/cuda_memory_abi.h"

const char* tessera_cuda_note_failures(TesseraNoteFailure note) {
  try {
    c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver(
        [note](int64_t /*device*/, size_t bytes, size_t total, size_t free) {
          // `total` is less than the device's where per_process_memory_fraction says so.
          note(static_cast<int64_t>(bytes), static_cast<int64_t>(std::min(free, total)),
               static_cast<int64_t>(total));
        });
    return nullptr;
  } catch (const std::exception&) {  // a back end of PYTORCH_ALLOC_CONF that has no observers
    return "this allocator does not tell of failures";
  }
}
