#include "checkpoint/manifest/names.h"

#include <cstdio>

#include "checkpoint/hdf5/hdf5_image.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kTensors = "/buffers/";
constexpr std::string_view kBlobs = "/blobs/";

}  // namespace

std::string rank_file_name(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank_%05d.h5", rank);
  return name;
}

std::string tensor_dataset(const std::string& name) { return str(kTensors, hdf5_name(name)); }
std::string blob_dataset(const std::string& name) { return str(kBlobs, hdf5_name(name)); }
bool is_tensor_dataset(std::string_view dataset) { return dataset.starts_with(kTensors); }
bool is_blob_dataset(std::string_view dataset) { return dataset.starts_with(kBlobs); }

}  // namespace tessera::checkpoint
