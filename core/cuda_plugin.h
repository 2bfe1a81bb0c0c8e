// The CUDA half of Tessera is a plugin, libtessera_cuda.so: NCCL groups (comm/nccl/nccl_plugin.cc) and fused
// kernels. It links libtorch_cuda.so, so a program that does not use CUDA loads no CUDA library, and the same
// binary runs on hosts without CUDA.
#pragma once

#include <string>

namespace tessera {

/// The address of an `extern "C"` function of the plugin, which is loaded at the first call: from
/// TESSERA_CUDA_PLUGIN (a path) if set, else from the program's own folder. Thread-safe. Never null. Throws
/// Error in one line: built without CUDA, a library of the CUDA wheels missing (which), no such function.
void* cuda_plugin_symbol(const char* name);

/// The same of a function that is declared, with its type, looked for once. decltype only: it is found at run
/// time, never linked.
#define TESSERA_RESOLVE(name)                                                                            \
  ([] {                                                                                                  \
    static const auto entry = reinterpret_cast<decltype(&(name))>(::tessera::cuda_plugin_symbol(#name)); \
    return entry;                                                                                        \
  }())

/// The path from which the plugin is loaded.
std::string cuda_plugin_path();

}  // namespace tessera
