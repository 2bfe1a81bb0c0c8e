#include "checkpoint/manifest/names.h"

#include <algorithm>
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
std::string blob_name(std::string_view dataset) {
  const std::string_view link = dataset.substr(std::min(dataset.size(), kBlobs.size()));
  std::string name;
  for (size_t i = 0; i < link.size(); ++i) {
    const std::string_view code = link.substr(i, 3);
    const char escaped = code == "%2F" ? '/' : code == "%25" ? '%' : code == "%2E" ? '.' : '\0';
    name += escaped != '\0' ? escaped : link[i];
    if (escaped != '\0') i += 2;
  }
  return name;
}
bool is_tensor_dataset(std::string_view dataset) { return dataset.starts_with(kTensors); }
bool is_blob_dataset(std::string_view dataset) { return dataset.starts_with(kBlobs); }

}  // namespace tessera::checkpoint
