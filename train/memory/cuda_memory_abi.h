// The entry point of cuda_memory.cc, which is part of the CUDA plugin (core/cuda_plugin.h).
#pragma once

#include <cstdint>

extern "C" {

/// Called on the thread whose allocation fails: bytes asked for, and of the device free, and in all.
using TesseraNoteFailure = void (*)(int64_t bytes, int64_t free, int64_t total);

/// libtorch's caching allocator calls `note` at each failure from now on. CUDA is initialised before. Returns
/// null or an error's text.
const char* tessera_cuda_note_failures(TesseraNoteFailure note);
}
