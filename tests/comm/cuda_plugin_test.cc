// core/cuda_plugin.h on hosts without CUDA: its errors.
#include "core/cuda_plugin.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "tests/comm/comm_testing.h"

namespace tessera {
namespace {

TEST(CudaPluginTest, SaysWhyItCannotBeLoaded) {
  unsetenv("TESSERA_CUDA_PLUGIN");
  EXPECT_EQ(std::filesystem::path(cuda_plugin_path()).filename(), "libtessera_cuda.so");
  EXPECT_TRUE(std::filesystem::path(cuda_plugin_path()).is_absolute());

  setenv("TESSERA_CUDA_PLUGIN", "/nowhere/libtessera_cuda.so", 1);
  EXPECT_EQ(cuda_plugin_path(), "/nowhere/libtessera_cuda.so");
  EXPECT_EQ(comm::testing::error_of([] { cuda_plugin_symbol("any"); }),
            "CUDA was asked for, but this program was built without it (/nowhere/libtessera_cuda.so does not "
            "exist): "
            "build where nvcc is installed, with -DTESSERA_CUDA=ON");

  // A failure is not remembered: the next attempt looks again.
  const std::string path = (std::filesystem::temp_directory_path() / "tessera_not_a_library.so").string();
  std::ofstream(path) << "not a library";
  setenv("TESSERA_CUDA_PLUGIN", path.c_str(), 1);
  const std::string error = comm::testing::error_of([] { cuda_plugin_symbol("any"); });
  EXPECT_EQ(error.find("CUDA was asked for, but " + path + " cannot be loaded ("), 0u) << error;
  std::filesystem::remove(path);
  unsetenv("TESSERA_CUDA_PLUGIN");
}

}  // namespace
}  // namespace tessera
