#include "core/cuda_plugin.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "core/error.h"
#include "core/str.h"
#include "core/variables.h"

namespace tessera {
namespace {

/// Turns an error of dlopen into advice.
std::string advice(const std::string& path, const std::string& reason) {
  // "libcudnn.so.9: cannot open shared object file: No such file or directory"
  const size_t cut = reason.find(": cannot open shared object file");
  const std::string missing = cut == reason.npos ? "" : reason.substr(0, cut);
  if (!missing.empty() && missing != path) {
    return str("CUDA was asked for, but ", missing,
               ", which libtorch_cuda.so needs, is not installed: "
               "the PyPI packages nvidia-*, dependencies of torch, bring it "
               "(pip install the same torch again, with its dependencies)");
  }
  return str("CUDA was asked for, but ", path, " cannot be loaded (", reason, ")");
}

void* load() {
  const std::string path = cuda_plugin_path();
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw Error("CUDA was asked for, but this program was built without it (", path,
                " does not exist): build where nvcc is installed, with -DTESSERA_CUDA=ON");
  }
  // RTLD_GLOBAL, as for an ordinary dependency: libtorch_cuda registers itself with the libtorch that is
  // loaded.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Error(advice(path, reason != nullptr ? reason : "unknown reason"));
  }
  return handle;
}

}  // namespace

std::string cuda_plugin_path() {
  if (const auto path = text_variable("TESSERA_CUDA_PLUGIN")) return *path;
  std::error_code ignored;
  return (std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "libtessera_cuda.so")
      .string();
}

void* cuda_plugin_symbol(const char* name) {
  static void* const handle = load();  // never unloaded: libtorch keeps pointers into it
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr) {
    throw Error(cuda_plugin_path(), " has no function ", name,
                ": it belongs to another version of this program");
  }
  return symbol;
}

}  // namespace tessera
